# SPDX-License-Identifier: Apache-2.0
"""Pages for immediate needs, from the least valued nodes."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching.caching import REST, WITHIN

from .pages import HAS_DEVICE_PAGES, PRIVATE, Node
from .ranking import Kind, Ranking

SAVED_S = 5.0
"""Longest use of a window chosen before nodes were saved."""
Number = TypeVar("Number", np.int64, np.float64)


class Room:
    """Allocates pages, evicting at once and without copies if too few are free.

    With a partitioned policy KV replaces KV only.  A run needs a window without `blocked_rows`.  With host
    use, unsaved KV there is saved first: the answer is None, and the caller asks again.
    """

    def __init__(self, ranking: Ranking, max_kv_pages: int | None, max_adapters: int | None) -> None:
        self.ranking = ranking
        self.mover = ranking.mover
        self._columns = ranking.columns
        self._device, self._host = ranking.mover.device, ranking.mover.host
        traits, num_pages = ranking.policy.traits, self._device.num_pages
        self._partitioned = traits.adapter_share is not None
        self._saves = traits.uses_host_for_kv and self._host.num_pages > 0
        self.max_adapters = num_pages if max_adapters is None else max_adapters
        self.max_adapter_pages = kv_pages = num_pages
        if traits.adapter_share is not None:
            self.max_adapter_pages = int(traits.adapter_share * num_pages)
            kv_pages = num_pages - self.max_adapter_pages
        self.max_kv_pages = kv_pages if max_kv_pages is None else min(kv_pages, max_kv_pages)
        self._saving: dict[Node, tuple[int, list[Node], float]] = {}
        """An adapter's window, the nodes to save, and the time of the choice."""

    def blocked_rows(self, *, moving: bool = True) -> NDArray[np.bool_]:
        """[rows]: True for pinned and (by default) moving nodes and ancestors."""
        keeps_dependencies = self.mover.tree.keeps_dependencies
        blocked = np.zeros(len(self._columns), dtype=bool)
        for start in (*self.mover.held, *(self.mover.moving.values() if moving else ())):
            node: Node | None = start
            while node is not None and not blocked[node.row]:
                if node.is_adapter and node is not start and not keeps_dependencies:
                    break
                blocked[node.row] = True
                node = node.parent
        return blocked

    def _idle_pages(self, *, only_kv: bool = False) -> int:
        columns = self._columns
        rows = columns.where(HAS_DEVICE_PAGES)
        rows = rows[~self.blocked_rows()[rows]]
        if only_kv:
            rows = rows[~columns.is_adapter[rows]]
        return int(columns.pages[rows].sum())

    def _row_costs(
        self, blocked: NDArray[np.bool_], now_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[rows]: eviction order, and value lost per page, dependent KV included."""
        columns = self._columns
        costs, order = np.zeros(len(columns)), np.zeros(len(columns), np.int64)
        rows = columns.where(HAS_DEVICE_PAGES)
        values, idle = self.ranking.values(rows, now_s), ~blocked[rows]
        order[rows[idle]] = self.ranking.eviction_order(rows[idle], values[idle], now_s)
        pages = np.maximum(columns.pages[rows], 1)
        if self.ranking.policy.traits.values_per_page:
            values = values * pages
        costs[rows] = values
        if self.mover.tree.keeps_dependencies:
            adapters = columns.is_adapter[rows]
            below = np.bincount(
                columns.adapter_row[rows[~adapters]], weights=values[~adapters], minlength=len(columns)
            )
            costs[rows[adapters]] += below[rows[adapters]]
            # Another tenant's KV delays an adapter; the adapter's own tenant loses KV with the place.
            foreign = ~adapters & (columns.tenant[rows] != columns.tenant[columns.adapter_row[rows]])
            for level in (REST, WITHIN):
                above = columns.adapter_row[rows[foreign & (order[rows] == level)]]
                order[above] = np.maximum(order[above], level)
        costs[rows] /= pages
        return order, costs

    def _evict(self, node: Node) -> None:
        tree = self.mover.tree
        alone = node.is_adapter and not tree.keeps_dependencies
        for lower in [node] if alone else tree.bottom_up(node):
            if self._columns.nodes[lower.row] is lower and lower.device_pages is not None and lower.num_pages:
                self.mover.drop(lower)

    def take_host(self, node: Node, now_s: float) -> list[int] | None:
        """Host pages, from backed nodes, then the least valued; None if too few."""
        if node.num_pages > self._host.num_pages:
            return None
        while self._host.num_free < node.num_pages:
            victim = self.ranking.victim(Kind.HOST, now_s)
            if victim is None:
                return None
            self.mover.drop_host(victim)
        return self._host.take(node.num_pages, node.row, is_adapter=node.is_adapter)

    def take_kv(self, num_pages: int, owner: int, now_s: float) -> list[int] | None:
        """Device pages for KV; None, without evictions, if pinned nodes are in the way."""
        device = self._device
        missing, over = num_pages - device.num_free, device.num_kv + num_pages - self.max_kv_pages
        if missing > 0 or over > 0:
            kind = Kind.KV if self._partitioned else Kind.ANY
            if not (self._can_reclaim(over, Kind.KV) and self._can_reclaim(missing, kind)):
                return None
            self._reclaim(over, Kind.KV, now_s)
            self._reclaim(num_pages - device.num_free, kind, now_s)
        return device.take(num_pages, owner)

    def take_adapter(self, node: Node, now_s: float) -> list[int] | None:
        """Device pages for an adapter, a run per layer; None if not available."""
        assert node.layer_pages is not None
        if not self._could_take_adapter(node):
            return None
        while self._is_over_limit(node):
            if not self._evict_adapter(now_s):
                return None
        return self.take_free_runs(node) or self._clear_runs(node, now_s)

    def take_free_runs(self, node: Node) -> list[int] | None:
        """As `take_adapter`, without evictions."""
        assert node.layer_pages is not None
        pages = None if self._is_over_limit(node) else self._device.take_runs(node.layer_pages, node.row)
        if pages is not None:
            self._saving.pop(node, None)
        return pages

    def _is_over_limit(self, adapter: Node) -> bool:
        return (
            self.mover.num_device_adapters >= self.max_adapters
            or self._device.num_adapter + adapter.num_pages > self.max_adapter_pages
        )

    def _can_reclaim(self, num_pages: int, kind: Kind) -> bool:
        return (
            num_pages <= 0
            or self.ranking.has_victims(kind, num_pages)
            or num_pages <= self._idle_pages(only_kv=kind is Kind.KV)
        )

    def _reclaim(self, num_pages: int, kind: Kind, now_s: float) -> None:
        while num_pages > 0:
            victim = self.ranking.victim(kind, now_s)
            assert victim is not None
            if victim.may_be_cut and victim.num_pages > num_pages:
                self.ranking.put_back(self.mover.split(victim, victim.num_pages - num_pages), kind)
            num_pages -= victim.num_pages
            self.mover.drop(victim)

    def _evict_adapter(self, now_s: float) -> bool:
        columns = self._columns
        rows, blocked = columns.where(HAS_DEVICE_PAGES), self.blocked_rows()
        rows = rows[columns.is_adapter[rows] & (columns.pages[rows] > 0) & ~blocked[rows]]
        if not rows.size:
            return False
        order, costs = self._row_costs(blocked, now_s)
        rows = rows[order[rows] == order[rows].min()]
        victim = columns.nodes[int(rows[np.argmin(costs[rows])])]
        assert victim is not None
        self._evict(victim)
        return True

    def _could_take_adapter(self, node: Node) -> bool:
        columns = self._columns
        stay = columns.where(HAS_DEVICE_PAGES)
        stay = stay[columns.is_adapter[stay] & (columns.pages[stay] > 0) & self.blocked_rows()[stay]]
        return (
            len(stay) < self.max_adapters
            and int(columns.pages[stay].sum()) + node.num_pages <= self.max_adapter_pages
            and self._device.num_free + self._idle_pages() >= node.num_pages
        )

    def _clear_runs(self, adapter: Node, now_s: float) -> list[int] | None:
        """A run of pages per layer, if possible in one window; None if not yet."""
        assert adapter.layer_pages is not None
        num_pages = adapter.num_pages
        saving = self._saving.get(adapter)
        if saving is not None and any(node.moving_out for node in saving[1]):
            return None
        if saving is not None and now_s - saving[2] > SAVED_S:
            saving = None
        if self._device.num_free + self._idle_pages() < num_pages:
            return None
        if saving is not None and self._is_free_of_blocked(saving[0], num_pages):
            first: int | None = saving[0]
        else:
            first = self._cheapest_window(num_pages, self._page_costs(now_s))
        if first is None:
            return self._clear_separate_runs(adapter, now_s)
        if saving is None and self._saves and self._save(adapter, first, now_s):
            return None
        self._saving.pop(adapter, None)
        self._clear_window(first, num_pages)
        return self._device.take_runs(adapter.layer_pages, adapter.row)

    def _is_free_of_blocked(self, first: int, num_pages: int) -> bool:
        owner = self._device.owner[first : first + num_pages]
        return not ((owner == PRIVATE).any() or self.blocked_rows()[owner[owner >= 0]].any())

    def _page_costs(self, now_s: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[P]: cost by eviction order (WITHIN outweighs lower orders), and value lost."""
        owner, blocked = self._device.owner, self.blocked_rows()
        of_row, lost = self._row_costs(blocked, now_s)
        owned = owner >= 0
        idle = np.flatnonzero(owned)[~blocked[owner[owned]]]
        order, costs = np.zeros(len(owner), np.int64), np.zeros(len(owner))
        if idle.size:
            levels = of_row[owner[idle]]
            order[idle] = np.array([0, 1, len(owner) + 1])[levels - levels.min()]
            costs[idle] = lost[owner[idle]]
        return order, costs

    def _cheapest_window(
        self, num_pages: int, page_costs: tuple[NDArray[np.int64], NDArray[np.float64]]
    ) -> int | None:
        """First page of the cheapest run without blocked pages."""
        owner = self._device.owner
        if num_pages > len(owner):
            return None
        owned = owner >= 0
        stuck = (owner == PRIVATE) | (owned & self.blocked_rows()[np.where(owned, owner, 0)])
        cleared = owned & ~stuck
        order, costs = (_window_sums(np.where(cleared, part, 0), num_pages) for part in page_costs)
        possible = _window_sums(stuck.astype(np.int64), num_pages) == 0
        if not possible.any():
            return None
        possible &= order == order[possible].min()
        return int(np.argmin(np.where(possible, costs, np.inf)))

    def _clear_window(self, first: int, num_pages: int) -> None:
        for page in range(first, first + num_pages):
            row = int(self._device.owner[page])
            if row < 0:
                continue
            node = self._columns.nodes[row]
            assert node is not None
            assert node.device_pages is not None
            if node.may_be_cut:
                index = min(node.device_pages.index(page), node.num_pages - 1)
                if index:
                    self.mover.split(node, index)
            self._evict(node)

    def _save(self, adapter: Node, first: int, now_s: float) -> bool:
        self._saving = {node: saving for node, saving in self._saving.items() if not node.gone}
        tree, nodes = self.mover.tree, self._columns.nodes
        owner = self._device.owner[first : first + adapter.num_pages]
        inside = [node for row in np.unique(owner[owner >= 0]).tolist() if (node := nodes[row])]
        saved = []
        for node in dict.fromkeys(lower for top in inside for lower in tree.bottom_up(top)):
            if node.is_adapter or node.dying or node.device_pages is None or node.host_pages is not None:
                continue
            pages = self.take_host(node, now_s)
            if pages is None:
                break
            self.mover.send_out(node, pages, leaves=False)
            saved.append(node)
        if saved:
            self._saving[adapter] = first, saved, now_s
        return bool(saved)

    def _clear_separate_runs(self, node: Node, now_s: float) -> list[int] | None:
        """Runs are PRIVATE until the last exists: no later window includes a run."""
        assert node.layer_pages is not None
        pages: list[int] = []
        costs = self._page_costs(now_s)
        for length in filter(None, node.layer_pages):
            run = self._device.take_runs([length], PRIVATE)
            if run is None and (first := self._cheapest_window(length, costs)) is not None:
                self._clear_window(first, length)
                run = self._device.take_runs([length], PRIVATE)
            if run is None:
                self._device.give_back(pages, is_adapter=True)
                return None
            pages += run
        self._device.hand_over(pages, node.row)
        return pages


def _window_sums(values: NDArray[Number], length: int) -> NDArray[Number]:
    """[P - length + 1]: sums of `length` neighbours."""
    sums = np.concatenate((np.zeros(1, values.dtype), np.cumsum(values)))
    return sums[length:] - sums[:-length]
