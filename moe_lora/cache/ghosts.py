"""Nodes that were dropped: whether they are asked for again tells what keeping them would have brought."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching import Floats

from .node import Node
from .orders import Namespace
from .reuse import ReuseAges
from .tokens import TOKEN_BYTES

MAX_GHOSTS = 1 << 14
"""Dropped nodes that are remembered, in 3 MB; of more the first dropped are forgotten."""


class Ghosts:
    """A ring of the nodes dropped last.  A node's interval goes on while it is a ghost: it ends with a visit
    if what it held is computed again, without one if it is forgotten.

    Without ghosts every interval ends when its node is dropped, and what comes back only after longer than
    that looks as if it never did.  A ghost is known by its adapter, its place in the prompt and a hash of its
    first block, whatever came before them: cheap, and an error would be in the counts only.
    uses, depth, last_used_s [max_ghosts]: as `ReuseAges.refresh` takes them; no uses: a vacant place.
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
        """The node is dropped.  uses: more than 0."""
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
        """A node was made: what was dropped where it stands now is used again.  The uses of the last of
        these, 0 if there are none.
        """
        start, uses = 0, 0.0
        while self._place and start < len(node.tokens):
            place = self._place.get(self._key_of(node, start))
            if place is None:
                break
            uses = self.uses.item(place)
            start += self._num_bytes[place]
            self._end(place, now_s, visited=True)
        return uses

    def forget(self, namespace: Namespace, now_s: float) -> None:
        """Nobody can ask for these again."""
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
