# SPDX-License-Identifier: Apache-2.0
"""What a cache gives up first, where several tenants fill it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .caching import BEYOND, NOBODY, REST, WITHIN, Floats, ascending

PRESENT_S = 300.0
"""A tenant that asked for nothing for so long has no share any more."""
SLACK = 1 / 64
"""Of an arena: a tenant gives back so much together, since looking at all nodes for one page takes long."""


class ArenaShares:
    """What tenants hold within their shares of an arena gives way after what others hold beyond theirs.

    The arena is divided among the tenants that are present, by weight.  Each may fill what the others leave;
    when they come, what it has beyond its share goes first, the least valued of it.  So a tenant that has no
    more than its share loses nothing to how many adapters another asks for, unless all that is beyond a
    share is in use (requests run with it, or it is pinned or on its way) or has gone: what room is made for
    counts for its tenant only when it is there.  Whom room is made for (`asking`) gives back `SLACK` of the
    arena, or as much as its largest node, before it is at its share.

    T: tenants by number.  N: nodes that may give way.  A number is never given to
    another, since nodes carry it: there are as many as tenants that key files have named.
    """

    def __init__(self) -> None:
        self.asking = NOBODY
        self._numbers: dict[str, int] = {}
        self._shares = np.zeros(1)
        self._asked_s = np.full(1, -np.inf)

    @property
    def num_tenants(self) -> int:
        """That ever asked."""
        return len(self._numbers)

    def ask(self, tenant: str, share: float, now_s: float) -> int:
        """A request of this tenant needs nodes; the tenant's number."""
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
        """These tenants use what they have, or wait: they are present without asking again."""
        self._asked_s[[number for number in numbers if number != NOBODY]] = now_s

    def make_room_for(self, number: int, now_s: float) -> None:
        """From now on room is made for this tenant; NOBODY: for none of them."""
        self.asking = number if self.is_divided(now_s) else NOBODY

    def is_divided(self, now_s: float) -> bool:
        """Whether there is more than one tenant now."""
        return self.num_tenants > 1 and int((now_s - self._asked_s <= PRESENT_S).sum()) > 1

    def portions(self, now_s: float) -> Floats:
        """[T]: each tenant's part of the arena; 0 for those that are not present."""
        shares = np.where(now_s - self._asked_s <= PRESENT_S, self._shares, 0.0)
        return shares / (shares.sum() or 1.0)

    def held(self, owners: NDArray[np.int64], amounts: NDArray[np.int64]) -> Floats:
        """[T]: what each tenant holds of these nodes."""
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
        """[N]: in which order nodes give way, beyond what their values say.  BEYOND: beyond its tenant's
        share; the least valued of the tenant, as many as it takes.  REST: other ones of such a tenant, which
        give way where its pages do not lie as they are needed.  WITHIN: those of tenants within their shares.

        held [T]: what each has in all, what can't give way now included.  owners, amounts, values [N].
        total: of what `held` and `amounts` count, how much there is.
        """
        beyond = held - self.portions(now_s) * total
        if self.asking != NOBODY:
            largest = int(amounts[owners == self.asking].max(initial=0))
            beyond[self.asking] += max(SLACK * total, largest)
        found = np.where(beyond > 0, REST, WITHIN)[owners]
        own = np.flatnonzero(found == REST)
        numbers = owners[own].astype(np.min_scalar_type(len(beyond)))  # of few bits: much quicker to sort
        own = own[np.argsort(numbers, kind="stable")]
        for nodes in np.split(own, np.flatnonzero(np.diff(owners[own])) + 1):
            if nodes.size:
                found[_least(nodes, values, amounts, float(beyond[owners[nodes[0]]]))] = BEYOND
        return found


def _least(
    nodes: NDArray[np.int64], values: Floats, amounts: NDArray[np.int64], needed: float
) -> NDArray[np.int64]:
    """The least valued of these nodes, as few as have so much together, or all."""
    if amounts[nodes].sum() <= needed:
        return nodes
    count = int(np.ceil(needed / max(1, amounts[nodes].min())))
    ordered = ascending(nodes, values[nodes], count)
    return ordered[: int(np.searchsorted(np.cumsum(amounts[ordered]), needed)) + 1]
