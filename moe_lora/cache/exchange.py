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
        """One decision: the most valued first, each for the least valued that make its room."""
        left = self._max_pages - sum(
            node.num_pages for node in self._residence.moving.values() if node.moving_in
        )
        known = KnownValues(self._ranking, now_s)
        for _ in range(MAX_ENTERING):
            rows = self._columns.where(CAN_ENTER)
            rows = rows[self._columns.pages[rows] <= left]
            if not rows.size:
                return
            values = known.of(rows)
            best = int(np.argmax(values))
            entering = self._columns.nodes[int(rows[best])]
            assert entering is not None
            if not self._enter(entering, float(values[best]), known):
                return
            left -= entering.num_pages

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
        """What gives way; None if that would be worth too much."""
        columns, device = self._columns, self._residence.device
        missing = entering.num_pages + self._kept_free - device.num_free
        if missing <= 0:
            return []
        rows = columns.where(CAN_LEAVE)
        rows = rows[columns.has(rows, BACKED)]
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
