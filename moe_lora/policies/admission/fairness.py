# SPDX-License-Identifier: Apache-2.0
"""Fair order of waiting requests between tenants of one instance.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24 (section 4.4).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

PREFILL_COST, DECODE_COST = 1.0, 2.0
"""Cost of a computed prompt token, and of a generated token."""


class CompetingView(Protocol):
    """A queued request of a tenant.

    priority: within the tenant; lower first.  matched: admitted before, and first in the order, unless it
    gave way.
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
    """Counts service per tenant, by weight; the tenant of least service goes first.

    A returning tenant starts at the least counter of waiting tenants, less `credit` (0 in the paper).  U =
    (PREFILL_COST x tokens of the longest prompt + DECODE_COST x concurrent requests x tokens of the longest
    answer + credit) / the least share.  Service per share of two waiting tenants differs by at most 2 U
    (theorem 4.4), except for requests without an adapter place or after a preemption.
    """

    def __init__(self, credit: float = 0.0, first: str = "", given: float = 0.0) -> None:
        """given: service of the tenant `first` before other tenants came."""
        self._credit = credit
        self.counters: defaultdict[str, float] = defaultdict(float, {first: given} if given else {})
        self._levels: defaultdict[str, float] = defaultdict(float)
        """Start of each tenant, without credit."""
        self._waiting: Counter[str] = Counter()
        self._last = first

    def enqueue(self, tenant: str, share: float) -> None:
        """One more request waits."""
        if tenant not in self._waiting:
            others = self._waiting or (self._last,)
            level = min(max(self.counters[other], self._levels[other]) for other in others)
            self.counters[tenant] = max(self.counters[tenant], level - self._credit / share)
            self._levels[tenant] = level
        self._waiting[tenant] += 1

    def dequeue(self, tenant: str) -> None:
        """A request has started, or left."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def prefill(self, tenant: str, share: float, num_tokens: int) -> None:
        """A request with num_tokens prompt tokens to compute starts."""
        self.counters[tenant] += PREFILL_COST * num_tokens / share

    def decode(self, tenant: str, share: float) -> None:
        """A request gained a token."""
        self.counters[tenant] += DECODE_COST / share

    def order(self, queue: Iterable[Competing]) -> Iterator[Competing]:
        """The queue in starting order: matched first, then by tenant, priority, arrival.

        Starts change the counters between requests.
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
        """Running requests to stop when all slots are taken.

        The next tenant, if below its share of slots, gets slots beyond another's share.  running: by start;
        the first stays.
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
