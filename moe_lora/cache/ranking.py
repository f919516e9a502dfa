# SPDX-License-Identifier: Apache-2.0
"""The least and most valued nodes by policy."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching.caching import (
    BEYOND,
    NOBODY,
    REST,
    WITHIN,
    CacheLoad,
    CachingPolicy,
    Floats,
    ascending,
)

from .node_mover import NodeMover
from .pages import BACKED, CAN_BACK_UP, CAN_LEAVE, CAN_LEAVE_HOST, DYING, HAS_DEVICE_PAGES, Node

if TYPE_CHECKING:
    from moe_lora.policies.caching.arena_shares import ArenaShares

BATCH = 256
"""Victims ranked at once."""
CHUNK = 8192
"""Within the processor's cache."""
FRESH_S, HOST_FRESH_S = 0.1, 1.0
"""Age of a ranking of victims before the next."""
SOON_S_PER_NODE = 1e-5
"""Age per node before `Ranking.leaving_soon` looks anew: 2 % of the time."""
LEAVING_SHARE = 0.2
"""Backed up for immediate eviction."""
BATCH_WINDOW_S = 5.0
"""Averaging time of the batch size (FastLibra, section 5.1)."""


class Kind(Enum):
    """Kind of victim."""

    ANY = "any"
    KV = "kv"
    ADAPTER = "adapter"
    HOST = "host"


class Ranking:
    """Values of candidates; holdings beyond shares go first.

    A batch of victims, per kind and tenant, lasts `FRESH_S`, except victims used since.  shares: None before
    the second tenant.
    """

    def __init__(self, mover: NodeMover, policy: CachingPolicy, max_adapters: int | None) -> None:
        self.mover = mover
        self.policy = policy
        self.shares: ArenaShares | None = None
        self._max_adapters = max_adapters
        self.columns = mover.tree.columns
        self.num_queries = 0
        self.batches: deque[tuple[float, int]] = deque()
        self._queues: dict[tuple[Kind, int], list[tuple[Node, float]]] = {}
        self._ranked_s: dict[tuple[Kind, int], float] = {}
        self._within: set[tuple[Kind, int]] = set()
        """Kinds and tenants with victims within shares only."""
        self._num_loads = 0
        self._soon: tuple[NDArray[np.int64], Floats] = np.zeros(0, np.int64), np.zeros(0)
        self._soon_asking, self._soon_until_s = -1, -np.inf

    @property
    def asking(self) -> int:
        """The tenant in need of room."""
        return NOBODY if self.shares is None else self.shares.asking

    def load(self, now_s: float) -> CacheLoad:
        columns = self.columns
        if self.policy.traits.learns_reuse:
            columns.refresh_reuse(now_s)
        sizes = [size for _, size in self.batches]
        return CacheLoad(
            num_queries=max(1, self.num_queries),
            adapter_visits=columns.visits[np.flatnonzero(columns.is_adapter[: len(columns)])],
            batch_size=sum(sizes) / len(sizes) if sizes else 0.0,
            num_adapters=self.mover.num_device_adapters,
            reuse=columns.reuse.rates,
        )

    def values(self, rows: NDArray[np.int64], now_s: float, *, host: bool = False) -> Floats:
        """[N]: the policy's values, 0 for dying nodes; host: of host copies."""
        ask = self.policy.host_values if host else self.policy.values
        load, values = self.load(now_s), np.empty(len(rows))
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            values[part] = ask(self.columns.view(rows[part], now_s), load)
        values[self.columns.has(rows, DYING)] = 0.0
        return values

    def eviction_order(
        self, rows: NDArray[np.int64], values: Floats, now_s: float, *, host: bool = False
    ) -> NDArray[np.int64]:
        """[N]: the earlier order of pages and of adapter places; BEYOND if dying or without shares."""
        columns, shares = self.columns, self.shares
        if shares is None or not (rows.size and shares.is_divided(now_s)):
            return np.full(len(rows), BEYOND)
        there = columns.where(BACKED if host else HAS_DEVICE_PAGES)
        tier = self.mover.host if host else self.mover.device
        ones, is_adapter = np.ones_like(columns.pages), columns.is_adapter
        parts = [(ones > 0, columns.pages, float(tier.num_pages))]
        adapter_share = self.policy.traits.adapter_share
        if adapter_share is not None and not host:
            parts = [
                (is_adapter, columns.pages, adapter_share * tier.num_pages),
                (~is_adapter, columns.pages, (1 - adapter_share) * tier.num_pages),
            ]
        if self._max_adapters is not None and not host:
            parts.append((is_adapter & (columns.pages > 0), ones, float(self._max_adapters)))
        found = np.full(len(rows), WITHIN)
        for part, amounts, total in parts:
            of_part = there[part[there]]
            held = shares.held(columns.tenant[of_part], amounts[of_part])
            asked = np.flatnonzero(part[rows])
            some = rows[asked]
            order = shares.eviction_order(
                held, columns.tenant[some], amounts[some], values[asked], total, now_s
            )
            found[asked] = np.minimum(found[asked], order)
        found[columns.has(rows, DYING)] = BEYOND
        return found

    def lowest(self, rows: NDArray[np.int64], num_pages: int, now_s: float) -> list[Node]:
        """The first rows to evict, up to `num_pages` pages."""
        values = self.values(rows, now_s)
        ordered = first_to_go(rows, values, self.eviction_order(rows, values, now_s), num_pages)
        return self.nodes(self._enough(ordered, num_pages))

    def highest(self, rows: NDArray[np.int64], num_pages: int, now_s: float) -> list[Node]:
        """The most valued rows above 0, descending, up to `num_pages` pages."""
        values = self.values(rows, now_s)
        useful = values > 0
        return self.nodes(self._enough(ascending(rows[useful], -values[useful], num_pages), num_pages))

    def victim(self, kind: Kind, now_s: float) -> Node | None:
        """The next victim, or None."""
        if self._num_loads != (num_loads := self.mover.counters.adapter_loads):
            self._num_loads = num_loads
            for within in self._within:  # a tenant may be beyond its share now
                self._queues.pop(within, None)
            self._within.clear()
        key = kind, self.asking
        queue = self._queues.get(key, [])
        if now_s - self._ranked_s.get(key, -np.inf) > (HOST_FRESH_S if kind is Kind.HOST else FRESH_S):
            queue = []
        while True:
            while queue:
                node, used_s = queue.pop()
                if self._still(node, used_s, kind):
                    return node
            for old in [one for one, ranked_s in self._ranked_s.items() if now_s - ranked_s > HOST_FRESH_S]:
                self._queues.pop(old, None)
                del self._ranked_s[old]
            queue = self._queues[key] = self._rank(kind, now_s)
            self._ranked_s[key] = now_s
            if not queue:
                return None

    def has_victims(self, kind: Kind, num_pages: int) -> bool:
        """True if the last ranked victims have num_pages pages; more may exist."""
        for node, used_s in reversed(self._queues.get((kind, self.asking), ())):
            if self._still(node, used_s, kind):
                num_pages -= node.num_pages
                if num_pages <= 0:
                    return True
        return False

    def put_back(self, node: Node, kind: Kind) -> None:
        """Make the node the next victim."""
        queue = self._queues[kind, self.asking]
        queue.append((node, float(self.columns.last_used_s[node.row])))

    def _still(self, node: Node, used_s: float, kind: Kind) -> bool:
        columns, row = self.columns, node.row
        flag = CAN_LEAVE_HOST if kind is Kind.HOST else CAN_LEAVE
        unchanged = columns.nodes[row] is node and columns.last_used_s[row] == used_s
        return bool(unchanged and columns.flags[row] & flag)

    def _rank(self, kind: Kind, now_s: float) -> list[tuple[Node, float]]:
        columns = self.columns
        if kind is Kind.HOST:
            rows = columns.where(CAN_LEAVE_HOST)
            backed = columns.has(rows, HAS_DEVICE_PAGES)
        else:
            rows = columns.where(CAN_LEAVE)
            if kind is not Kind.ANY:
                rows = rows[columns.is_adapter[rows] == (kind is Kind.ADAPTER)]
            backed = columns.has(rows, BACKED)
        values = self.values(rows, now_s, host=kind is Kind.HOST)
        order = self.eviction_order(rows, values, now_s, host=kind is Kind.HOST)
        if kind is Kind.HOST and not self.policy.traits.drops_backed_first:
            stays = np.ones(len(columns), dtype=np.bool_)  # a staying node can spare the host copy
            stays[self.leaving_soon(now_s)] = False
            backed &= stays[rows]
        elif not self.policy.traits.drops_backed_first:
            backed = np.zeros(len(rows), dtype=np.bool_)
        dying = columns.has(rows, DYING)
        backed = backed | dying  # eviction of dying nodes loses nothing
        least = order[~dying].min(initial=WITHIN)
        if least == WITHIN and kind is not Kind.HOST:
            self._within.add((kind, self.asking))
        first = order <= least
        chosen = [ascending(rows[part], values[part], BATCH) for part in (backed & first, first & ~backed)]
        victims = np.concatenate(chosen)[:BATCH][::-1].tolist()
        return [(node, float(columns.last_used_s[row])) for row in victims if (node := columns.nodes[row])]

    def leaving_soon(self, now_s: float) -> NDArray[np.int64]:
        """Rows of the device's least valued idle nodes, `LEAVING_SHARE` of the pages.

        Valid for `SOON_S_PER_NODE` per node, without nodes used since.
        """
        columns, asking = self.columns, self.asking
        if now_s >= self._soon_until_s or asking != self._soon_asking:
            rows = columns.where(CAN_LEAVE | CAN_BACK_UP)
            num_pages = int(LEAVING_SHARE * self.mover.device.num_pages)
            values = self.values(rows, now_s)
            ordered = first_to_go(rows, values, self.eviction_order(rows, values, now_s), num_pages)
            found = self._enough(ordered, num_pages)
            self._soon = found, columns.last_used_s[found]
            self._soon_asking, self._soon_until_s = asking, now_s + SOON_S_PER_NODE * len(rows)
        found, used_s = self._soon
        return found[columns.has(found, CAN_LEAVE | CAN_BACK_UP) & (columns.last_used_s[found] == used_s)]

    def nodes(self, rows: NDArray[np.int64]) -> list[Node]:
        return [node for row in rows.tolist() if (node := self.columns.nodes[row])]

    def _enough(self, ordered: NDArray[np.int64], num_pages: int) -> NDArray[np.int64]:
        enough = int(np.searchsorted(np.cumsum(self.columns.pages[ordered]), num_pages)) + 1
        return ordered[:enough]


def first_to_go(
    rows: NDArray[np.int64], values: Floats, order: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """As `ascending`, after all rows earlier in the eviction order."""
    if not order.any():
        return ascending(rows, values, count)
    found = rows[:0]
    for level in (BEYOND, REST, WITHIN):
        if len(found) < count:
            part = np.flatnonzero(order == level)
            found = np.concatenate((found, ascending(rows[part], values[part], count - len(found))))
    return found
