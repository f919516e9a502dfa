# SPDX-License-Identifier: Apache-2.0
"""What holds for every simulated system."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.provision.replayed.running import RunningRequests
from moe_lora.provision.replayed.system import System, simulate
from tests.sim.systems import asked, coupled, served, server

GOLDEN = Path(__file__).parent / "golden_stamps.json"

requests_of = st.lists(
    st.tuples(
        st.floats(0.0, 3.0).map(lambda moment: round(moment, 3)),
        st.sampled_from([None, "a", "b", "c", "d", "e"]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=40,
).map(lambda rows: asked(*sorted(rows, key=lambda row: row[0]), prompt_tokens=5))


@st.composite
def systems(draw):
    limits = {
        "num_instances": draw(st.integers(1, 3)),
        "load_s": draw(st.sampled_from([0.0, 0.03, 0.4])),
        "max_num_seqs": draw(st.integers(1, 5)),
        "kv_tokens": draw(st.sampled_from([None, 17, 40])),
        "prefill": draw(st.sampled_from([None, StageTime(), StageTime(fixed_s=0.01, per_row_s=0.004)])),
        "max_num_batched_tokens": 8,
        "shortest_first": draw(st.booleans()),
    }
    capacity, starvation_s = draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.5, 100.0]))
    if draw(st.booleans()):
        config = coupled(capacity, **limits)
        return replace(config, adapters=replace(config.adapters, starvation_s=starvation_s))
    control_s = draw(st.sampled_from([0.0, 0.02, 0.3]))
    return served(server(capacity, starvation_s=starvation_s, control_s=control_s), **limits)


def most_at_once(spans):
    """Most weights added up at any moment; ends come before starts."""
    changes = sorted(
        (moment, sign * weight) for *pair, weight in spans for moment, sign in zip(pair, (1, -1), strict=True)
    )
    return max(np.cumsum([change for _, change in changes]), default=0)


@settings(max_examples=150, deadline=None)
@given(config=systems(), requests=requests_of)
def test_every_request_ends_once_with_stamps_in_order_and_no_limit_is_passed(config, requests):
    system = System(config)
    system.replay(requests)
    assert sorted(request.index for request in system.requests) == list(range(len(requests)))
    for request in system.requests:
        assert request.arrival_s <= request.admitted_s <= request.first_token_s <= request.finish_s
        assert request.decode_ttft_s >= 0
    for instance in system.instances:
        assert instance.outstanding_tokens == 0
        own = [request for request in system.requests if request.instance == instance.index]
        assert most_at_once([(r.admitted_s, r.finish_s, 1) for r in own]) <= config.instance.max_num_seqs
        if config.instance.kv_tokens is not None:
            spans = [(r.admitted_s, r.finish_s, r.num_tokens) for r in own]
            assert most_at_once(spans) <= config.instance.kv_tokens


@settings(max_examples=100, deadline=None)
@given(config=systems(), requests=requests_of)
def test_no_slot_is_given_twice(config, requests):
    groups = {}
    for request in simulate(config, requests).requests:
        if request.adapter is not None:
            cache = 0 if hasattr(config.adapters, "num_stages") else request.instance
            spans = groups.setdefault(cache, {}).setdefault(request.adapter, [])
            spans.append((request.admitted_s, request.finish_s))
    for adapters in groups.values():
        moments = {moment for spans in adapters.values() for span in spans for moment in span}
        for moment in moments:
            held = sum(any(start <= moment < end for start, end in spans) for spans in adapters.values())
            assert held <= config.adapters.capacity


@settings(max_examples=100, deadline=None)
@given(config=systems(), requests=requests_of)
def test_requests_of_one_adapter_start_in_the_order_in_which_they_came(config, requests):
    config = replace(config, instance=replace(config.instance, shortest_first=False))
    lines = {}
    for request in sorted(simulate(config, requests).requests, key=lambda request: request.index):
        lines.setdefault((request.instance, request.adapter), []).append(request.admitted_s)
    assert all(admitted == sorted(admitted) for admitted in lines.values())


def both_ways(monkeypatch, config, seed):
    """The same requests in stretches of steps, and step by step."""
    rng = np.random.default_rng(seed)
    rows = zip(
        np.sort(rng.uniform(0, 8, 60)), rng.choice(list("abcde"), 60), rng.integers(1, 30, 60), strict=True
    )
    requests = asked(*[(float(t), str(name), int(n)) for t, name, n in rows], prompt_tokens=5)
    together = simulate(config, requests)
    monkeypatch.setattr(RunningRequests, "steps_alike", lambda self: 1)
    one_by_one = simulate(config, requests)
    assert together.events.num_events < one_by_one.events.num_events
    return together, one_by_one


def by_index(result, name):
    return result.column(name)[np.argsort(result.column("index"))]


PROFILE = StepProfile(
    attention=StageTime(fixed_s=0.02, per_row_s=0.0013), lora=StageTime(fixed_s=0.017, per_row_s=0.0007)
)
LIMITS = {"load_s": 0.07, "max_num_seqs": 6, "profile": PROFILE, "max_num_batched_tokens": 12}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("prefill", [None, StageTime(fixed_s=0.01, per_row_s=0.004)])
@pytest.mark.parametrize("remote", [False, True])
def test_steps_taken_together_are_the_steps_taken_one_by_one(seed, prefill, remote, monkeypatch):
    limits = LIMITS | {"num_instances": 3, "prefill": prefill}
    place = server(3, control_s=0.003, num_stages=4)
    config = served(place, **limits) if remote else coupled(2, **limits)
    together, one_by_one = both_ways(monkeypatch, config, seed)
    assert together.num_steps == one_by_one.num_steps
    # A load brings instances into step, so that whether a lease comes before or after a step is rounding; a
    # step in which a request waits for that load ends alike.
    names = ["instance", "first_token_s", "decode_ttft_s", "finish_s", *([] if remote else ["admitted_s"])]
    for name in names:
        assert by_index(together, name) == pytest.approx(by_index(one_by_one, name), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_others_lengthen_are_planned_anew_when_the_others_change(seed, monkeypatch):
    # A busy server brings its instances into step too; here that moves steps by a row's time.
    config = served(server(3, control_s=0.003), num_instances=3, **LIMITS)
    together, one_by_one = both_ways(monkeypatch, config, seed)
    assert together.end_s == pytest.approx(one_by_one.end_s, rel=0.01)
    finished = [np.sort(result.column("finish_s")).mean() for result in (together, one_by_one)]
    assert finished[0] == pytest.approx(finished[1], rel=0.01)


def test_instances_never_keep_each_other_waiting_with_leases_that_none_uses():
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0, 20, 800))
    names = rng.choice([f"adapter-{i}" for i in range(30)], 800)
    requests = asked(*[(float(t), str(name), 5) for t, name in zip(arrivals, names, strict=True)])
    config = served(server(4, starvation_s=0.5, control_s=0.01), num_instances=4, max_num_seqs=2)
    assert len(simulate(config, requests).requests) == 800


def golden_run():
    rng = np.random.default_rng(7)
    rows = zip(
        np.sort(rng.uniform(0, 4, 24)), rng.choice(list("abcde"), 24), rng.integers(1, 15, 24), strict=True
    )
    requests = asked(*[(float(t), str(name), int(n)) for t, name, n in rows])
    config = served(server(2, control_s=0.001), num_instances=2, load_s=0.25, max_num_seqs=3)
    return [
        [r.index, r.instance, r.at_once, *(round(t, 9) for t in (r.admitted_s, r.first_token_s, r.finish_s))]
        for r in simulate(config, requests).requests
    ]


def test_a_fixed_workload_gives_the_recorded_stamps():
    assert golden_run() == json.loads(GOLDEN.read_text())


def test_unsorted_arrivals_are_refused():
    with pytest.raises(ValueError, match="time_s"):
        simulate(coupled(1), asked((2.0, None, 1), (1.0, None, 1)))


def test_a_request_of_no_token_is_refused():
    with pytest.raises(ValueError, match="output_tokens=0"):
        simulate(coupled(1), asked((0.0, None, 0)))
