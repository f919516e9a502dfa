"""Room for a contiguous run where there are free pages enough, but not side by side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .flags import HAS_DEVICE_PAGES
from .node import Node
from .ranking import Ranking
from .tier import PRIVATE


def blocked_rows(ranking: Ranking, *, moving: bool = True) -> NDArray[np.bool_]:
    """[rows]: nodes that can't leave the device now: pinned ones, moving ones (unless told not to count
    these), and all above them.
    """
    residence, tree = ranking.residence, ranking.residence.tree
    blocked = np.zeros(len(ranking.columns), dtype=bool)
    for start in (*residence.held, *(residence.moving.values() if moving else ())):
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
    if ranking.residence.tree.keeps_dependencies:
        adapters = columns.is_adapter[rows]
        below = np.bincount(
            columns.adapter_row[rows[~adapters]], weights=values[~adapters], minlength=len(columns)
        )
        costs[rows[adapters]] += below[rows[adapters]]
    costs[rows] /= pages
    return costs


def cheapest_window(ranking: Ranking, num_pages: int, now_s: float) -> int | None:
    """First page of the run of `num_pages` device pages without blocked ones that costs least to clear."""
    owner = ranking.residence.device.owner
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
    device, nodes = ranking.residence.device, ranking.columns.nodes
    for page in range(first, first + num_pages):
        row = int(device.owner[page])
        if row >= 0:
            node = nodes[row]
            assert node is not None
            evict(ranking, _part_from(ranking, node, page))


def evict(ranking: Ranking, node: Node) -> None:
    """Drop a node that is not blocked from the device, and what can't be there without it."""
    residence, columns = ranking.residence, ranking.columns
    below = residence.tree.bottom_up(node)
    if node.is_adapter and not residence.tree.keeps_dependencies:
        below = [node]
    for lower in below:
        if columns.nodes[lower.row] is lower and lower.device_pages is not None and lower.num_pages:
            residence.drop(lower)


def _part_from(ranking: Ranking, node: Node, page: int) -> Node:
    assert node.device_pages is not None
    if not node.is_adapter:
        first = min(node.device_pages.index(page), node.num_pages - 1)
        if first:
            ranking.residence.split(node, first)
    return node


def _window_sums(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """[P - length + 1]: sums of `length` neighbours."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[length:] - sums[:-length]
