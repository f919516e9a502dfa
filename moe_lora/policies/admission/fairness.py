# SPDX-License-Identifier: Apache-2.0
"""Whose waiting request starts next, where tenants compete for one instance.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24 (virtual token counter), with the
weights of its section 4.4.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

PREFILL_COST, DECODE_COST = 1.0, 2.0
"""Of a prompt's token that is computed, and of one that is generated: the paper's."""


class CompetingView(Protocol):
    """A queued request whose tenant competes.

    share: the tenant's weight.  priority: within the tenant; lower goes first.  matched: it was admitted
    before, and goes before all that were not, unless it gave way to another tenant.
    """

    @property
    def tenant(self) -> str: ...

    @property
    def share(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def matched(self) -> bool: ...

    @property
    def gave_way(self) -> bool: ...


Competing = TypeVar("Competing", bound=CompetingView)


class VirtualTokenCounter:
    """Counts what each tenant was given, by weight; the one with least goes first.

    A tenant none of whose requests waited begins with at least the least of those that wait (or with what the
    last one had that did), less `credit`: nobody saves up more turns than that by being away.  Without it
    (credit 0, the paper's) the second of two requests that come together to a full instance waits until all
    others have been given as much as the first one took, however little its tenant asked for before.  The
    least of those that wait is taken as it was without their own credit: credit adds up with nobody's.

    With U = (PREFILL_COST x tokens of the longest prompt + DECODE_COST x requests that run at once x tokens
    of the longest answer + credit) / the least share, the counters of tenants whose requests wait differ by
    U at most, and what two tenants got per share while requests of both waited by 2 U (as theorem 4.4):
    however much one of them asks for.  Only where requests start in this order: those that find no place for
    their adapter, or start again after a preemption, do not.

    Counters are kept, two numbers for each tenant that key files ever named: without them a tenant would come
    back with what it was given forgotten.
    """

    def __init__(self, credit: float = 0.0, first: str = "", given: float = 0.0) -> None:
        """given: what the tenant `first` got before the other tenants came."""
        self._credit = credit
        self.counters: defaultdict[str, float] = defaultdict(float, {first: given} if given else {})
        self._levels: defaultdict[str, float] = defaultdict(float)
        """Where each tenant began, without its credit."""
        self._waiting: Counter[str] = Counter()
        self._last = first
        """The tenant that was the last to wait."""

    def enqueue(self, tenant: str, share: float) -> None:
        """One more of its requests waits."""
        if tenant not in self._waiting:
            others = self._waiting or (self._last,)
            level = min(max(self.counters[other], self._levels[other]) for other in others)
            self.counters[tenant] = max(self.counters[tenant], level - self._credit / share)
            self._levels[tenant] = level
        self._waiting[tenant] += 1

    def dequeue(self, tenant: str) -> None:
        """One of them has started, or left."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def prefill(self, tenant: str, share: float, num_tokens: int) -> None:
        """A request starts whose prompt has so many tokens to compute."""
        self.counters[tenant] += PREFILL_COST * num_tokens / share

    def decode(self, tenant: str, share: float) -> None:
        """A request gained a token."""
        self.counters[tenant] += DECODE_COST / share

    def order(self, queue: Iterable[Competing]) -> Iterator[Competing]:
        """The queue as it is to start: those that did before, then by tenant, within one by priority, then as
        they came.  Looks at the counters anew for each, since who takes one counts it.
        """
        lanes: dict[str, deque[Competing]] = {}
        for request in queue:
            if request.matched and not request.gave_way:
                yield request
            else:
                lanes.setdefault(request.tenant, deque()).append(request)
        for tenant, lane in lanes.items():
            if len({request.priority for request in lane}) > 1:
                lanes[tenant] = deque(sorted(lane, key=lambda request: request.priority))
        while len(lanes) > 1:
            tenant = min(lanes, key=lambda one: (self.counters[one], lanes[one][0].gave_way))
            yield lanes[tenant].popleft()
            if not lanes[tenant]:
                del lanes[tenant]
        for lane in lanes.values():
            yield from lane

    def borrowed(
        self, waiting: Iterable[Competing], running: Sequence[Competing], num_others: Counter[str], slots: int
    ) -> list[Competing]:
        """Who of those that run are to make room, where all slots are taken.

        A tenant that waits and is next, and has less than its share of the slots, gets those that a tenant
        has beyond its own: who alone used the instance waits for nothing, and who comes waits for no answer
        of another's to end.  running: in the order in which they began; the first one stays.
        num_others: slots of each tenant beside these.
        """
        if not self._waiting or len(self._waiting.keys() | {one.tenant for one in running}) < 2:
            return []
        held = Counter(one.tenant for one in running) + num_others
        shares = {one.tenant: one.share for one in chain(waiting, running)}
        each = slots / sum(shares.values())
        num_waiting, found, giving = Counter(self._waiting), [], reversed(running[1:])
        while num_waiting:
            tenant = min(num_waiting, key=lambda one: (self.counters[one], held[one]))
            if held[tenant] + 1 > each * shares.get(tenant, 0.0):
                break
            giver = next((one for one in giving if held[one.tenant] > each * shares[one.tenant]), None)
            if giver is None:
                break
            found.append(giver)
            held[giver.tenant] -= 1
            held[tenant] += 1
            num_waiting[tenant] -= 1
            if not num_waiting[tenant]:
                del num_waiting[tenant]
        return found
