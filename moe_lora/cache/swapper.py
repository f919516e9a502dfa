# SPDX-License-Identifier: Apache-2.0
"""Moves nodes between tiers ahead of need (FastLibra, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching.caching import BEYOND, WITHIN, Floats

from .pages import BACKED, CAN_BACK_UP, CAN_ENTER, CAN_LEAVE, Node
from .ranking import BATCH_WINDOW_S, Ranking, first_to_go
from .room import Room


class KnownValues:
    """`Ranking.values` at one moment, on first use; valid while rows keep their nodes."""

    def __init__(self, ranking: Ranking, now_s: float) -> None:
        self._ranking = ranking
        self._now_s = now_s
        self._known = np.full(len(ranking.columns), np.nan)
        self._order: NDArray[np.int64] | None = None

    def of(self, rows: NDArray[np.int64]) -> Floats:
        """[N]: values."""
        unknown = rows[np.isnan(self._known[rows])]
        if unknown.size:
            self._known[unknown] = self._ranking.values(unknown, self._now_s)
        return self._known[rows]

    def eviction_order(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N]: `Ranking.eviction_order`; with several tenants WITHIN for rows not evictable at first."""
        if self._order is None:
            ranking = self._ranking
            shares = ranking.shares
            others = WITHIN if shares is not None and shares.is_divided(self._now_s) else BEYOND
            self._order = np.full(len(ranking.columns), others)
            leaving = ranking.columns.where(CAN_LEAVE)
            self._order[leaving] = ranking.eviction_order(leaving, self.of(leaving), self._now_s)
        return self._order[rows]


WORTH = 2.0
"""Least ratio of an entering node's value to its victims', against alternation."""
MAX_ENTERING = 8
"""Exchanged nodes per tick, blocking the engine's thread."""
MAX_MOVES = 256
"""Per tick, each way."""
MAX_ROUNDS = 8
"""Passes of a tick over candidates."""
BACK_UPS = 20
"""Ticks to back up the whole device."""


class Swapper:
    """Keeps the used share of device pages between `lower` and `upper`.

    Above, the least valued leaves go to the host; below, the most valued host roots return.  With an
    exchanging policy, host nodes also replace less valued, backed nodes.
    """

    def __init__(self, room: Room, *, upper: float, lower: float) -> None:
        self._room = room
        self._ranking: Ranking = room.ranking
        self._mover = room.mover
        self._device = room.mover.device
        self._columns = room.ranking.columns
        self._traits = room.ranking.policy.traits
        self._upper = upper
        self._lower = lower
        self._back_up_pages = max(1, self._device.num_pages // BACK_UPS)
        self._wanted: list[Node] = []
        self._is_short = False

    def note_shortage(self) -> None:
        """A running request found no page: the next tick only moves out."""
        self._is_short = True

    def tick(self, now_s: float, batch_size: int) -> bool:
        """One decision; True if more is to be forgotten."""
        more = self._mover.any_dying and self._mover.sweep()
        batches = self._ranking.batches
        batches.append((now_s, batch_size))
        while batches[0][0] < now_s - BATCH_WINDOW_S:
            batches.popleft()
        if self._mover.host.num_pages:
            self._swap_out(now_s)
        if self._is_short:
            self._is_short = False
            return more
        if self._traits.backs_up and self._mover.host.num_pages:
            self._back_up(now_s)
        if self._wanted:
            self._swap_in(self._upper, now_s, only_wanted=True)
        if self._traits.swaps_in:
            self._swap_in(self._lower, now_s)
        if self._traits.exchanges:
            self._exchange(now_s)
        return more

    def swap_out(self, node: Node, now_s: float) -> bool:
        """Evict an idle device leaf, to the host if not backed; False without host room."""
        if node.dying or node.host_pages is not None or (node.is_adapter and not self._mover.host.num_pages):
            self._mover.drop(node)
            return True
        pages = self._room.take_host(node, now_s)
        if pages is None:
            return False
        self._mover.send_out(node, pages, leaves=True)
        return True

    def want(self, needed: Iterable[list[Node]]) -> None:
        """Set nodes of queued requests."""
        wanted = self._columns.wanted
        wanted[:] = 0
        self._wanted = [node for nodes in needed for node in nodes]
        np.add.at(wanted, [node.row for node in self._wanted], 1)

    def candidates_out(self, *, is_adapter: bool | None) -> NDArray[np.int64]:
        """Swap candidates: all, only adapters, or only KV."""
        columns = self._columns
        rows = columns.where(CAN_LEAVE)
        if is_adapter is not None:
            rows = rows[columns.is_adapter[rows] == is_adapter]
        if not self._traits.uses_host_for_kv:
            rows = rows[columns.is_adapter[rows]]
        return rows

    def _swap_out(self, now_s: float) -> None:
        device = self._device
        leaving = [node for node in self._mover.moving.values() if node.leaves]
        num_leaving = sum(node.num_pages for node in leaving)
        if self._traits.adapter_share is None:
            used = device.num_pages - device.num_free - num_leaving
            self._swap_out_pages(used - self._upper * device.num_pages, None, now_s)
            return
        adapters = sum(node.num_pages for node in leaving if node.is_adapter)
        kv_over = device.num_kv - (num_leaving - adapters) - self._upper * self._room.max_kv_pages
        self._swap_out_pages(kv_over, False, now_s)
        adapters_over = device.num_adapter - adapters - self._upper * self._room.max_adapter_pages
        self._swap_out_pages(adapters_over, True, now_s)

    def _swap_out_pages(self, num_pages: float, is_adapter: bool | None, now_s: float) -> None:
        num_moved = 0
        for _ in range(MAX_ROUNDS):
            if num_pages <= 0:
                return
            chosen = self._ranking.lowest(
                self.candidates_out(is_adapter=is_adapter), int(np.ceil(num_pages)), now_s
            )
            chosen = chosen[: MAX_MOVES - num_moved]
            moved = [node.num_pages for node in chosen if self.swap_out(node, now_s)]
            num_moved += len(moved)
            if not moved:
                return
            num_pages -= sum(moved)

    def _swap_in(self, share: float, now_s: float, *, only_wanted: bool = False) -> None:
        columns, device, num_moved = self._columns, self._device, 0
        kept_free = device.num_pages - int(share * device.num_pages)
        for _ in range(MAX_ROUNDS):
            room = device.num_free - kept_free
            if room <= 0:
                return
            rows = columns.where(CAN_ENTER)
            if self._traits.needs_visits:
                rows = rows[columns.visits[rows] > 0]
            if only_wanted:
                rows = rows[columns.wanted[rows] > 0]
            chosen = self._ranking.highest(rows, room, now_s) if rows.size else []
            moved = sum(
                node.num_pages <= device.num_free - kept_free and self._bring_in(node)
                for node in chosen[: MAX_MOVES - num_moved]
            )
            num_moved += moved
            if not moved:
                return

    def _bring_in(self, node: Node) -> bool:
        if node.is_adapter:
            pages = self._room.take_free_runs(node)
        elif self._over_limit(node) > 0:
            pages = None
        else:
            pages = self._device.take(node.num_pages, node.row)
        if pages is None:
            return False
        self._mover.bring_in(node, pages)
        return True

    def _back_up(self, now_s: float) -> None:
        left, rows = self._back_up_pages, self._ranking.leaving_soon(now_s)
        for node in self._ranking.nodes(rows[self._columns.has(rows, CAN_BACK_UP)]):
            if left <= 0:
                return
            left -= node.num_pages
            pages = self._room.take_host(node, now_s)
            if pages is None:
                return
            self._mover.send_out(node, pages, leaves=False)

    def _exchange(self, now_s: float) -> None:
        """Bring in the most valued nodes.

        A kind at the limit without victims does not block the other.  Pages under way are at most half of a
        tick's back-ups.
        """
        columns, left = self._columns, max(1, self._back_up_pages // 2)
        left -= sum(node.num_pages for node in self._mover.moving.values() if node.moving_in)
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
            victims = self._victims(entering, float(values[best]), known)
            for victim in victims or ():
                self._mover.drop(victim)
            if victims is not None and self._bring_in(entering):
                left -= entering.num_pages
            elif self._over_limit(entering) > 0:
                full[int(entering.is_adapter)] = True
            else:
                return

    def _victims(self, entering: Node, value: float, known: KnownValues) -> list[Node] | None:
        """Victims of less value, within shares the tenant's only; None: too valuable."""
        columns = self._columns
        kept_free = int((1 - self._upper) * self._device.num_pages)
        missing = entering.num_pages + kept_free - self._device.num_free
        over = self._over_limit(entering)
        if missing <= 0 and over <= 0:
            return []
        rows = columns.where(CAN_LEAVE)
        rows = rows[columns.has(rows, BACKED)]
        if over > 0:
            rows, missing = rows[columns.is_adapter[rows] == entering.is_adapter], max(missing, over)
        at_most = missing + 2  # each has a page; parent and adapter are skipped
        order = known.eviction_order(rows)
        may = (order != WITHIN) | (columns.tenant[rows] == columns.tenant[entering.row])
        rows, order = rows[may], order[may]
        values = known.of(rows)
        victims: list[Node] = []
        first = first_to_go(np.arange(len(rows)), values, order, at_most)
        for row, lost in zip(rows[first].tolist(), values[first].tolist(), strict=True):
            if missing <= 0 or lost * WORTH > value:
                break
            victim = columns.nodes[row]
            if victim is None or victim in (entering.parent, entering.adapter):
                continue
            victims.append(victim)
            missing -= victim.num_pages
        return victims if missing <= 0 else None

    def _over_limit(self, entering: Node) -> int:
        """Pages of this kind to evict despite free pages; 1 for adapters."""
        if entering.is_adapter:
            return int(self._mover.num_device_adapters >= self._room.max_adapters)
        return self._device.num_kv + entering.num_pages - self._room.max_kv_pages
