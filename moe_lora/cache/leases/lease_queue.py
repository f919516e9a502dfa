# SPDX-License-Identifier: Apache-2.0
"""The queue for leases, and the order among tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.admission.admission import ResidentView, admissible
from moe_lora.policies.caching.arena_shares import ArenaShares
from moe_lora.policies.caching.caching import BEYOND, NOBODY, WITHIN

if TYPE_CHECKING:
    from .residency import ServedAdapter

_ROUNDING = 1e-9
_NO_OWNER = -1


class ServedView(ResidentView, Protocol):
    """owner: the tenant.  room: [K], see `Standing`."""

    @property
    def owner(self) -> int: ...

    @property
    def room(self) -> tuple[int, ...]: ...


Served = TypeVar("Served", bound=ServedView)


class Standing(Generic[Served]):
    """Tenants' holdings, and the adapters evictable for a tenant.

    Idle adapters beyond shares go first; within shares, only for a tenant within its share or without an
    adapter in use.  residents: [N].  totals: [K], places, then pages of each rank.
    """

    def __init__(
        self, shares: ArenaShares, residents: Sequence[Served], totals: Sequence[float], now_s: float
    ) -> None:
        self._shares, self._totals, self._now_s = shares, totals, now_s
        owners = np.array([one.owner for one in residents], np.int64)
        rooms = np.array([one.room for one in residents], np.int64).reshape(len(residents), len(totals))
        in_use = np.array([one.num_running > 0 for one in residents], bool)
        self._held = [shares.held(owners, room) for room in rooms.T]
        used = [shares.held(owners[in_use], room) for room in rooms[in_use].T]
        # Lists: quicker for single tenants.
        self._used_by: list[list[float]] = [each.tolist() for each in used]
        self._held_by: list[list[float]] = [each.tolist() for each in self._held]
        self._parts: list[list[float]] = np.outer(totals, shares.portions(now_s)).tolist()
        self._owners, self._rooms = owners[~in_use], rooms[~in_use]
        self._idle_owners = set(self._owners.tolist())
        idle = self._leavers = [one for one in residents if not one.num_running]
        order = np.lexsort(([one.last_used_s for one in idle], [one.num_waiting > 0 for one in idle]))
        self._values = np.empty(len(idle))
        self._values[order] = np.arange(len(idle))
        self._turns: dict[tuple[int, tuple[int, ...]], float] = {}
        self._leaving: dict[tuple[int, bool], list[Served]] = {}

    def turn(self, tenant: int, room: tuple[int, ...]) -> float:
        """Rank in the queue after the grant, lowest first: 1 within the share, else the factor beyond."""
        key = tenant, room
        if key not in self._turns:
            kinds = zip(self._used_by, self._parts, room, strict=True)
            times = (
                (used[tenant] + asked) / max(part[tenant], _ROUNDING) for used, part, asked in kinds if asked
            )
            self._turns[key] = max(1.0, max(times, default=0.0) - _ROUNDING)
        return self._turns[key]

    def may_leave(self, tenant: int, room: tuple[int, ...]) -> list[Served]:
        """Residents evictable for the tenant, in order."""
        only_beyond = self._used_by[0][tenant] > 0 and self._is_beyond(tenant, room)
        key = (tenant if tenant in self._idle_owners else _NO_OWNER), only_beyond
        if key not in self._leaving:
            self._leaving[key] = self._chosen(*key)
        return self._leaving[key]

    def _chosen(self, tenant: int, only_beyond: bool) -> list[Served]:
        order, own = self._order, self._owners == tenant
        if own.any():
            order = order.copy()
            order[own] = self._eviction_order(tenant, np.flatnonzero(own))
        chosen = np.flatnonzero((order == BEYOND) | own) if only_beyond else np.arange(len(order))
        chosen = chosen[np.lexsort((self._values[chosen], order[chosen]))]
        return [self._leavers[int(index)] for index in chosen]

    def _is_beyond(self, tenant: int, room: tuple[int, ...]) -> bool:
        kinds = zip(self._held_by, self._parts, room, strict=True)
        return any(
            held[tenant] + asked > part[tenant] * (1 + _ROUNDING) for held, part, asked in kinds if asked
        )

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return self._eviction_order(NOBODY, np.arange(len(self._leavers)))

    def _eviction_order(self, tenant: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        self._shares.make_room_for(tenant, self._now_s)
        found = np.full(len(self._leavers), WITHIN)
        for kind, total in enumerate(self._totals):
            there = rows[self._rooms[rows, kind] > 0]
            order = self._shares.eviction_order(
                self._held[kind],
                self._owners[there],
                self._rooms[there, kind],
                self._values[there],
                float(total),
                self._now_s,
            )
            found[there] = np.minimum(found[there], order)
        return found[rows]


@dataclass(frozen=True, eq=False)
class Waiter:
    """An instance's place in the queue."""

    instance: str
    adapter: ServedAdapter
    arrival_s: float
    tenant: int

    @property
    def adapter_uid(self) -> tuple[int, int]:
        return self.adapter.uid, self.tenant  # evictable adapters depend on the tenant

    @property
    def takes_nothing(self) -> bool:
        """The adapter is in use."""
        return self.adapter.num_running > 0

    def turn(self, standing: Standing[ServedAdapter]) -> float:
        return standing.turn(self.tenant, self.adapter.room)


class LeaseQueue:
    """First come first served; adapters without a place are skipped.

    After starvation_s a waiter stops younger waiters.  With several tenants, adapters in use are not stopped,
    and tenants within shares come first.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._waiters: dict[tuple[str, str], Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    def get(self, instance: str, adapter_id: str) -> Waiter | None:
        return self._waiters.get((instance, adapter_id))

    def put(self, waiter: Waiter) -> None:
        """Append, or replace the instance's waiter."""
        key = waiter.instance, waiter.adapter.adapter_id
        if key not in self._waiters:
            waiter.adapter.num_waiting += 1
        self._waiters[key] = waiter

    def remove(self, waiter: Waiter) -> None:
        del self._waiters[waiter.instance, waiter.adapter.adapter_id]
        waiter.adapter.num_waiting -= 1

    def admissible(
        self,
        can_be_resident: Callable[[Waiter], bool],
        standing: Standing[ServedAdapter] | None,
        now_s: float,
    ) -> Iterator[Waiter]:
        """Admissible waiters, in order."""
        queue = list(self)
        if standing is not None:
            queue.sort(key=partial(Waiter.turn, standing=standing))
        keeps = None if standing is None else attrgetter("takes_nothing")
        return admissible(queue, can_be_resident, now_s, self._starvation_s, keeps)

    def stops(self, waiter: Waiter, standing: Standing[ServedAdapter] | None, now_s: float) -> bool:
        """True if a starving older waiter stops this waiter."""
        for older in self:
            if now_s - older.arrival_s <= self._starvation_s:
                return False
            if standing is None:
                return True
            if not waiter.takes_nothing and older.turn(standing) <= waiter.turn(standing):
                return True
        return False
