# SPDX-License-Identifier: Apache-2.0
"""Nodes as rows of arrays, for decisions over all nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching.caching import (
    DEPTHS,
    EDGES_S,
    NOTHING_KNOWN,
    NUM_BINS,
    NUM_CLASSES,
    NUM_LEVELS,
    STARTS_S,
    WIDTHS_S,
    Floats,
    NodeColumns,
    bins_of,
    classes_of,
    rates_from,
)

from .orders import Namespace
from .pages import BACKED, CAN_BACK_UP, CAN_ENTER, DYING, READY, TOKEN_BYTES, Node

REFRESH_S = 1.0
"""Age of rates before a refresh."""
MEMORY_S = 600.0
"""Time constant of decay of old counts."""
_SIZE, _STARTS_S = NUM_CLASSES * NUM_BINS, STARTS_S.tolist()
_FIRST_S, _STEPS = float(EDGES_S[0]), 2 / math.log(2)


class ReuseAges:
    """Times between visits of nodes.  An interval without a final visit counts by length."""

    def __init__(self) -> None:
        # Lists add single numbers quicker.
        self._hits, self._ends, self._within_s = ([0.0] * _SIZE for _ in range(3))
        self._computed_s = -math.inf
        self.rates = NOTHING_KNOWN

    def note(self, uses: float, depth: int, age_s: float, *, visited: bool) -> None:
        """Count an ended interval in the node's class."""
        level = min(int(uses).bit_length() - 1, NUM_LEVELS - 1) if uses >= 1 else 0
        age_bin = _bin(age_s)
        place = (level + NUM_LEVELS * ((depth > 0) + bisect_left(DEPTHS, depth))) * NUM_BINS + age_bin
        self._hits[place] += visited
        self._ends[place] += 1
        self._within_s[place] += age_s - _STARTS_S[age_bin]

    def is_due(self, now_s: float) -> bool:
        """True if the rates are older than `REFRESH_S`."""
        return now_s - self._computed_s >= REFRESH_S

    def refresh(self, now_s: float, uses: Floats, depth: NDArray[np.int64], age_s: Floats) -> None:
        """Compute the rates anew.  uses, depth, age_s: [N], of nodes and ghosts."""
        kept = math.exp((self._computed_s - now_s) / MEMORY_S) if self._computed_s > -math.inf else 1.0
        self._computed_s = now_s
        hits, ends, within_s = (
            kept * np.array(counts) for counts in (self._hits, self._ends, self._within_s)
        )
        self._hits, self._ends, self._within_s = hits.tolist(), ends.tolist(), within_s.tolist()
        place = classes_of(uses, depth) * NUM_BINS + (bins := bins_of(age_s))
        ends += np.bincount(place, minlength=_SIZE)
        within_s += np.bincount(place, weights=age_s - STARTS_S[bins], minlength=_SIZE)
        ends_CB = ends.reshape(NUM_CLASSES, NUM_BINS)
        later_CB = np.cumsum(ends_CB[:, ::-1], axis=1)[:, ::-1] - ends_CB
        time_CB = within_s.reshape(ends_CB.shape) + later_CB * WIDTHS_S
        self.rates = rates_from(hits.reshape(ends_CB.shape), time_CB)


def _bin(age_s: float) -> int:
    return 0 if age_s < _FIRST_S else min(NUM_BINS - 1, 1 + int(math.log(age_s / _FIRST_S) * _STEPS))


MAX_GHOSTS = 1 << 14
"""Dropped nodes, in 3 MB, oldest out first."""


class Ghosts:
    """A ring of dropped nodes with running intervals; computing the content again is a visit.

    Keys are hashes; collisions only affect counts.  uses, depth, last_used_s: [max_ghosts]; 0 uses: vacant.
    """

    def __init__(self, ages: ReuseAges, block_size: int, max_ghosts: int = MAX_GHOSTS) -> None:
        self.uses: Floats = np.zeros(max_ghosts)
        self.depth: NDArray[np.int64] = np.zeros(max_ghosts, dtype=np.int64)
        self.last_used_s: Floats = np.zeros(max_ghosts)
        self._ages = ages
        self._block_bytes = block_size * TOKEN_BYTES
        self._owner: NDArray[np.int64] = np.zeros(max_ghosts, dtype=np.int64)
        self._num_bytes = [0] * max_ghosts
        self._key = [0] * max_ghosts
        self._place: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._place)

    def add(self, node: Node, uses: float, last_used_s: float, now_s: float) -> None:
        """Add a dropped node.  uses: more than 0."""
        key, place = self._key_of(node, 0), self._next
        self._next = (place + 1) % len(self._key)
        if self.uses.item(place):
            self._end(place, now_s, visited=False)
        if key in self._place:
            self._end(self._place[key], now_s, visited=False)
        self.uses[place] = uses
        self.depth[place] = node.first_token + node.num_tokens
        self.last_used_s[place] = last_used_s
        self._owner[place] = hash(node.namespace)
        self._num_bytes[place] = len(node.tokens)
        self._key[place] = key
        self._place[key] = place

    def recall(self, node: Node, now_s: float) -> float:
        """Visit the ghosts of a new or lengthened node.  Returns the last ghost's uses, or 0."""
        uses = 0.0
        while self._place and node.recalled < len(node.tokens):
            place = self._place.get(self._key_of(node, node.recalled))
            if place is None:
                break
            uses = self.uses.item(place)
            node.recalled += self._num_bytes[place]
            self._end(place, now_s, visited=True)
        return uses

    def forget(self, namespace: Namespace, now_s: float) -> None:
        for place in np.flatnonzero((self._owner == hash(namespace)) & (self.uses > 0)).tolist():
            self._end(place, now_s, visited=False)

    def _key_of(self, node: Node, start: int) -> int:
        block = node.tokens[start : start + self._block_bytes]
        return hash((node.namespace, node.first_token + start // TOKEN_BYTES, block))

    def _end(self, place: int, now_s: float, *, visited: bool) -> None:
        age_s = max(0.0, now_s - self.last_used_s.item(place))
        self._ages.note(self.uses.item(place), self.depth.item(place), age_s, visited=visited)
        self.uses[place] = 0
        del self._place[self._key[place]]


_COLUMNS = (
    *("is_adapter", "pages", "visits", "recent", "last_used_s", "first_token", "num_tokens", "wanted"),
    *("turn", "adapter_row", "tenant", "flags"),
)


class Columns:
    """A row per node; rows of removed nodes are reused.

    flags: `flags_of`.  tenant: of the last request.
    """

    def __init__(self, adapter_recent_s: float, *, block_size: int, learns_reuse: bool) -> None:
        self._capacity = size = 1024
        self.is_adapter = np.zeros(size, np.bool_)
        self.pages = np.zeros(size, np.int64)
        self.visits = np.zeros(size)
        self.recent = np.zeros(size)
        self.last_used_s = np.zeros(size)
        self.first_token = np.zeros(size, np.int64)
        self.num_tokens = np.zeros(size, np.int64)
        self.wanted = np.zeros(size, np.int64)
        self.turn = np.zeros(size, np.int64)
        self.adapter_row = np.zeros(size, np.int64)
        self.tenant = np.zeros(size, np.int64)
        self.flags = np.zeros(size, np.uint8)
        self._adapter_recent_s = adapter_recent_s
        self._learns_reuse = learns_reuse
        self._now_s = 0.0
        self.reuse = ReuseAges()
        self.ghosts = Ghosts(self.reuse, block_size)
        self.nodes: list[Node | None] = []
        self._vacant: list[int] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def new_row(self) -> int:
        """A row of zeros; the caller sets the node."""
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
        """Remove the node.  KV that may return becomes a ghost."""
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
        """Continue a matching ghost's count of uses."""
        self._now_s = now_s
        if self._learns_reuse and (uses := self.ghosts.recall(node, now_s)):
            self.turn[node.row] = max(self.turn.item(node.row), int(uses) + 1)

    def copy_statistics(self, source: int, target: int) -> None:
        """Copy uses and last use."""
        for column in (self.visits, self.recent, self.last_used_s, self.wanted, self.turn, self.tenant):
            column[target] = column[source]

    def let_die(self, adapter_row: int) -> None:
        """Mark an adapter's subtree `DYING`, and clear the adapter's visits."""
        of_adapter = self.adapter_row[: len(self.nodes)] == adapter_row
        flags = self.flags[: len(self.nodes)]
        flags[of_adapter] = (flags[of_adapter] | DYING) & ~np.uint8(CAN_ENTER | CAN_BACK_UP)
        self.visits[adapter_row] = 0
        node = self.nodes[adapter_row]
        if self._learns_reuse and node is not None:
            self.ghosts.forget(node.namespace, self._now_s)

    def dying(self) -> list[int]:
        """Rows of dying nodes, children before parents."""
        rows = self.where(DYING)
        ends = self.first_token[rows] + self.num_tokens[rows]
        rows = rows[np.argsort(-ends, kind="stable")]
        return rows.tolist()

    def visit(self, nodes: Sequence[Node], now_s: float, tenant: int) -> None:
        """Count a use of each node."""
        visits, recent, last_used_s = self.visits, self.recent, self.last_used_s
        self._now_s = now_s
        for node in nodes:  # a handful: no arrays
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
            self.tenant[row] = tenant

    def refresh_reuse(self, now_s: float) -> None:
        """Update `reuse`, if due."""
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
        visits: float = self.visits.item(row)
        if not visits:
            return 0.0
        return self.recent.item(row) if self.is_adapter.item(row) else max(visits, self.turn.item(row))

    def has(self, rows: NDArray[np.int64], flag: int) -> NDArray[np.bool_]:
        """[N]: rows with the flag."""
        return (self.flags.take(rows) & flag) != 0

    def where(self, flag: int) -> NDArray[np.int64]:
        """Row numbers with the flag."""
        return np.flatnonzero((self.flags[: len(self.nodes)] & flag) != 0)

    def view(self, rows: NDArray[np.int64], now_s: float) -> NodeColumns:
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
