# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from moe_lora.policies.admission.admission import admissible, shortest_first


@dataclass
class Waiting:
    name: str
    arrival_s: float
    adapter_uid: int | None


QUEUE = [Waiting("a1", 0.0, 1), Waiting("b1", 1.0, 2), Waiting("a2", 2.0, 1), Waiting("base", 3.0, None)]


def started(can_be_resident, now_s: float = 4.0, starvation_s: float = 10.0) -> list[str]:
    return [r.name for r in admissible(QUEUE, can_be_resident, now_s, starvation_s)]


def test_all_start_in_order_when_every_adapter_has_a_place():
    assert started(lambda request: True) == ["a1", "b1", "a2", "base"]


def test_request_whose_adapter_finds_no_place_is_passed_over():
    assert started(lambda request: request.adapter_uid != 1) == ["b1", "base"]


def test_an_adapter_is_asked_for_once_when_it_was_turned_away():
    asked = []

    def refuse_first(request: Waiting) -> bool:
        asked.append(request.name)
        return request.adapter_uid != 1

    started(refuse_first)
    assert asked == ["a1", "b1", "base"]


def test_starving_request_stops_younger_ones():
    assert started(lambda request: request.adapter_uid != 1, starvation_s=3.5) == []
    assert started(lambda request: request.adapter_uid != 2, starvation_s=2.5) == ["a1"]


def test_starving_request_lets_those_pass_who_keep_a_place_from_others():
    asked = []

    def keeps(request: Waiting) -> bool:
        asked.append(request.name)
        return request.adapter_uid == 3

    names = ("a1", 1), ("c1", 3), ("base", None), ("b1", 2), ("c2", 3), ("a2", 1)
    queue = [Waiting(name, 0.0, uid) for name, uid in names]
    may_start = admissible(queue, lambda request: request.adapter_uid != 1, 4.0, 3.0, keeps)
    assert [request.name for request in may_start] == ["c1", "c2"]
    assert asked == ["c1", "base", "b1", "a2"]


@dataclass
class Sized:
    name: str
    num_left: int


def test_shortest_first_keeps_arrival_order_among_equals():
    queue = [Sized("long", 9), Sized("first", 2), Sized("second", 2), Sized("short", 1)]
    assert [r.name for r in shortest_first(queue)] == ["short", "first", "second", "long"]
