"""Nodes as rows of arrays, so that a decision over all of them is a few array operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching import NodeColumns

from .flags import BACKED, CAN_BACK_UP, CAN_ENTER, DYING, READY
from .ghosts import Ghosts
from .node import Node
from .reuse import ReuseAges

_COLUMNS = {
    "is_adapter": np.bool_,
    "pages": np.int64,
    "visits": np.float64,
    "recent": np.float64,
    "last_used_s": np.float64,
    "first_token": np.int64,
    "num_tokens": np.int64,
    "wanted": np.int64,
    "turn": np.int64,
    "adapter_row": np.int64,
    "flags": np.uint8,
}


class Columns:
    """One row per node; rows of removed nodes are used again.

    flags: see `flags_of`.  adapter_recent_s: time constant of the decayed visits of adapters.  reuse: after
    which time nodes are used again, counted if learns_reuse; ghosts: what counts there although it was
    dropped.
    """

    is_adapter: NDArray[np.bool_]
    pages: NDArray[np.int64]
    visits: NDArray[np.float64]
    recent: NDArray[np.float64]
    last_used_s: NDArray[np.float64]
    first_token: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    wanted: NDArray[np.int64]
    turn: NDArray[np.int64]
    adapter_row: NDArray[np.int64]
    flags: NDArray[np.uint8]

    def __init__(self, adapter_recent_s: float, *, block_size: int, learns_reuse: bool) -> None:
        self._adapter_recent_s = adapter_recent_s
        self._learns_reuse = learns_reuse
        self._now_s = 0.0
        self.reuse = ReuseAges()
        self.ghosts = Ghosts(self.reuse, block_size)
        self.nodes: list[Node | None] = []
        self._vacant: list[int] = []
        self._capacity = 1024
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(self._capacity, dtype=dtype))

    def __len__(self) -> int:
        """Rows in use, vacant ones between them included."""
        return len(self.nodes)

    def new_row(self) -> int:
        """A row of zeros; the caller puts its node into `nodes`."""
        if self._vacant:
            return self._vacant.pop()
        self.nodes.append(None)
        if len(self.nodes) > self._capacity:
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            self._capacity *= 2
        return len(self.nodes) - 1

    def give_back(self, row: int) -> None:
        """The row's node is removed.  KV that may be asked for again goes on as a ghost."""
        node, last_used_s = self.nodes[row], self.last_used_s.item(row)
        self.nodes[row] = None
        assert node is not None
        if self._learns_reuse and (uses := self._uses(row)):
            if node.is_adapter or self.flags.item(row) & DYING:
                depth = self.first_token.item(row) + self.num_tokens.item(row)
                self.reuse.note(uses, depth, max(0.0, self._now_s - last_used_s), visited=False)
            else:
                self.ghosts.add(node, uses, last_used_s, self._now_s)
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        self._vacant.append(row)

    def recall(self, node: Node, now_s: float) -> None:
        """The node was made; if it was dropped before, it goes on counting where it stopped."""
        self._now_s = now_s
        if self._learns_reuse and (uses := self.ghosts.recall(node, now_s)):
            self.turn[node.row] = max(self.turn.item(node.row), int(uses) + 1)

    def copy_statistics(self, source: int, target: int) -> None:
        """The target has been used as often and as lately as the source."""
        for column in (self.visits, self.recent, self.last_used_s, self.wanted, self.turn):
            column[target] = column[source]

    def let_die(self, adapter_row: int) -> None:
        """An adapter and all below it are `DYING`; it no longer counts among the adapters in use."""
        of_adapter = self.adapter_row[: len(self.nodes)] == adapter_row
        flags = self.flags[: len(self.nodes)]
        flags[of_adapter] = (flags[of_adapter] | DYING) & ~np.uint8(CAN_ENTER | CAN_BACK_UP)
        self.visits[adapter_row] = 0
        node = self.nodes[adapter_row]
        if self._learns_reuse and node is not None:
            self.ghosts.forget(node.namespace, self._now_s)

    def dying(self) -> list[int]:
        """Rows of dying nodes, those below before those above."""
        rows = self.where(DYING)
        ends = self.first_token[rows] + self.num_tokens[rows]
        rows = rows[np.argsort(-ends, kind="stable")]
        return rows.tolist()

    def visit(self, nodes: Sequence[Node], now_s: float) -> None:
        """Each of the nodes was used once."""
        visits, recent, last_used_s = self.visits, self.recent, self.last_used_s
        self._now_s = now_s
        for node in nodes:  # a handful: quicker one by one than as arrays
            row = node.row
            count, age_s = visits.item(row), now_s - last_used_s.item(row)
            is_adapter = node.layer_pages is not None
            if count and self._learns_reuse:
                uses = recent.item(row) if is_adapter else max(count, self.turn.item(row))
                self.reuse.note(uses, node.first_token + node.num_tokens, age_s, visited=True)
            if is_adapter:
                recent[row] = recent.item(row) * math.exp(-age_s / self._adapter_recent_s) + 1
            visits[row] = count + 1
            last_used_s[row] = now_s

    def refresh_reuse(self, now_s: float) -> None:
        """Have `reuse` know the nodes that are there, if it is time."""
        if self.reuse.is_due(now_s):
            rows = np.flatnonzero(self.visits[: len(self.nodes)])
            uses = np.where(
                self.is_adapter[rows], self.recent[rows], np.maximum(self.visits[rows], self.turn[rows])
            )
            depth = self.first_token[rows] + self.num_tokens[rows]
            last_used_s, ghosts = self.last_used_s[rows], self.ghosts
            places = np.flatnonzero(ghosts.uses)
            self.reuse.refresh(
                now_s,
                np.concatenate((uses, ghosts.uses[places])),
                np.concatenate((depth, ghosts.depth[places])),
                now_s - np.concatenate((last_used_s, ghosts.last_used_s[places])),
            )

    def _uses(self, row: int) -> float:
        """What tells the node's class (`policies.reuse.classes_of`); 0 if it was never used."""
        visits: float = self.visits.item(row)
        if not visits:
            return 0.0
        return self.recent.item(row) if self.is_adapter.item(row) else max(visits, self.turn.item(row))

    def has(self, rows: NDArray[np.int64], flag: int) -> NDArray[np.bool_]:
        """[N]: whether each of the rows has the flag."""
        return (self.flags.take(rows) & flag) != 0

    def where(self, flag: int) -> NDArray[np.int64]:
        """Rows that have the flag."""
        return np.flatnonzero((self.flags[: len(self.nodes)] & flag) != 0)  # of booleans: much quicker

    def view(self, rows: NDArray[np.int64], now_s: float) -> NodeColumns:
        """What a policy sees of these rows."""
        return NodeColumns(
            is_adapter=self.is_adapter.take(rows),
            pages=self.pages.take(rows),
            visits=self.visits.take(rows),
            recent=self.recent.take(rows),
            idle_s=now_s - self.last_used_s.take(rows),
            backed=self.has(rows, BACKED),
            first_token=self.first_token.take(rows),
            num_tokens=self.num_tokens.take(rows),
            wanted=self.wanted.take(rows),
            turn=self.turn.take(rows),
            adapter_ready=self.has(self.adapter_row.take(rows), READY),
        )
