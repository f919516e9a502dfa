"""Which waiting requests start now."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Protocol, TypeVar


class WaitingView(Protocol):
    """A queued request as admission sees it.  `adapter_uid` None: the base model."""

    @property
    def arrival_s(self) -> float: ...

    @property
    def adapter_uid(self) -> Hashable: ...


class SizedView(Protocol):
    """A queued request whose work is known."""

    @property
    def num_left(self) -> int:
        """Tokens that it will still generate, at most."""
        ...


Waiting = TypeVar("Waiting", bound=WaitingView)
Sized = TypeVar("Sized", bound=SizedView)


def shortest_first(queue: Iterable[Sized]) -> list[Sized]:
    """The queue by tokens left to generate, of equal ones by arrival (oracle SJF where every answer has its
    full length; InfiniLoRA section 6.1, "S-LoRA w/ SJF").
    """
    return sorted(queue, key=lambda request: request.num_left)


def admissible(
    queue: Iterable[Waiting],
    can_be_resident: Callable[[Waiting], bool],
    now_s: float,
    starvation_s: float,
) -> Iterator[Waiting]:
    """Requests that may start, first come first served; one whose adapter finds no place is passed over.

    can_be_resident: whether the request's adapter is on the device or could be brought in now; asked once
    per adapter.  A request passed over for longer than starvation_s ends the scan: running requests
    drain, and the slot that falls free is its own.
    """
    turned_away: set[Hashable] = set()
    for request in queue:
        if request.adapter_uid not in turned_away and can_be_resident(request):
            yield request
            continue
        turned_away.add(request.adapter_uid)
        if now_s - request.arrival_s > starvation_s:
            return
