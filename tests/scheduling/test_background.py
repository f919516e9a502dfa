# SPDX-License-Identifier: Apache-2.0
"""Background requests fill steps without other requests, and change nothing for them."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_lora.core.request import BACKGROUND

from .parts import Parts

PROMPTS = count(0, 1000)


def prompt(length: int) -> range:
    start = next(PROMPTS)
    return range(start, start + length)


def queued(parts: Parts) -> tuple[int, int]:
    """Requests that wait, and background requests in a queue."""
    background = parts.scheduler.background
    return parts.scheduler.num_waiting, 0 if background is None else background.num_queued


def test_a_request_starts_at_once_and_background_requests_go_on_after_it():
    parts = Parts(num_pages=40, max_num_seqs=2, max_num_batched_tokens=8)
    for number in range(3):
        parts.add(f"back{number}", prompt(12), num_answer=6, priority=BACKGROUND)
    for _ in range(4):
        parts.step()
    assert parts.names()[0] == ["back0", "back1"]
    assert queued(parts) == (0, 1)
    parts.add("now", prompt(12), num_answer=3)
    assert queued(parts) == (1, 1)
    assert [parts.step() for _ in range(4)] == [{"now": 8}, {"now": 4}, {"now": 1}, {"now": 1}]
    assert queued(parts) == (0, 3)
    found = set()
    for _ in range(40):
        found |= set(parts.step())
    assert found == {"back0", "back1", "back2"}
    assert parts.names() == ([], [], [])
    assert queued(parts) == (0, 0)


def test_background_requests_stand_behind_requests_that_find_no_adapter_place():
    parts = Parts({"a": 8, "b": 8}, num_pages=12, max_num_seqs=4)
    parts.add("a", prompt(4), "a", num_answer=8)
    parts.add("b", prompt(4), "b", num_answer=2)
    parts.add("back", prompt(4), num_answer=2, priority=BACKGROUND)
    order: list[str] = []
    for _ in range(30):
        order += [name for name in parts.step() if name not in order]
    assert order == ["a", "b", "back"]


def test_background_requests_without_an_adapter_slot_are_not_deferred():
    """Else fewer requests than none wait for room."""
    parts = Parts({"a": 8, "b": 8}, num_pages=12, max_num_seqs=4)
    for name in "ab":
        parts.add(name, prompt(4), name, num_answer=8, priority=BACKGROUND)
    for _ in range(3):
        parts.step()
    assert parts.names()[0] == ["a"]
    assert (*queued(parts), parts.scheduler.num_deferred) == (0, 1, 0)


def test_ended_requests_leave_all_queues():
    parts = Parts(num_pages=40)
    backs = [parts.add(f"back{n}", prompt(4), priority=BACKGROUND) for n in range(2)]
    parts.step()
    first = parts.add("first", prompt(4))
    parts.scheduler.finish(first)
    parts.add("second", prompt(4))
    parts.step()
    assert parts.names()[0] == ["second"]
    for one in backs:
        parts.scheduler.finish(one)
    assert queued(parts) == (0, 0)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 40),  # step
        st.integers(1, 20),  # tokens of the prompt
        st.integers(1, 8),  # tokens of the answer
        st.sampled_from(["", "one", "two"]),
        st.integers(-2, 2),
        st.booleans(),
    ),
    max_size=14,
)


def steps_of(arrivals, *, background: bool) -> list[dict[str, int]]:
    parts = Parts(num_pages=24, max_num_seqs=3, max_num_batched_tokens=12)
    found = []
    for step in range(160):
        for number, (at, length, answer, tenant, priority, is_background) in enumerate(arrivals):
            if at != step or (is_background and not background):
                continue
            place = BACKGROUND if is_background else priority
            start = 1000 * number
            parts.add(
                f"{'back' if is_background else 'now'}{number}",
                range(start, start + length),
                num_answer=answer,
                tenant=tenant,
                priority=place,
            )
        found.append(parts.step())
    assert parts.names() == ([], [], []), "all requests end"
    assert queued(parts) == (0, 0)
    return found


@given(ARRIVALS)
@example(
    [(0, 1, 1, "", 0, True), (0, 1, 1, "one", 0, False), (2, 3, 1, "", 0, False), (2, 10, 1, "one", 0, False)]
)
def test_steps_of_other_requests_are_those_without_background(arrivals):
    alone, both = (steps_of(arrivals, background=one) for one in (False, True))
    for without, beside in zip(alone, both, strict=True):
        mixed = {name for name in beside if name.startswith("back")}
        assert not (mixed and without)
        assert without == ({} if mixed else beside)


@pytest.mark.parametrize("background", [False, True])
def test_a_scheduler_without_background_requests_has_no_part_for_them(background):
    parts = Parts()
    parts.add("one", prompt(4), priority=BACKGROUND if background else 1000)
    parts.add("two", prompt(4), tenant="t")
    assert (parts.scheduler.background is not None) == background
