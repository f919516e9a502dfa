# SPDX-License-Identifier: Apache-2.0
"""Eviction order of a cache with several tenants."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .caching import BEYOND, NOBODY, REST, WITHIN, Floats, ascending

PRESENT_S = 300.0
"""Time without requests after which a tenant has no share."""
SLACK = 1 / 64
"""Part of an arena returned at once, as scans are slow."""


class ArenaShares:
    """Evicts nodes beyond tenants' shares before nodes within.

    Present tenants divide the arena by weight; a tenant may fill unused room.  The `asking` tenant gives back
    `SLACK` of the arena, or the largest node, before its share is full.  T: tenants.  N: candidates.
    """

    def __init__(self) -> None:
        self.asking = NOBODY
        self._numbers: dict[str, int] = {}
        self._shares = np.zeros(1)
        self._asked_s = np.full(1, -np.inf)

    @property
    def num_tenants(self) -> int:
        """Tenants so far."""
        return len(self._numbers)

    def ask(self, tenant: str, share: float, now_s: float) -> int:
        """Record a tenant's request; returns the tenant's number."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = len(self._shares)
            self._shares = np.append(self._shares, 0.0)
            self._asked_s = np.append(self._asked_s, now_s)
        self._shares[number] = share
        self._asked_s[number] = now_s
        self.make_room_for(number, now_s)
        return number

    def stay(self, numbers: Iterable[int], now_s: float) -> None:
        """Keep these tenants present."""
        self._asked_s[[number for number in numbers if number != NOBODY]] = now_s

    def make_room_for(self, number: int, now_s: float) -> None:
        """Make room for this tenant from now on."""
        self.asking = number if self.is_divided(now_s) else NOBODY

    def is_divided(self, now_s: float) -> bool:
        """True with several present tenants."""
        return self.num_tenants > 1 and int((now_s - self._asked_s <= PRESENT_S).sum()) > 1

    def portions(self, now_s: float) -> Floats:
        """[T]: each tenant's part of the arena; 0 if absent."""
        shares = np.where(now_s - self._asked_s <= PRESENT_S, self._shares, 0.0)
        return shares / (shares.sum() or 1.0)

    def held(self, owners: NDArray[np.int64], amounts: NDArray[np.int64]) -> Floats:
        """[T]: each tenant's amount of these nodes."""
        return np.bincount(owners, amounts, len(self._shares)).astype(np.float64)

    def eviction_order(
        self,
        held: Floats,
        owners: NDArray[np.int64],
        amounts: NDArray[np.int64],
        values: Floats,
        total: float,
        now_s: float,
    ) -> NDArray[np.int64]:
        """[N]: eviction order before values.

        BEYOND: the least valued nodes beyond a tenant's share.  REST: the tenant's other nodes.  WITHIN:
        nodes within shares.  held [T].  owners, amounts, values [N].
        """
        beyond = held - self.portions(now_s) * total
        if self.asking != NOBODY:
            largest = int(amounts[owners == self.asking].max(initial=0))
            beyond[self.asking] += max(SLACK * total, largest)
        found = np.where(beyond > 0, REST, WITHIN)[owners]
        own = np.flatnonzero(found == REST)
        numbers = owners[own].astype(np.min_scalar_type(len(beyond)))  # few bits: quicker to sort
        own = own[np.argsort(numbers, kind="stable")]
        for nodes in np.split(own, np.flatnonzero(np.diff(owners[own])) + 1):
            if nodes.size:
                found[_least(nodes, values, amounts, float(beyond[owners[nodes[0]]]))] = BEYOND
        return found


def _least(
    nodes: NDArray[np.int64], values: Floats, amounts: NDArray[np.int64], needed: float
) -> NDArray[np.int64]:
    """The fewest least valued nodes with `needed` together, or all."""
    if amounts[nodes].sum() <= needed:
        return nodes
    ordered = ascending(nodes, values[nodes], int(np.ceil(needed / max(1, amounts[nodes].min()))))
    return ordered[: int(np.searchsorted(np.cumsum(amounts[ordered]), needed)) + 1]
