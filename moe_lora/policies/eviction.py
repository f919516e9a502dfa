"""Which resident adapter leaves the device when another needs its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class ResidentView(Protocol):
    """A resident adapter as eviction sees it."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def last_used_s(self) -> float: ...


Resident = TypeVar("Resident", bound=ResidentView)


def least_recently_used(residents: Iterable[Resident]) -> Resident | None:
    """The idle adapter unused for longest, those that queued requests wait for last; None if all run."""
    idle = [view for view in residents if view.num_running == 0]
    return min(idle, key=lambda view: (view.num_waiting > 0, view.last_used_s), default=None)
