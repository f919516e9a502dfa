# SPDX-License-Identifier: Apache-2.0
"""The sliding window, what the model says of it, and when the capacity follows."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.records import Outlook
from moe_lora.core.request import RequestTiming
from moe_lora.provision.admission.corrected import corrected_admissibility_rate
from moe_lora.provision.admission.iar import immediate_admissibility_rate
from moe_lora.provision.online import AT_ONCE_S, Demand, DemandWindow, outlook, resized
from tests.virtual_clock import VirtualClock


def timing(prefill_s: float = 0.0, adapter_wait_s: float = 0.0) -> RequestTiming:
    return RequestTiming(
        queue_s=1.0,
        adapter_load_s=0.0,
        prefill_s=prefill_s,
        first_decode_s=0.0,
        adapter_wait_s=adapter_wait_s,
    )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def window(clock) -> DemandWindow:
    """60 s in six buckets."""
    return DemandWindow(clock, 60.0, 6)


def counts(window: DemandWindow) -> list[int]:
    return sorted(window.demand().counts.tolist())


def test_requests_are_counted_by_adapter_and_leave_with_their_bucket(window, clock):
    for adapter in "aab":
        window.begin(adapter)
    clock.advance(25.0)
    window.begin("b")
    assert counts(window) == [2, 2]
    clock.advance(34.9)  # 59.9 s: the bucket from 0 to 10 s is the sixth back
    assert counts(window) == [2, 2]
    clock.advance(0.2)
    assert counts(window) == [1]
    clock.advance(20.0)
    assert counts(window) == []


def test_requests_that_could_not_run_do_not_count(window, clock):
    window.begin("a")
    wrong = window.begin("nobody")
    clock.advance(15.0)
    wrong.refuse()
    assert counts(window) == [1]
    late = window.begin("nobody")
    clock.advance(1000.0)
    late.refuse()
    assert counts(window) == []
    assert window.demand().global_batch == 0.0


def test_global_batch_is_the_mean_number_in_service(window, clock):
    one, other = window.begin("a"), window.begin("b")
    clock.advance(4.0)  # both wait, or are being prefilled
    assert window.demand().global_batch == 0.0
    one.start()
    clock.advance(8.0)
    other.start()
    clock.advance(8.0)
    one.end(timing(prefill_s=2.0))
    other.end(timing(prefill_s=3.0))
    # one: 2 + 16 s, other: 3 + 8 s, of 20 s
    assert window.demand().global_batch == pytest.approx(29 / 20)
    clock.advance(20.0)
    assert window.demand().global_batch == pytest.approx(29 / 40)


def test_global_batch_forgets_what_left_the_window(window, clock):
    visit = window.begin("a")
    visit.start()
    clock.advance(35.0)
    visit.end(timing())
    clock.advance(30.0)  # 65 s: the window begins at 10 s, 25 of its 55 s are busy
    assert window.demand().global_batch == pytest.approx(25 / 55)


def test_a_request_longer_than_the_window_fills_it(window, clock):
    window.begin("a").start()
    clock.advance(1000.0)
    assert window.demand().global_batch == pytest.approx(1.0)
    assert counts(window) == []


def test_a_request_aborted_before_it_started_adds_no_service(window, clock):
    visit = window.begin("a")
    clock.advance(10.0)
    visit.end(timing(prefill_s=5.0))
    assert window.demand().global_batch == 0.0
    assert window.demand().num_timed == 0


def test_share_admitted_at_once_is_of_requests_that_ended_and_said_so(window, clock):
    for account in (timing(), timing(adapter_wait_s=AT_ONCE_S), timing(adapter_wait_s=1.0), None):
        visit = window.begin("a")
        visit.start()
        visit.end(account)
    demand = window.demand()
    assert (demand.num_at_once, demand.num_timed) == (2, 3)
    clock.advance(100.0)
    assert window.demand().num_timed == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 40), st.sampled_from("abc"), st.floats(0, 30), st.booleans()), max_size=40
    )
)
def test_window_agrees_with_a_count_of_everything(events):
    """(pause before it, adapter, seconds in service, whether it ends at once) of each request in turn."""
    clock = VirtualClock()
    window = DemandWindow(clock, 60.0, 6)
    arrivals: list[tuple[float, str]] = []
    stretches: list[tuple[float, float]] = []
    for pause_s, adapter, service_s, serves in events:
        clock.advance(pause_s)
        visit = window.begin(adapter)
        arrivals.append((clock.now_s(), adapter))
        if serves:
            visit.start()
            begin_s = clock.now_s()
            clock.advance(service_s)
            stretches.append((begin_s, clock.now_s()))
        visit.end(timing())
    now_s = clock.now_s()
    begin_s = max(0.0, (int(now_s / 10.0) - 5) * 10.0)
    kept = [adapter for arrival_s, adapter in arrivals if arrival_s >= begin_s]
    assert counts(window) == sorted(kept.count(adapter) for adapter in set(kept))
    busy_s = sum(max(0.0, end - max(start, begin_s)) for start, end in stretches)
    if now_s > begin_s:
        assert window.demand().global_batch == pytest.approx(busy_s / (now_s - begin_s), abs=1e-6)


def seen(counts: list[int], global_batch: float, at_once: int = 0, timed: int = 0) -> Demand:
    return Demand(
        counts=np.array(counts, dtype=np.int64),
        global_batch=global_batch,
        num_at_once=at_once,
        num_timed=timed,
    )


def test_outlook_is_the_solvers_answer_for_the_shares_seen():
    demand = seen([60, 30, 10], 2.0, at_once=3, timed=4)
    found = outlook(demand, 2, 0.999)
    assert found.predicted_iar == corrected_admissibility_rate([0.6, 0.3, 0.1], 2.0, 2)
    assert found.predicted_iar_paper == immediate_admissibility_rate([0.6, 0.3, 0.1], 2.0, 2)
    assert found.expected_active == pytest.approx(3 - np.exp(-1.2) - np.exp(-0.6) - np.exp(-0.2))
    assert (found.needed_capacity, found.suffices) == (3, False)
    assert (found.num_requests, found.num_adapters, found.measured_iar) == (100, 3, 0.75)
    assert outlook(demand, 3, 0.999).suffices


def test_capacity_that_only_the_papers_model_takes_for_enough_does_not_suffice():
    counts = np.rint(1e6 * np.arange(1, 513) ** -1.2).astype(int)
    found = outlook(seen(counts.tolist(), 1840.0), 200, 0.95)
    assert found.predicted_iar < 0.92 < 0.95 <= found.predicted_iar_paper
    assert not found.suffices
    assert found.needed_capacity > 200
    assert outlook(seen(counts.tolist(), 1840.0), found.needed_capacity, 0.95).suffices


def test_pools_that_admit_for_themselves_share_the_requests():
    demand = seen([5] * 20, 12.0)
    alone, shared = outlook(demand, 4, 0.9), outlook(demand, 4, 0.9, num_pools=3)
    assert shared.predicted_iar == outlook(seen([5] * 20, 4.0), 4, 0.9).predicted_iar > alone.predicted_iar
    assert shared.global_batch == 12.0


@pytest.mark.parametrize("demand", [seen([], 0.0), seen([3], 0.0), seen([], 1.0)])
def test_without_requests_in_service_everything_is_admitted(demand):
    found = outlook(demand, 1, 0.95)
    assert (found.predicted_iar, found.needed_capacity, found.measured_iar) == (1.0, 1, None)


def test_window_of_a_skewed_load_needs_less_than_that_of_a_uniform_one(window, clock):
    rng = random.Random(1)
    found = []
    for hot in (0.9, 0.0):
        for _ in range(600):
            visit = window.begin("hot" if rng.random() < hot else f"adapter-{rng.randrange(30)}")
            visit.start()
            clock.advance(0.1)
            visit.end(timing(prefill_s=0.7))
        found.append(outlook(window.demand(), 6, 0.95))
    assert [one.suffices for one in found] == [True, False]
    assert found[0].needed_capacity < 6 < found[1].needed_capacity


BASE = Outlook(
    num_requests=100,
    num_adapters=10,
    global_batch=4.0,
    expected_active=3.0,
    capacity=20,
    predicted_iar=0.99,
    predicted_iar_paper=0.99,
    measured_iar=None,
    target_iar=0.95,
    needed_capacity=20,
)


@pytest.mark.parametrize(
    ("capacity", "needed", "wanted"),
    [
        (20, 21, 24),  # falls short: a tenth more than needed
        (20, 20, 20),
        (20, 16, 20),  # a quarter too many is no reason
        (20, 15, 17),
        (3, 2, 3),
        (4, 2, 3),
        (100, 30, 33),
    ],
)
def test_capacity_follows_with_a_margin(capacity, needed, wanted):
    found = dataclasses.replace(
        BASE, capacity=capacity, needed_capacity=needed, predicted_iar=0.99 if capacity >= needed else 0.9
    )
    assert resized(found, min_capacity=1, max_capacity=1000) == wanted
    settled = dataclasses.replace(found, capacity=wanted, predicted_iar=0.99)
    assert resized(settled, min_capacity=1, max_capacity=1000) == wanted, "it stays there"


def test_capacity_keeps_to_its_bounds_and_to_what_is_known():
    short = dataclasses.replace(BASE, needed_capacity=50, predicted_iar=0.5)
    assert resized(short, min_capacity=1, max_capacity=30) == 30
    ample = dataclasses.replace(BASE, needed_capacity=2)
    assert resized(ample, min_capacity=8, max_capacity=30) == 8
    silent = dataclasses.replace(ample, num_requests=0)
    assert resized(silent, min_capacity=8, max_capacity=30) == 20
