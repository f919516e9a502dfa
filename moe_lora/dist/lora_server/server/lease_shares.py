"""Whose adapters give way at the LoRA Server where several tenants use it, and whose lease comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.arena_shares import BEYOND, WITHIN, ArenaShares

_ROUNDING = 1e-9


class ServedView(Protocol):
    """A resident adapter.  owner: the number of the tenant whom it counts for.  room [K]: see `Standing`."""

    @property
    def owner(self) -> int: ...

    @property
    def room(self) -> tuple[int, ...]: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def last_used_s(self) -> float: ...


Served = TypeVar("Served", bound=ServedView)


class Standing(Generic[Served]):
    """What tenants hold at one moment, and so which adapters may leave for whom.

    An idle adapter of a tenant within its share leaves for another tenant's only if that one stays within
    its own share with what it gets, or has no adapter in use (so that a share smaller than an adapter shuts
    nobody out), and only when no idle adapter is left that is beyond a share.

    residents [N]: all that are resident.  totals [K]: of each kind of room how much there is: places, then
    pages of each rank.
    """

    def __init__(
        self, shares: ArenaShares, residents: Sequence[Served], totals: Sequence[float], now_s: float
    ) -> None:
        self._shares, self._totals, self._now_s = shares, np.asarray(totals, np.float64), now_s
        owners = np.array([one.owner for one in residents], np.int64)
        rooms = np.array([one.room for one in residents], np.int64).reshape(len(residents), len(totals))
        in_use = np.array([one.num_running > 0 for one in residents], bool)
        self._held = np.array([shares.held(owners, room) for room in rooms.T])  # [K, T]
        self._used = np.array([shares.held(owners[in_use], room) for room in rooms[in_use].T])
        self._parts = np.outer(self._totals, shares.portions(now_s))  # [K, T]
        self._owners, self._rooms = owners[~in_use], rooms[~in_use]
        idle = self._leavers = [one for one in residents if not one.num_running]
        order = np.lexsort(([one.last_used_s for one in idle], [one.num_waiting > 0 for one in idle]))
        self._values = np.empty(len(idle))
        self._values[order] = np.arange(len(idle))
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._turns: dict[tuple[int, tuple[int, ...]], float] = {}
        self._leaving: dict[tuple[int, tuple[int, ...]], list[Served]] = {}

    def turn(self, tenant: int, room: tuple[int, ...]) -> float:
        """In which order waiting leases are looked at, lower ones first: 1 for a tenant that stays within its
        share with what it then uses, else as many times its share as it then uses.
        """
        key = tenant, room
        if key not in self._turns:
            used = self._used[:, tenant] + room
            wanted = np.asarray(room) > 0
            times = (used[wanted] / self._parts[wanted, tenant]).max(initial=0.0)
            self._turns[key] = float(max(1.0, times - _ROUNDING))
        return self._turns[key]

    def may_leave(self, tenant: int, room: tuple[int, ...]) -> list[Served]:
        """Residents that may leave for so much room of this tenant's, the first to go first."""
        key = tenant, room
        if key not in self._leaving:
            self._leaving[key] = self._chosen(tenant, room)
        return self._leaving[key]

    def _chosen(self, tenant: int, room: tuple[int, ...]) -> list[Served]:
        order = self._order(tenant)
        may = np.ones(len(order), bool)
        if self._used[0, tenant] and self._is_beyond(tenant, room):
            may = (order == BEYOND) | (self._owners == tenant)
        chosen = np.flatnonzero(may)
        chosen = chosen[np.lexsort((self._values[chosen], order[chosen]))]
        return [self._leavers[int(index)] for index in chosen]

    def _is_beyond(self, tenant: int, room: tuple[int, ...]) -> bool:
        wanted = np.asarray(room) > 0
        with_it = self._held[:, tenant] + room
        return bool((with_it > self._parts[:, tenant] * (1 + _ROUNDING))[wanted].any())

    def _order(self, tenant: int) -> NDArray[np.int64]:
        """As `ArenaShares.eviction_order` of the idle ones, the earliest of all kinds of room."""
        if tenant not in self._orders:
            self._shares.make_room_for(tenant, self._now_s)
            found = np.full(len(self._leavers), WITHIN)
            for kind, total in enumerate(self._totals):
                there = np.flatnonzero(self._rooms[:, kind])
                order = self._shares.eviction_order(
                    self._held[kind],
                    self._owners[there],
                    self._rooms[there, kind],
                    self._values[there],
                    float(total),
                    self._now_s,
                )
                found[there] = np.minimum(found[there], order)
            self._orders[tenant] = found
        return self._orders[tenant]
