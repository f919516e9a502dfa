# SPDX-License-Identifier: Apache-2.0
"""A simulated instance with the real cache: hand-worked stamps, and what holds under every policy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from bench.cache.conversations import DialogueShape, dialogues
from bench.sim.cached_runs import simulate_cached
from moe_lora.core.errors import CapacityError
from moe_lora.policies.admission.host_start import HostStart
from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.sim.instance import CachedConfig, CachedInstance
from moe_lora.sim.requests import PARTS
from moe_lora.timing.host_times import HostTimes, PartTime
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import TurnRequest

STEP_S, COPY_S = 0.1, 20e-6
EVEN_STEPS = TransformerTime(
    num_params=1e-3,
    num_layers=1,
    hidden_size=0,
    kv_token_bytes=10,
    flops_per_s=1e6,
    bytes_per_s=math.inf,
    fixed_s=STEP_S,
)
"""Every step takes 0.1 s; a page of 10 tokens has 100 bytes."""


def config_of(*, num_adapters=2, **changes):
    common = {
        "time": EVEN_STEPS,
        "adapter_pages": {f"a{i}": 4 for i in range(num_adapters)},
        "num_device_pages": 100,
        "num_host_pages": 100,
        "link_bytes_per_s": 1000.0,  # an adapter in 0.4 s
        "block_size": 10,
    }
    return CachedConfig(**common | changes)


def asked(*rows):
    """(arrival_s, adapter, prompt, number of answer tokens)."""
    ids = itertools.count(10**6)
    return [
        TurnRequest(index, arrival_s, adapter, tuple(prompt), tuple(itertools.islice(ids, num_tokens)))
        for index, (arrival_s, adapter, prompt, num_tokens) in enumerate(rows)
    ]


def simulated(requests, policy="lru", **changes):
    config = config_of(**changes)
    result = simulate_cached(config, make_caching_policy(policy, config.costs()), requests)
    return sorted(result.done, key=lambda request: request.planned.index), result


def test_first_request_waits_for_its_adapter_and_then_a_step_per_token():
    (request,), result = simulated(asked((1.0, "a0", range(25), 3)))
    assert request.queue_s == pytest.approx(0.0)
    assert request.adapter_cold_s == pytest.approx(0.4 + COPY_S)
    assert request.first_token_s == pytest.approx(1.5 + COPY_S)
    assert request.finish_s == pytest.approx(1.7 + COPY_S)
    assert request.tpot_s == pytest.approx(STEP_S)
    assert result.links.busy_s[0] == pytest.approx(0.4 + COPY_S)


def test_requests_of_the_base_model_wait_for_no_adapter():
    base, beside = simulated(asked((0.0, None, range(25), 3), (0.0, "a0", range(25), 3)))[0]
    assert (base.adapter_cold_s, base.finish_s) == (0.0, pytest.approx(0.3, abs=1e-4))
    assert beside.adapter_cold_s == pytest.approx(0.4 + COPY_S)


def test_others_compute_while_one_waits_for_its_bytes():
    alone, _ = simulated(asked((0.0, "a0", range(25), 20)))
    both, _ = simulated(asked((0.0, "a0", range(25), 20), (1.0, "a1", range(100, 125), 2)))
    assert both[0].finish_s == pytest.approx(alone[0].finish_s, abs=1e-5)
    assert both[1].adapter_cold_s >= 0.4


def test_copies_of_one_direction_take_their_turn():
    first, second = simulated(asked((0.0, "a0", range(25), 1), (0.0, "a1", range(25), 1)))[0]
    assert first.adapter_cold_s == pytest.approx(0.4 + COPY_S)
    assert second.adapter_cold_s >= 0.8


def test_next_turn_computes_only_what_is_new():
    """23 + 9 tokens were computed, the last of the answer never: three full blocks."""
    question = tuple(range(23))
    first = asked((0.0, "a0", question, 10))[0]
    second = TurnRequest(1, 5.0, "a0", question + first.answer + tuple(range(500, 510)), (1, 2))
    other = TurnRequest(2, 6.0, "a1", second.prompt, (1, 2))
    requests, _ = simulated([first, second, other])
    assert [request.num_cached for request in requests] == [0, 30, 0]
    requests, _ = simulated([first, second], policy="slora")
    assert [request.num_cached for request in requests] == [0, 0]


def test_long_prompts_are_computed_in_chunks():
    (request,), result = simulated(asked((0.0, "a0", range(250), 1)), max_num_batched_tokens=100)
    assert result.num_steps == 3
    assert request.prefill_s == pytest.approx(3 * STEP_S, abs=1e-5)


def many(rate_per_s=2.0, duration_s=60.0):
    shape = DialogueShape(
        prefix_tokens=20, turns=4, question_tokens=30, answer_tokens=10, think_s=3.0, max_tokens=300
    )
    adapters = zipf([f"a{i}" for i in range(6)], 1.0)
    return dialogues(shape, adapters, rate_per_s=rate_per_s, duration_s=duration_s)


@pytest.mark.parametrize("policy", CACHING_POLICIES)
def test_every_request_ends_with_stamps_in_order_however_little_room_there_is(policy):
    requests = many()
    room = {"num_device_pages": 80, "num_host_pages": 100, "link_bytes_per_s": 1e4}
    done, result = simulated(requests, policy, num_adapters=6, **room)
    assert len(done) == len(requests)
    assert result.scheduler.num_preemptions or result.cache.counters.adapter_evictions
    for request in done:
        assert request.tokens == [*request.planned.prompt, *request.planned.answer]
        parts = [getattr(request, f"{part}_s") for part in PARTS]
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(request.ttft_s)
        assert request.first_token_s <= request.finish_s
    summary = result.summary()
    assert sum(summary[f"{part}_ms"] for part in PARTS) == pytest.approx(summary["ttft_ms"])
    assert 0 < summary["device_usage"] <= 1
    if policy not in ("lru", "static", "slora", "fastlibra-wom"):
        assert summary["invalid_kv_share"] == 0


def test_equal_arguments_give_equal_results():
    one, other = (
        simulated(many(), "cost-aware", num_adapters=6, link_bytes_per_s=1e4)[1].summary() for _ in range(2)
    )
    assert one == other


@pytest.mark.parametrize("upper", [0.5, 0.9])
def test_no_more_of_the_device_stays_in_use_than_the_upper_threshold(upper):
    requests = asked(*((float(i), "a0", range(1000 * i, 1000 * i + 50), 1) for i in range(30)))
    _, result = simulated(requests, "fastlibra", upper=upper, lower=0.3)
    used = 100 - result.samples[-1]["device_free"]
    assert 100 * upper - 10 < used <= 100 * upper + 10


def test_overload_can_be_given_up():
    config = config_of(num_adapters=6, link_bytes_per_s=1e4)
    policy = make_caching_policy("lru", config.costs())
    result = simulate_cached(config, policy, many(rate_per_s=50.0), max_waiting=20)
    assert result.aborted
    assert len(result.done) < len(many(rate_per_s=50.0))


def test_a_request_that_never_finds_room_is_named():
    with pytest.raises(CapacityError, match="request 0 alone has no room; raise num_device_pages"):
        simulated(asked((0.0, "a0", range(50), 2)), num_device_pages=8)


def test_a_step_is_bound_by_compute_or_by_what_it_reads():
    time = TransformerTime(
        num_params=1e9,
        num_layers=10,
        hidden_size=100,
        kv_token_bytes=1000,
        flops_per_s=1e12,
        bytes_per_s=1e12,
    )
    assert time.step_s(0, 0.0, 0.0, 0.0) == 0.0
    assert time.step_s(1, 0.0, 1e6, 5e8) == pytest.approx((2e9 + 1e9 + 5e8) / 1e12)
    assert time.step_s(1000, 1e6, 0.0, 0.0) == pytest.approx((2e12 + 4e3 * 1e6) / 1e12)
    assert time.prefill_tokens_per_s == pytest.approx(500)


def test_routers_are_told_while_an_adapter_finds_no_room():
    """8 pages: a0 and the first request's KV take 7, and a1 needs 4."""
    config = config_of(num_device_pages=8)
    requests = asked((0.0, "a0", range(25), 3), (0.6, "a1", range(100, 105), 2))
    instance = CachedInstance(config, make_caching_policy("lru", config.costs()), requests)
    told = {}
    for now_s in (0.55, 0.65, 1.5):
        instance.events.at(now_s, lambda now_s=now_s: told.update({now_s: instance.load.has_room("a1")}))
    instance.events.run()
    assert len(instance.done) == 2
    assert told == {0.55: True, 0.65: False, 1.5: True}


def host_rule(num_workers: int, worker_s: float) -> HostStart:
    """A worker takes so long for a token of the only layer; what is loaded is 1000 bytes a second."""
    times = HostTimes(
        worker={"o": PartTime(per_token_s=worker_s)},
        device=PartTime(fixed_s=STEP_S),
        num_layers=1,
        load_fixed_s=0.0,
        load_bytes_per_s=1000.0,
        bytes_per_rank=400.0,
        max_tokens=100,
        max_rank=1,
    )
    return HostStart(times=times, num_workers=num_workers, tokens_per_worker=10)


@pytest.mark.parametrize(
    ("num_workers", "first_token_s"),
    [(1, 1.3), (2, 1.2), (4, 1.1)],
)
def test_prompts_begin_on_host_workers_where_that_is_quicker(num_workers, first_token_s):
    """30 tokens in three pieces of 0.1 s; a load takes 0.4 s, a step 0.1 s.  Decode waits for the load."""
    requests = asked((1.0, "a0", range(30), 3))
    (request,), result = simulated(requests, host=host_rule(num_workers, 0.01))
    assert result.num_host_tokens == 30
    assert request.first_token_s == pytest.approx(first_token_s)
    assert request.finish_s == pytest.approx(1.6 + COPY_S)


@pytest.mark.parametrize(("budget_s", "first_token_s"), [(None, 1.3), (0.15, 1.28)])
def test_rows_on_the_host_beside_others_are_those_that_a_budget_allows(budget_s, first_token_s):
    """28 tokens beside one that decodes, three steps of 0.1 s with at most 10 rows; within 0.15 s a worker
    has two pieces of 7, so two steps of 0.14 s are enough."""
    requests = asked((0.0, "a1", range(5), 30), (0.95, "a0", range(100, 128), 3))
    rule = replace(host_rule(1, 0.01), tpot_budget_s=budget_s)
    (_, cold), result = simulated(requests, host=rule)
    assert result.num_host_tokens == 5 + 28
    assert cold.first_token_s == pytest.approx(first_token_s + COPY_S)


def test_prompts_wait_where_that_is_quicker():
    (request,), result = simulated(asked((1.0, "a0", range(30), 3)), host=host_rule(4, 0.1))
    assert result.num_host_tokens == 0, "pieces of 1 s"
    assert request.first_token_s == pytest.approx(1.5 + COPY_S)
