# SPDX-License-Identifier: Apache-2.0
"""Tenants get what their shares say, whoever asks for more."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.policies.admission.fairness import DECODE_COST, PREFILL_COST, VirtualTokenCounter

SLOTS, LONGEST_PROMPT, LONGEST_ANSWER = 3, 40, 8


@dataclass(eq=False)
class Asked:
    tenant: str
    share: float = 1.0
    priority: int = 0
    prompt: int = 1
    answer: int = 1
    matched: bool = False
    gave_way: bool = False


class Server:
    """Continuous batching of SLOTS requests; `given` is what each tenant had, by weight."""

    def __init__(self, credit: float = 0.0) -> None:
        self.policy = VirtualTokenCounter(credit)
        self.queue: list[Asked] = []
        self.running: list[Asked] = []
        self.given: defaultdict[str, float] = defaultdict(float)

    def add(self, request: Asked) -> None:
        self.queue.append(request)
        self.policy.enqueue(request.tenant, request.share)

    def step(self) -> set[str]:
        """Start what has room, then a token for each; the tenants that wait all through."""
        if len(self.running) < SLOTS:
            for request in self.policy.order(list(self.queue)):
                self.queue.remove(request)
                self.policy.dequeue(request.tenant)
                self.policy.prefill(request.tenant, request.share, request.prompt)
                self.given[request.tenant] += PREFILL_COST * request.prompt / request.share
                self.running.append(request)
                if len(self.running) == SLOTS:
                    break
        waiting = {request.tenant for request in self.queue}
        for request in list(self.running):
            self.policy.decode(request.tenant, request.share)
            self.given[request.tenant] += DECODE_COST / request.share
            request.answer -= 1
            if not request.answer:
                self.running.remove(request)
        return waiting


def bound(shares: dict[str, float], credit: float = 0.0) -> float:
    longest = PREFILL_COST * LONGEST_PROMPT + DECODE_COST * SLOTS * LONGEST_ANSWER
    return (longest + credit) / min(shares.values())


TENANTS = ("a", "b", "c")
SHARES = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 1.0, 2.0, 5.0]) for name in TENANTS})
ARRIVALS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER)),
        max_size=6,
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(shares=SHARES, arrivals=ARRIVALS, credit=st.sampled_from([0.0, 7.0, 100.0]))
def test_the_theorems_bound_holds(shares, arrivals, credit):
    server, most = Server(credit), bound(shares, credit)
    since: dict[tuple[str, str], list[float]] = {}
    for coming in itertools.chain(arrivals, [[]] * 40):
        for tenant, prompt, answer in coming:
            server.add(Asked(tenant, shares[tenant], prompt=prompt, answer=answer))
        waiting = server.step()
        counters = [server.policy.counters[tenant] for tenant in waiting]
        if counters:
            assert max(counters) - min(counters) <= most + 1e-6
        for pair in itertools.combinations(TENANTS, 2):
            if not set(pair) <= waiting:
                since.pop(pair, None)
                continue
            leads = since.setdefault(pair, [])
            leads.append(server.given[pair[0]] - server.given[pair[1]])
            assert max(leads) - min(leads) <= 2 * most + 1e-6


def test_the_bound_is_one_that_arrival_order_breaks():
    """So that the test above says something: first come first served gives the greedy one everything."""
    server, shares = Server(), {"a": 1.0, "b": 1.0}
    server.policy.order = iter  # type: ignore[method-assign]
    for _ in range(300):
        server.add(Asked("a", prompt=40, answer=8))
    server.add(Asked("b", prompt=40, answer=8))
    for _ in range(200):
        server.step()
    assert server.given["b"] == 0
    assert server.given["a"] > 2 * bound(shares)


@settings(max_examples=20, deadline=None)
@given(shares=SHARES)
def test_those_who_always_ask_get_their_shares(shares):
    server = Server()
    for _ in range(400):
        for tenant in TENANTS:
            while sum(one.tenant == tenant for one in server.queue) < 2 * SLOTS:
                server.add(Asked(tenant, shares[tenant], prompt=7, answer=4))
        server.step()
    given_tokens = [server.given[tenant] for tenant in TENANTS]
    assert max(given_tokens) - min(given_tokens) <= 2 * bound(shares)


@pytest.mark.parametrize("credit", [0.0, 30.0])
def test_nobody_saves_up_turns_by_being_away_but_the_credit(credit):
    server = Server(credit)
    for _ in range(60):
        server.add(Asked("busy", prompt=10, answer=4))
    for _ in range(30):
        server.step()
    before = server.given["busy"]
    for _ in range(60):
        server.add(Asked("away", prompt=10, answer=4))
    assert server.policy.counters["away"] == server.policy.counters["busy"] - credit
    for _ in range(30):
        server.step()
    assert abs(server.given["away"] - (server.given["busy"] - before)) <= bound({"away": 1.0}, credit)


def test_credit_is_never_added_to_anothers():
    policy = VirtualTokenCounter(credit=2048)
    policy.enqueue("busy", 1.0)
    policy.prefill("busy", 1.0, 100_000)
    for number in range(10):
        policy.enqueue(f"new{number}", 1.0)
    assert {policy.counters[f"new{number}"] for number in range(10)} == {100_000 - 2048}
    for number in range(10):  # they are gone, the last one as little charged as it came
        policy.dequeue(f"new{number}")
    policy.dequeue("busy")
    policy.enqueue("after", 1.0)
    assert policy.counters["after"] == 100_000 - 2048


def test_credit_of_a_tiny_share_is_nobody_elses():
    policy = VirtualTokenCounter(credit=2048)
    policy.enqueue("busy", 1.0)
    policy.prefill("busy", 1.0, 3_000_000)
    policy.enqueue("tiny", 1e-3)
    policy.enqueue("next", 1.0)
    assert policy.counters["tiny"] == 3_000_000 - 2_048_000
    assert policy.counters["next"] == 3_000_000 - 2048
    policy.dequeue("next")
    policy.dequeue("busy")
    policy.dequeue("tiny")
    policy.enqueue("after", 1.0)
    assert policy.counters["after"] == 3_000_000 - 2048


def test_with_credit_two_requests_that_come_together_start_together():
    for credit, tenants in ((0.0, ["new", "busy", "new"]), (50.0, ["new", "new", "busy"])):
        policy = VirtualTokenCounter(credit)
        queue = [Asked("busy", prompt=20), Asked("new", prompt=20), Asked("new", prompt=20)]
        policy.enqueue("busy", 1.0)
        policy.prefill("busy", 1.0, 100)
        policy.enqueue("new", 1.0)
        policy.prefill("busy", 1.0, 10)
        found = []
        for one in policy.order(queue):
            policy.prefill(one.tenant, one.share, one.prompt)
            found.append(one.tenant)
        assert found == tenants


def test_one_tenants_requests_start_as_they_came_by_priority():
    policy = VirtualTokenCounter()
    queue = [Asked("", priority=priority, prompt=prompt) for prompt, priority in enumerate((0, 5, -1, 0))]
    again = Asked("", priority=9, matched=True)
    assert [one.prompt for one in policy.order([*queue[:2], again, *queue[2:]])][1:] == [2, 0, 3, 1]
    assert next(policy.order([*queue, again])) is again
    alike = [Asked("") for _ in range(5)]
    assert list(policy.order(alike)) == alike


def test_a_priority_moves_nobody_elses_request():
    policy = VirtualTokenCounter()
    policy.prefill("a", 1.0, 5)
    queue = [Asked("a", priority=-100), Asked("b", priority=100)]
    assert [one.tenant for one in policy.order(queue)] == ["b", "a"]


def test_who_is_passed_over_is_asked_again_only_when_all_else_was():
    """A request that finds no place is not charged: its tenant's next one comes, then other tenants'."""
    policy = VirtualTokenCounter()
    queue = [Asked("a", prompt=1), Asked("a", prompt=2), Asked("b", prompt=3)]
    for request in queue:
        policy.enqueue(request.tenant, request.share)
    assert [one.prompt for one in policy.order(queue)] == [1, 2, 3]


def slots(
    policy: VirtualTokenCounter, waiting: str, running: str, num_slots: int, **shares: float
) -> list[str]:
    """Which slots of `running` go to those of `waiting`; a letter is a tenant's request."""
    requests = [[Asked(name, shares.get(name, 1.0)) for name in names] for names in (waiting, running)]
    for request in requests[0]:
        policy.enqueue(request.tenant, request.share)
    found = policy.borrowed(requests[0], requests[1], Counter(), num_slots)
    return [f"{one.tenant}{requests[1].index(one)}" for one in found]


def test_borrowed_slots_are_returned_to_who_has_less_than_its_share():
    assert slots(VirtualTokenCounter(), "b", "aaaa", 4) == ["a3"], "the youngest"
    assert slots(VirtualTokenCounter(), "b", "aaab", 4) == ["a2"]
    assert slots(VirtualTokenCounter(), "b", "aabb", 4) == [], "it has its share"
    assert slots(VirtualTokenCounter(), "a", "aaaa", 4) == [], "nobody else wants one"
    assert slots(VirtualTokenCounter(), "b", "aaab", 4, a=3.0) == []
    assert slots(VirtualTokenCounter(), "b", "abbb", 4, a=1.0, b=7.0) == [], "less than a slot is over"
    assert slots(VirtualTokenCounter(), "c", "aaabbb", 6) == ["b5"]
    assert slots(VirtualTokenCounter(), "bbb", "aaaa", 4) == ["a3", "a2"], "two are its share"
    assert slots(VirtualTokenCounter(), "cccc", "aaabbb", 6) == ["b5", "a2"]
    assert slots(VirtualTokenCounter(), "b", "a", 1) == [], "the first one stays"


def test_who_was_given_most_gets_no_slot_back():
    policy = VirtualTokenCounter()
    policy.prefill("b", 1.0, 100)
    assert slots(policy, "ab", "aaaa", 4) == [], "a is next"
