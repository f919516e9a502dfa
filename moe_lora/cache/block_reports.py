# SPDX-License-Identifier: Apache-2.0
"""A dependency tree that reports blocks of tokens which can be found from now on, or no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from .orders import Namespace
from .pages import Node
from .tree import DependencyTree

HASH_BYTES = 8
VOCABULARY_BITS = 32
"""A first token above them is of a prompt with a salt, which is not reported."""


class BlockReport(Protocol):
    """What the tree tells.  A hash stands for a block with all blocks before it, in its namespace."""

    def stored(
        self, namespace: Namespace, parent: int | None, hashes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Further blocks behind the block `parent`; None: the first ones."""

    def removed(self, hashes: Sequence[int]) -> None:
        """These blocks can't be found any more."""


class ReportedTree(DependencyTree):
    """`DependencyTree` with a hash for each block."""

    def __init__(self, block_size: int, *, report: BlockReport, **settings: Any) -> None:
        super().__init__(block_size, **settings)
        self._report = report
        self._hashes: dict[Node, list[int]] = {}

    def add_kv(self, parent: Node, tokens: bytes, now_s: float) -> Node:
        node = super().add_kv(parent, tokens, now_s)
        first = int(np.frombuffer(tokens, np.int64, 1)[0])
        if parent in self._hashes or (parent.is_adapter and first >> VOCABULARY_BITS == 0):
            self._hashes[node] = []
            self._store(node, tokens)
        return node

    def lengthen(self, node: Node, tokens: bytes, pages: list[int], now_s: float) -> None:
        super().lengthen(node, tokens, pages, now_s)
        if node in self._hashes:
            self._store(node, tokens)

    def split(self, node: Node, num_blocks: int) -> Node:
        head = super().split(node, num_blocks)
        if (hashes := self._hashes.get(node)) is not None:
            self._hashes[head], self._hashes[node] = hashes[:num_blocks], hashes[num_blocks:]
        return head

    def hide(self, node: Node) -> None:
        super().hide(node)
        if hashes := self._hashes.pop(node, None):
            self._report.removed(hashes)

    def _store(self, node: Node, tokens: bytes) -> None:
        """Report the node's last blocks, of these tokens."""
        known = self._hashes[node] or (node.parent and self._hashes.get(node.parent))
        before = known[-1] if known else None
        seed, found = repr(node.namespace).encode() if before is None else _bytes(before), list[int]()
        for at in range(0, len(tokens), self._block_bytes):
            digest = blake2b(tokens[at : at + self._block_bytes], digest_size=HASH_BYTES, key=seed[:64])
            seed = digest.digest()
            found.append(int.from_bytes(seed, "little"))
        self._hashes[node] += found
        self._report.stored(node.namespace, before, found, np.frombuffer(tokens, np.int64).tolist())


def _bytes(value: int) -> bytes:
    return value.to_bytes(HASH_BYTES, "little")


def reported(report: BlockReport) -> Callable[..., DependencyTree]:
    """Makes trees that report."""

    def make(block_size: int, **settings: Any) -> DependencyTree:
        return ReportedTree(block_size, report=report, **settings)

    return make
