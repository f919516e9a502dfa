# SPDX-License-Identifier: Apache-2.0
"""Prompts on host workers: when they begin there, from which layers on, how a step's tokens are divided."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError
from moe_lora.policies.admission.host_start import (
    HostLoads,
    HostStart,
    enough_workers,
    fair_shares,
    load_order,
)
from moe_lora.timing.host_times import ColdAdapter, HostTimes, PartTime

ADAPTER = ColdAdapter(lora_rank=8, num_bytes=4.0)


def times(*, worker: PartTime, device: PartTime, load_s: float = 4.0, num_layers: int = 4) -> HostTimes:
    """An adapter of rank 8 takes load_s to load."""
    return HostTimes(
        worker={"q+k+v": worker, "o": PartTime()},
        device=device,
        num_layers=num_layers,
        load_fixed_s=0.0,
        load_bytes_per_s=ADAPTER.num_bytes / load_s,
        bytes_per_rank=0.5,
        max_tokens=512,
        max_rank=8,
    )


def start(host_s: float, device_s: float, load_s: float, num_layers: int = 4) -> HostStart:
    """A layer of any prompt takes host_s on one worker, and device_s on the device."""
    found = times(
        worker=PartTime(fixed_s=host_s),
        device=PartTime(fixed_s=device_s),
        load_s=load_s,
        num_layers=num_layers,
    )
    return HostStart(times=found, num_workers=1, tokens_per_worker=1000)


def test_time_of_a_worker_is_that_of_the_sites_with_deltas():
    found = times(
        worker=PartTime(fixed_s=1.0, per_token_s=0.5, per_rank_s=0.25, per_token_rank_s=0.125),
        device=PartTime(fixed_s=1.0),
    )
    assert found.worker_s(2, ADAPTER) == 1 + 2 * 0.5 + 8 * 0.25 + 2 * 8 * 0.125
    assert found.worker_s(2, replace(ADAPTER, targets=("o",))) == 0
    assert found.worker_s(2, replace(ADAPTER, targets=("v", "o"))) == found.worker_s(2, ADAPTER)
    assert found.worker_s(0, ADAPTER) == 0
    assert found.load_s(ADAPTER) == found.load_s(found.adapter(8)) == 4.0


@pytest.mark.parametrize(
    ("worker", "device", "c"),
    [
        (PartTime(fixed_s=1, per_token_s=1), PartTime(fixed_s=11), 10),
        (PartTime(fixed_s=1, per_token_s=1), PartTime(fixed_s=11, per_token_s=0.5), 20),
        (PartTime(fixed_s=1, per_token_s=1), PartTime(per_token_s=2), 512),
        (PartTime(fixed_s=7, per_token_s=1), PartTime(fixed_s=3), 7),
        (PartTime(fixed_s=7), PartTime(fixed_s=3), 512),
    ],
)
def test_c_is_what_a_worker_computes_in_time(worker, device, c):
    """The last two are never in time: pieces are then as long as half of their time is work."""
    assert times(worker=worker, device=device).tokens_per_worker(8) == c


def test_workers_take_pieces_of_c_in_turn():
    found = times(worker=PartTime(per_token_s=1.0), device=PartTime(fixed_s=2.0))
    rule = HostStart(times=found, num_workers=2, tokens_per_worker=10)
    assert rule.layer_s(1, ADAPTER) == 2.0, "the device is slower"
    assert rule.layer_s(10, ADAPTER) == 10.0
    assert rule.layer_s(20, ADAPTER) == 10.0, "each has a piece"
    assert rule.layer_s(30, ADAPTER) == 20.0, "one has two"


def test_prompt_goes_to_the_device_as_layers_come():
    """Layers 1, 2, 3 come after 1, 2, 3 s, the first one last: it alone is the host's, for 3 s."""
    rule = start(host_s=3.0, device_s=1.0, load_s=4.0)
    assert rule.first_group(9, ADAPTER) == 1
    assert rule.extra_s(9, ADAPTER, 4.0, 1) == 2.0
    assert rule.pays(9, ADAPTER, 4.0, 1)
    assert rule.pays(9, ADAPTER, 2.0, 1)
    assert not rule.pays(9, ADAPTER, 1.9, 1), "the rest of the load is shorter"
    assert not rule.pays(9, ADAPTER, 0.0, 1), "it may be there at any moment"


def test_first_group_is_computed_while_the_rest_comes():
    """A layer takes 3 s to load and 1 s either way: 13 of 40 can come in the meantime."""
    rule = start(host_s=1.0, device_s=1.0, load_s=120.0, num_layers=40)
    assert rule.first_group(9, ADAPTER) == 27
    assert [*load_order(6, 2)] == [2, 3, 4, 5, 0, 1]
    assert [*load_order(3, 3)] == [0, 1, 2]


seconds = st.floats(0.01, 10)


@given(host_s=seconds, device_s=seconds, load_s=st.floats(0.01, 200), num_layers=st.integers(1, 24))
def test_no_other_first_group_is_quicker(host_s, device_s, load_s, num_layers):
    rule = start(host_s, device_s, load_s, num_layers)
    group = rule.first_group(9, ADAPTER)
    assert 1 <= group <= num_layers
    assert sorted(load_order(num_layers, group)) == list(range(num_layers))
    chosen_s = rule.extra_s(9, ADAPTER, load_s, group)
    for other in range(1, num_layers + 1):
        assert chosen_s <= rule.extra_s(9, ADAPTER, load_s, other) + 1e-6


@given(host_s=seconds, device_s=seconds, load_s=st.floats(0.01, 200), left=st.floats(0, 1))
def test_starting_is_chosen_only_if_the_token_comes_no_later(host_s, device_s, load_s, left):
    """Whatever the times are, who goes by the rule is no later than who always waits."""
    rule = start(host_s, device_s, load_s)
    left_s = left * load_s
    if rule.pays(9, ADAPTER, left_s, 1):
        assert rule.extra_s(9, ADAPTER, left_s, 1) <= left_s
    assert 0 <= rule.start_s(9, ADAPTER) <= load_s * (1 + 1e-12)


def test_rows_of_others_make_starting_dearer():
    found = times(worker=PartTime(per_token_s=0.1), device=PartTime(fixed_s=1.0))
    rule = HostStart(times=found, num_workers=1, tokens_per_worker=10)
    assert rule.pays(10, ADAPTER, 2.0, 1)
    assert not rule.pays(10, ADAPTER, 2.0, 1, on_host=30)


def test_break_even():
    found = times(worker=PartTime(per_token_s=0.1), device=PartTime(fixed_s=1.0))
    rule = HostStart(times=found, num_workers=1, tokens_per_worker=1000)
    tokens = rule.break_even_tokens(ADAPTER)
    assert tokens is not None
    assert rule.pays_at_once(tokens - 1, ADAPTER)
    assert not rule.pays_at_once(tokens, ADAPTER)
    assert start(host_s=0.0, device_s=1.0, load_s=4.0).break_even_tokens(ADAPTER) is None
    load_s = rule.break_even_load_s(30, ADAPTER)
    for factor, pays in ((0.97, False), (1.03, True)):
        rate = ADAPTER.num_bytes / (factor * load_s)
        other = replace(rule, times=replace(found, load_bytes_per_s=rate))
        assert other.pays_at_once(30, ADAPTER) is pays


def test_rows_of_a_step_are_those_that_the_workers_compute_in_time_or_the_budget_allows():
    """Four layers; a worker takes 1 s for a row of one, the device 2 s for any number.  Pieces of 4 to three
    workers: up to 4 rows one works as many seconds, of 5 to 8 and 9 to 12 rows each has 4 at most."""
    found = times(worker=PartTime(per_token_s=1.0), device=PartTime(fixed_s=2.0))
    rule = HostStart(times=found, num_workers=3, tokens_per_worker=4)
    assert rule.tokens_per_step(2048) == 12
    for budget_s, num_tokens in ((8.0, 2), (12.0, 3), (15.9, 3), (16.0, 12), (32.0, 24), (1e9, 2048)):
        assert replace(rule, tpot_budget_s=budget_s).tokens_per_step(2048) == num_tokens
    with pytest.raises(ConfigError, match=r"host_tpot_budget_ms=7900: .* takes 8e\+03; give more than that"):
        replace(rule, tpot_budget_s=7.9).tokens_per_step(2048)


@given(
    budget_s=st.floats(0.5, 50.0),
    row_s=st.floats(0.0, 1.0),
    fixed_s=st.floats(0.0, 1.0),
    c=st.integers(1, 9),
    num_workers=st.integers(1, 4),
)
def test_no_step_on_the_host_takes_longer_than_its_budget(budget_s, row_s, fixed_s, c, num_workers):
    worker, device = PartTime(fixed_s=fixed_s, per_token_s=row_s), PartTime(fixed_s=0.1)
    found = times(worker=worker, device=device)
    rule = HostStart(times=found, num_workers=num_workers, tokens_per_worker=c, tpot_budget_s=budget_s)
    adapter = found.adapter(found.max_rank)
    try:
        most = rule.tokens_per_step(64)
    except ConfigError:
        assert rule.layer_s(1, adapter) * 4 > budget_s
        return
    assert all(4 * rule.layer_s(number, adapter) <= budget_s * (1 + 1e-9) for number in range(1, most + 1))
    assert most == 64 or 4 * rule.layer_s(most + 1, adapter) > budget_s * (1 - 1e-9), "it is the most"


def test_loads_wait_for_each_other():
    loads = HostLoads(start(host_s=3.0, device_s=1.0, load_s=4.0), 2048)
    loads.begin("a", ADAPTER, 9, 10.0, under_way=False)
    loads.begin("b", ADAPTER, 9, 11.0, under_way=False)
    loads.begin("a", ADAPTER, 9, 13.0, under_way=True)
    assert not loads.pays("a", 9, 0, 13.0), "a second is left"
    assert loads.pays("b", 9, 0, 13.0), "five are"
    loads.end("a", 13.0)
    loads.end("b", 14.0)
    loads.begin("c", ADAPTER, 9, 14.0, under_way=False)
    assert loads.pays("c", 9, 0, 15.9)
    assert not loads.pays("c", 9, 0, 16.1)


def test_without_a_profile_prompts_always_begin():
    loads = HostLoads(None, 2048)
    loads.begin("a", ADAPTER, 9, 0.0, under_way=False)
    assert loads.pays("a", 10**6, 10**6, 0.0)
    assert loads.first_group("a") == 1


def test_enough_workers_are_those_of_a_step_on_the_cores_there_are():
    good = times(worker=PartTime(per_token_s=0.1), device=PartTime(fixed_s=1.0))
    assert enough_workers(good, 10, ADAPTER, max_tokens=75, num_cores=64) == 8
    assert enough_workers(good, 10, ADAPTER, max_tokens=75, num_cores=3) == 3
    assert enough_workers(good, 10, ADAPTER, max_tokens=75, num_cores=0) == 0
    slow = times(worker=PartTime(fixed_s=9.0), device=PartTime(fixed_s=1.0))
    assert enough_workers(slow, 10, ADAPTER, max_tokens=75, num_cores=3) == 0, "waiting is quicker"


@pytest.mark.parametrize(
    "bad",
    [
        *({"num_layers": value} for value in (0, 10**9)),
        *({"load_bytes_per_s": value} for value in (0.0, 1e-308, 1e308, math.inf)),
        *({"bytes_per_rank": value} for value in (1e308, math.inf)),
        *({"load_fixed_s": value} for value in (math.nan, 1e308, math.inf)),
    ],
)
def test_times_that_can_not_be_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        replace(times(worker=PartTime(), device=PartTime()), **bad)
    for value in (-1, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"per_token_s={value} must be a number of seconds from 0 to"):
            PartTime(per_token_s=value)


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([100, 4], 12, [8, 4]),
        ([100, 100], 12, [6, 6]),
        ([100, 100, 2], 12, [5, 5, 2]),
        ([5, 5, 5], 8, [3, 3, 2]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([3, 4], 12, [3, 4]),
        ([], 12, []),
    ],
)
def test_long_prompts_leave_shorter_ones_their_share(wanted, total, shares):
    assert fair_shares(wanted, total) == shares


@given(wanted=st.lists(st.integers(0, 1000), max_size=8), total=st.integers(0, 2000))
def test_shares_are_max_min_fair(wanted, total):
    shares = fair_shares(wanted, total)
    assert sum(shares) == min(total, sum(wanted)), "all that is wanted and there"
    for share, want in zip(shares, wanted, strict=True):
        assert 0 <= share <= want
        assert share == want or share >= max(shares) - 1
