# SPDX-License-Identifier: Apache-2.0
"""Order of waiting requests, and of resident adapters that leases evict."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Protocol, TypeVar


class WaitingView(Protocol):
    """A queued request.  `adapter_uid` None: the base model."""

    @property
    def arrival_s(self) -> float: ...

    @property
    def adapter_uid(self) -> Hashable: ...


class SizedView(Protocol):
    """A queued request of known work."""

    @property
    def num_left(self) -> int:
        """Most tokens still to generate."""
        ...


Waiting = TypeVar("Waiting", bound=WaitingView)
Sized = TypeVar("Sized", bound=SizedView)


def shortest_first(queue: Iterable[Sized]) -> list[Sized]:
    """By tokens left, ties by arrival (InfiniLoRA section 6.1, "S-LoRA w/ SJF")."""
    return sorted(queue, key=lambda request: request.num_left)


def admissible(
    queue: Iterable[Waiting],
    can_be_resident: Callable[[Waiting], bool],
    now_s: float,
    starvation_s: float,
    keeps_from_others: Callable[[Waiting], bool] | None = None,
) -> Iterator[Waiting]:
    """Requests that may start, first come first served; skips adapters without a place.

    can_be_resident: the adapter is or can be on the device now; called once per adapter.  A request skipped
    for over starvation_s stops younger requests, except by keeps_from_others: the adapter has an unused place
    for its own users only.
    """
    turned_away: set[Hashable] = set()
    may_pass: dict[Hashable, bool] = {}
    starving = False
    for request in queue:
        uid = request.adapter_uid
        if starving and uid not in may_pass:
            may_pass[uid] = keeps_from_others is not None and keeps_from_others(request)
        if uid not in turned_away and may_pass.get(uid, True) and can_be_resident(request):
            yield request
            continue
        turned_away.add(uid)
        if now_s - request.arrival_s > starvation_s:
            if keeps_from_others is None:
                return
            starving = True


class ResidentView(Protocol):
    """A resident adapter."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def last_used_s(self) -> float: ...


Resident = TypeVar("Resident", bound=ResidentView)


_last_used_s = attrgetter("last_used_s")


def least_recently_used(residents: Iterable[Resident]) -> Resident | None:
    """The least recently used idle adapter, adapters of queued requests last; or None."""
    idle = [view for view in residents if not view.num_running]
    unwanted = [view for view in idle if not view.num_waiting]
    return min(unwanted or idle, key=_last_used_s, default=None)


def by_recency(residents: Iterable[Resident]) -> list[Resident]:
    """Idle adapters in the order of `least_recently_used`."""
    idle = [view for view in residents if not view.num_running]
    return sorted(idle, key=lambda view: (view.num_waiting > 0, view.last_used_s))
