"""Pages for what needs them now, at the cost of what the policy values least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .node import HAS_DEVICE_PAGES, Node
from .pages import PRIVATE
from .ranking import Kind, Ranking

# Room for a contiguous run where there are free pages enough, but not side by side.


def blocked_rows(ranking: Ranking, *, moving: bool = True) -> NDArray[np.bool_]:
    """[rows]: nodes that can't leave the device now: pinned ones, moving ones (unless told not to count
    these), and all above them.
    """
    mover, tree = ranking.mover, ranking.mover.tree
    blocked = np.zeros(len(ranking.columns), dtype=bool)
    for start in (*mover.held, *(mover.moving.values() if moving else ())):
        node: Node | None = start
        while node is not None and not blocked[node.row]:
            if node.is_adapter and node is not start and not tree.keeps_dependencies:
                break
            blocked[node.row] = True
            node = node.parent
    return blocked


def idle_pages(ranking: Ranking, *, only_kv: bool = False) -> int:
    """Device pages that evicting all that may leave would free, wherever they lie."""
    columns = ranking.columns
    rows = columns.where(HAS_DEVICE_PAGES)
    rows = rows[~blocked_rows(ranking)[rows]]
    if only_kv:
        rows = rows[~columns.is_adapter[rows]]
    return int(columns.pages[rows].sum())


def row_costs(ranking: Ranking, now_s: float) -> NDArray[np.float64]:
    """[rows]: value lost per page if the node leaves the device; an adapter takes its KV along where
    dependencies are kept.
    """
    columns = ranking.columns
    costs = np.zeros(len(columns))
    rows = columns.where(HAS_DEVICE_PAGES)
    values = ranking.values(rows, now_s)
    pages = np.maximum(columns.pages[rows], 1)
    if ranking.policy.traits.values_per_page:
        values = values * pages
    costs[rows] = values
    if ranking.mover.tree.keeps_dependencies:
        adapters = columns.is_adapter[rows]
        below = np.bincount(
            columns.adapter_row[rows[~adapters]], weights=values[~adapters], minlength=len(columns)
        )
        costs[rows[adapters]] += below[rows[adapters]]
    costs[rows] /= pages
    return costs


def cheapest_window(ranking: Ranking, num_pages: int, now_s: float) -> int | None:
    """First page of the run of `num_pages` device pages without blocked ones that costs least to clear."""
    owner = ranking.mover.device.owner
    if num_pages > len(owner):
        return None
    owned = owner >= 0
    rows = np.where(owned, owner, 0)
    stuck = (owner == PRIVATE) | (owned & blocked_rows(ranking)[rows])
    costs = np.where(owned & ~stuck, row_costs(ranking, now_s)[rows], 0.0)
    free_of_stuck = _window_sums(stuck.astype(np.float64), num_pages) == 0
    if not free_of_stuck.any():
        return None
    return int(np.argmin(np.where(free_of_stuck, _window_sums(costs, num_pages), np.inf)))


def clear_window(ranking: Ranking, first: int, num_pages: int) -> None:
    """Evict at once what lies in these pages: of KV nodes the part from there on, and all below it."""
    device, nodes = ranking.mover.device, ranking.columns.nodes
    for page in range(first, first + num_pages):
        row = int(device.owner[page])
        if row >= 0:
            node = nodes[row]
            assert node is not None
            evict(ranking, _part_from(ranking, node, page))


def evict(ranking: Ranking, node: Node) -> None:
    """Drop a node that is not blocked from the device, and what can't be there without it."""
    mover, columns = ranking.mover, ranking.columns
    below = mover.tree.bottom_up(node)
    if node.is_adapter and not mover.tree.keeps_dependencies:
        below = [node]
    for lower in below:
        if columns.nodes[lower.row] is lower and lower.device_pages is not None and lower.num_pages:
            mover.drop(lower)


def _part_from(ranking: Ranking, node: Node, page: int) -> Node:
    assert node.device_pages is not None
    if not node.is_adapter:
        first = min(node.device_pages.index(page), node.num_pages - 1)
        if first:
            ranking.mover.split(node, first)
    return node


def _window_sums(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """[P - length + 1]: sums of `length` neighbours."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[length:] - sums[:-length]


# Host pages for what leaves the device.


def take_host(ranking: Ranking, node: Node, now_s: float) -> list[int] | None:
    """Host pages for a node, at the cost of nodes that the device has too, then of the least valued; None if
    that is not enough.
    """
    host = ranking.mover.host
    if node.num_pages > host.num_pages:
        return None
    while host.num_free < node.num_pages:
        victim = ranking.victim(Kind.HOST, now_s)
        if victim is None:
            return None
        ranking.mover.drop_host(victim)
    return host.take(node.num_pages, node.row, is_adapter=node.is_adapter)


# Clears a run of device pages for an adapter, saving to the host first what would be lost.


class Clearing:
    """Makes room for runs that no gap is long enough for.

    saves: KV in the chosen window that the host has not is copied there first, once per attempt: until that
    is done the answer is None, and the caller asks again.
    """

    def __init__(self, ranking: Ranking, *, saves: bool) -> None:
        self._ranking = ranking
        self._mover = ranking.mover
        self._saves = saves
        self._saving: dict[Node, tuple[int, list[Node]]] = {}

    def take_runs(self, adapter: Node, now_s: float) -> list[int] | None:
        """A run of device pages per layer: side by side if some window of them all can be cleared, else each
        by itself; None if not (yet).
        """
        assert adapter.layer_pages is not None
        device, num_pages = self._mover.device, adapter.num_pages
        saving = self._saving.get(adapter)
        if saving is not None and any(node.moving_out for node in saving[1]):
            return None
        if not self._can_clear(num_pages):
            return None
        if saving is not None and self._is_free_of_blocked(saving[0], num_pages):
            first: int | None = saving[0]
        else:
            first = cheapest_window(self._ranking, num_pages, now_s)
        if first is None:
            return self._take_separate_runs(adapter, now_s)
        if saving is None and self._saves and self._save(adapter, first, now_s):
            return None
        self._saving.pop(adapter, None)
        clear_window(self._ranking, first, num_pages)
        return device.take_runs(adapter.layer_pages, adapter.row)

    def _can_clear(self, num_pages: int) -> bool:
        """Whether that many pages are free or could be, wherever they lie."""
        return self._mover.device.num_free + idle_pages(self._ranking) >= num_pages

    def _is_free_of_blocked(self, first: int, num_pages: int) -> bool:
        owner = self._mover.device.owner[first : first + num_pages]
        return not ((owner == PRIVATE).any() or blocked_rows(self._ranking)[owner[owner >= 0]].any())

    def _save(self, adapter: Node, first: int, now_s: float) -> bool:
        """Order copies of what only the device has in the window, and below it; False if there are none."""
        self._saving = {node: saving for node, saving in self._saving.items() if not node.gone}
        tree, nodes = self._mover.tree, self._ranking.columns.nodes
        owner = self._mover.device.owner[first : first + adapter.num_pages]
        inside = [node for row in np.unique(owner[owner >= 0]).tolist() if (node := nodes[row])]
        saved = []
        for node in dict.fromkeys(lower for top in inside for lower in tree.bottom_up(top)):
            if node.is_adapter or node.dying or node.device_pages is None or node.host_pages is not None:
                continue
            pages = take_host(self._ranking, node, now_s)
            if pages is None:
                break
            self._mover.send_out(node, pages, leaves=False)
            saved.append(node)
        if saved:
            self._saving[adapter] = first, saved
        return bool(saved)

    def _take_separate_runs(self, node: Node, now_s: float) -> list[int] | None:
        """A run for each layer by itself, clearing a window for each that finds none.

        They have no row for an owner until all are there, so that no window for a later one takes them.
        """
        assert node.layer_pages is not None
        device = self._mover.device
        pages: list[int] = []
        for length in filter(None, node.layer_pages):
            run = device.take_runs([length], PRIVATE)
            if run is None:
                first = cheapest_window(self._ranking, length, now_s)
                if first is not None:
                    clear_window(self._ranking, first, length)
                    run = device.take_runs([length], PRIVATE)
            if run is None:
                device.give_back(pages, is_adapter=True)
                return None
            pages += run
        device.hand_over(pages, node.row)
        return pages


@dataclass(frozen=True)
class Limits:
    """Upper bounds on the device: pages of KV (cached ones included) and of adapters, adapters with pages."""

    kv_pages: int
    adapter_pages: int
    num_adapters: int


class Room:
    """Takes pages, evicting at once and without copies where too few are free.

    partitioned: KV gives way to KV only.  saves: see `Clearing`.  A run of pages is found whenever some
    window of that length has no blocked page (`blocked_rows`).
    """

    def __init__(self, ranking: Ranking, limits: Limits, *, partitioned: bool, saves: bool) -> None:
        self.ranking = ranking
        self.mover = ranking.mover
        self.limits = limits
        self._partitioned = partitioned
        self._clearing = Clearing(ranking, saves=saves)

    def take_kv(self, num_pages: int, owner: int, now_s: float) -> list[int] | None:
        """Device pages for KV; None, and nothing evicted, if pinned nodes are in the way."""
        device = self.mover.device
        over = device.num_kv + num_pages - self.limits.kv_pages
        if num_pages > device.num_free or over > 0:
            kind = Kind.KV if self._partitioned else Kind.ANY
            if not (
                self._can_reclaim(over, Kind.KV) and self._can_reclaim(num_pages - device.num_free, kind)
            ):
                return None
            self._reclaim(over, Kind.KV, now_s)
            self._reclaim(num_pages - device.num_free, kind, now_s)
        return device.take(num_pages, owner)

    def take_adapter(self, node: Node, now_s: float) -> list[int] | None:
        """Device pages for an adapter, a run per layer; None if that can't be had now."""
        assert node.layer_pages is not None
        if not self._could_take_adapter(node):
            return None
        device, limits = self.mover.device, self.limits
        while (
            self.mover.num_device_adapters >= limits.num_adapters
            or device.num_adapter + node.num_pages > limits.adapter_pages
        ):
            if not self._evict_adapter(now_s):
                return None
        pages = device.take_runs(node.layer_pages, node.row)
        return self._clearing.take_runs(node, now_s) if pages is None else pages

    def take_free_runs(self, node: Node) -> list[int] | None:
        """As `take_adapter`, evicting nothing."""
        assert node.layer_pages is not None
        device, limits = self.mover.device, self.limits
        if device.num_adapter + node.num_pages > limits.adapter_pages:
            return None
        if self.mover.num_device_adapters >= limits.num_adapters:
            return None
        return device.take_runs(node.layer_pages, node.row)

    def _can_reclaim(self, num_pages: int, kind: Kind) -> bool:
        """Whether so many pages may leave; looks at all nodes only if the victims at hand are too few."""
        return (
            num_pages <= 0
            or self.ranking.has_victims(kind, num_pages)
            or num_pages <= idle_pages(self.ranking, only_kv=kind is Kind.KV)
        )

    def _reclaim(self, num_pages: int, kind: Kind, now_s: float) -> None:
        """Drop device leaves until so many pages are free; of the last one only the end, if it is KV."""
        while num_pages > 0:
            victim = self.ranking.victim(kind, now_s)
            assert victim is not None
            if not victim.is_adapter and victim.num_pages > num_pages:
                head = self.mover.split(victim, victim.num_pages - num_pages)
                self.ranking.put_back(head, kind)
            num_pages -= victim.num_pages
            self.mover.drop(victim)

    def _evict_adapter(self, now_s: float) -> bool:
        """Evict the adapter of least value per page, with its KV where that can't be there without it."""
        columns = self.ranking.columns
        rows = columns.where(HAS_DEVICE_PAGES)
        rows = rows[columns.is_adapter[rows] & (columns.pages[rows] > 0)]
        rows = rows[~blocked_rows(self.ranking)[rows]]
        if not rows.size:
            return False
        victim = columns.nodes[int(rows[np.argmin(row_costs(self.ranking, now_s)[rows])])]
        assert victim is not None
        evict(self.ranking, victim)
        return True

    def _could_take_adapter(self, node: Node) -> bool:
        """Whether evicting all that may leave would do, wherever its pages lie; if not, nothing should."""
        columns, limits = self.ranking.columns, self.limits
        blocked = blocked_rows(self.ranking)
        stay = columns.where(HAS_DEVICE_PAGES)
        stay = stay[columns.is_adapter[stay] & (columns.pages[stay] > 0) & blocked[stay]]
        return (
            len(stay) < limits.num_adapters
            and int(columns.pages[stay].sum()) + node.num_pages <= limits.adapter_pages
            and self.mover.device.num_free + idle_pages(self.ranking) >= node.num_pages
        )
