"""Which nodes a policy values least or most."""

from __future__ import annotations

from collections import deque
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching import CacheLoad, CachingPolicy, Floats

from .node import BACKED, CAN_BACK_UP, CAN_LEAVE, CAN_LEAVE_HOST, DYING, HAS_DEVICE_PAGES, Node
from .node_mover import NodeMover

BATCH = 256
"""Victims ranked at once."""
CHUNK = 8192
"""Rows valued at once: their columns and the policy's intermediates stay in the processor's cache."""
FRESH_S, HOST_FRESH_S = 0.1, 1.0
"""Age above which a ranking of victims is made anew."""
LEAVING_SHARE = 0.2
"""Part of the device whose history the host should have too, so that it can go at any moment."""
BATCH_WINDOW_S = 5.0
"""Time over which the batch size is averaged (FastLibra, section 5.1)."""


class Kind(Enum):
    """What has to give way."""

    ANY = "any"
    KV = "kv"
    ADAPTER = "adapter"
    HOST = "host"


class Ranking:
    """Asks the policy about all candidates at once.

    Victims are ranked in batches and used for up to `FRESH_S`: one that was used or changed meanwhile is
    passed over.  num_queries: requests matched so far.
    """

    def __init__(self, mover: NodeMover, policy: CachingPolicy) -> None:
        self.mover = mover
        self.policy = policy
        self.columns = mover.tree.columns
        self.num_queries = 0
        self._batches: deque[tuple[float, int]] = deque()
        self._queues: dict[Kind, list[tuple[Node, float]]] = {}
        self._ranked_s: dict[Kind, float] = {}

    def note_batch(self, now_s: float, batch_size: int) -> None:
        """One sample of the number of running requests."""
        self._batches.append((now_s, batch_size))
        while self._batches[0][0] < now_s - BATCH_WINDOW_S:
            self._batches.popleft()

    def load(self, now_s: float) -> CacheLoad:
        columns = self.columns
        if self.policy.traits.learns_reuse:
            columns.refresh_reuse(now_s)
        sizes = [size for _, size in self._batches]
        return CacheLoad(
            num_queries=max(1, self.num_queries),
            adapter_visits=columns.visits[np.flatnonzero(columns.is_adapter[: len(columns)])],
            batch_size=sum(sizes) / len(sizes) if sizes else 0.0,
            num_adapters=self.mover.num_device_adapters,
            reuse=columns.reuse.rates,
        )

    def values(self, rows: NDArray[np.int64], now_s: float, *, host: bool = False) -> Floats:
        """What the policy says of these rows, nothing of dying ones; host: of their being on the host."""
        ask = self.policy.host_values if host else self.policy.values
        load, values = self.load(now_s), np.empty(len(rows))
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            values[part] = ask(self.columns.view(rows[part], now_s), load)
        values[self.columns.has(rows, DYING)] = 0.0
        return values

    def lowest(self, rows: NDArray[np.int64], num_pages: int, now_s: float) -> list[Node]:
        """The least valued of the rows, ascending, as many as have `num_pages` pages together (or all)."""
        return self.nodes(self._take(rows, self.values(rows, now_s), num_pages))

    def highest(self, rows: NDArray[np.int64], num_pages: int, now_s: float) -> list[Node]:
        """The most valued, descending, likewise; those of no value are left out."""
        values = self.values(rows, now_s)
        useful = values > 0
        return self.nodes(self._take(rows[useful], -values[useful], num_pages))

    def victim(self, kind: Kind, now_s: float) -> Node | None:
        """The next node to give way, or None if there is none."""
        queue = self._queues.get(kind, [])
        if now_s - self._ranked_s.get(kind, -np.inf) > (HOST_FRESH_S if kind is Kind.HOST else FRESH_S):
            queue = []
        while True:
            while queue:
                node, used_s = queue.pop()
                if self._still(node, used_s, kind):
                    return node
            queue = self._queues[kind] = self._rank(kind, now_s)
            self._ranked_s[kind] = now_s
            if not queue:
                return None

    def has_victims(self, kind: Kind, num_pages: int) -> bool:
        """Whether those ranked last have so many pages; if not, there may be others."""
        for node, used_s in reversed(self._queues.get(kind, ())):
            if self._still(node, used_s, kind):
                num_pages -= node.num_pages
                if num_pages <= 0:
                    return True
        return False

    def put_back(self, node: Node, kind: Kind) -> None:
        """The node is the next victim."""
        self._queues[kind].append((node, float(self.columns.last_used_s[node.row])))

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
        if kind is Kind.HOST and not self.policy.traits.drops_backed_first:
            stays = np.ones(len(columns), dtype=np.bool_)  # so that its host copy is to spare
            stays[self.leaving_soon(now_s)] = False
            backed &= stays[rows]
        elif not self.policy.traits.drops_backed_first:
            backed = np.zeros(len(rows), dtype=np.bool_)
        backed = backed | columns.has(rows, DYING)  # nothing is lost with them either
        chosen = [ascending(rows[part], values[part], BATCH) for part in (backed, ~backed)]
        order = np.concatenate(chosen)[:BATCH][::-1].tolist()
        return [(node, float(columns.last_used_s[row])) for row in order if (node := columns.nodes[row])]

    def leaving_soon(self, now_s: float) -> NDArray[np.int64]:
        """Rows of the least valued idle nodes of the device, `LEAVING_SHARE` of its pages."""
        rows = self.columns.where(CAN_LEAVE | CAN_BACK_UP)
        num_pages = int(LEAVING_SHARE * self.mover.device.num_pages)
        return self._take(rows, self.values(rows, now_s), num_pages)

    def nodes(self, rows: NDArray[np.int64]) -> list[Node]:
        return [node for row in rows.tolist() if (node := self.columns.nodes[row])]

    def _take(self, rows: NDArray[np.int64], values: Floats, num_pages: int) -> NDArray[np.int64]:
        ordered = ascending(rows, values, num_pages)  # a node has a page at least
        enough = int(np.searchsorted(np.cumsum(self.columns.pages[ordered]), num_pages)) + 1
        return ordered[:enough]


def ascending(rows: NDArray[np.int64], values: Floats, count: int) -> NDArray[np.int64]:
    """The `count` rows of least value, in order, of equal ones the first; all if there are fewer."""
    if len(rows) > count:
        kept = np.sort(np.argpartition(values, count)[:count])
        rows, values = rows[kept], values[kept]
    return rows[np.argsort(values, kind="stable")]
