"""Puts nodes of the host in the place of less valued ones of a full device, ahead of need."""

from __future__ import annotations

import numpy as np

from .flags import BACKED, CAN_ENTER, CAN_LEAVE
from .known_values import KnownValues
from .node import Node
from .ranking import ascending
from .room import Room

WORTH = 2.0
"""How many times the value of what gives way a node must have: less, and the two would take turns."""
MAX_ENTERING = 8
"""Nodes that a tick brings in: it holds up the engine's thread."""


class Exchange:
    """Only nodes that the host has too give way, so that nothing is lost and nothing is copied out.

    upper: share of the device in use at most.  max_pages: on their way to the device at most: pages that
    are, can't give way to a request.
    """

    def __init__(self, room: Room, *, upper: float, max_pages: int) -> None:
        self._room = room
        self._ranking = room.ranking
        self._residence = room.residence
        self._columns = room.ranking.columns
        self._kept_free = int((1 - upper) * room.residence.device.num_pages)
        self._max_pages = max_pages

    def tick(self, now_s: float) -> None:
        """One decision: the most valued first, each for the least valued that make its room.  A kind that is
        at its limit, and has nothing to give way, does not keep the other out.
        """
        columns = self._columns
        left = self._max_pages - sum(
            node.num_pages for node in self._residence.moving.values() if node.moving_in
        )
        known, full = KnownValues(self._ranking, now_s), np.zeros(2, dtype=np.bool_)
        for _ in range(MAX_ENTERING):
            rows = columns.where(CAN_ENTER)
            rows = rows[(columns.pages[rows] <= left) & ~full[columns.is_adapter[rows].astype(int)]]
            if not rows.size:
                return
            values = known.of(rows)
            best = int(np.argmax(values))
            entering = columns.nodes[int(rows[best])]
            assert entering is not None
            if self._enter(entering, float(values[best]), known):
                left -= entering.num_pages
            elif self._over_limit(entering) > 0:
                full[int(entering.is_adapter)] = True
            else:
                return

    def _enter(self, entering: Node, value: float, known: KnownValues) -> bool:
        device = self._residence.device
        victims = self._victims(entering, value, known)
        if victims is None:
            return False
        for victim in victims:
            self._residence.drop(victim)
        if entering.is_adapter:
            pages = self._room.take_free_runs(entering)
        else:
            pages = device.take(entering.num_pages, entering.row)
        if pages is None:
            return False
        self._residence.bring_in(entering, pages)
        return True

    def _victims(self, entering: Node, value: float, known: KnownValues) -> list[Node] | None:
        """What gives way: one of its kind where that has reached its limit.  None if that would be worth too
        much.
        """
        columns = self._columns
        missing = entering.num_pages + self._kept_free - self._residence.device.num_free
        over = self._over_limit(entering)
        if missing <= 0 and over <= 0:
            return []
        rows = columns.where(CAN_LEAVE)
        rows = rows[columns.has(rows, BACKED)]
        if over > 0:
            rows, missing = rows[columns.is_adapter[rows] == entering.is_adapter], max(missing, over)
        at_most = missing + 2  # each has a page, and its parent and adapter are passed over
        rows = ascending(rows, known.of(rows), at_most)
        victims: list[Node] = []
        for row, lost in zip(rows.tolist(), known.of(rows).tolist(), strict=True):
            if missing <= 0 or lost * WORTH > value:
                break
            victim = columns.nodes[row]
            if victim is None or victim in (entering.parent, entering.adapter):
                continue
            victims.append(victim)
            missing -= victim.num_pages
        return victims if missing <= 0 else None

    def _over_limit(self, entering: Node) -> int:
        """Pages of its kind that must leave for it, however many are free: of adapters, those of any one."""
        residence, limits = self._residence, self._room.limits
        if entering.is_adapter:
            return int(residence.num_device_adapters >= limits.num_adapters)
        return residence.device.num_kv + entering.num_pages - limits.kv_pages
