"""KV blocks of sequences and of cached prefixes.

A full block is known by its tokens and by the block before it, from a root per namespace (an adapter's
version, or the base): equal prefixes of one namespace share pages, those of different ones never do.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .pages import PageAllocator

Namespace = Hashable
_Key = tuple[Hashable, tuple[int, ...]]
_next_uid = itertools.count()


@dataclass
class Block:
    """One page of KV.  `num_users` sequences hold it; `key` is set once it is full and findable.

    `uid` is never used again, so that a key which names a dropped parent can't match its successor.
    """

    page: int
    namespace: Namespace
    num_users: int = 1
    key: _Key | None = None
    uid: int = field(default_factory=lambda: next(_next_uid))


@dataclass
class BlockTable:
    """A sequence's blocks in order."""

    namespace: Namespace
    blocks: list[Block] = field(default_factory=list)
    num_keyed: int = 0

    @property
    def pages(self) -> list[int]:
        return [block.page for block in self.blocks]


class BlockManager:
    """Gives blocks to sequences, keeps those of finished ones findable, evicts the least recently used.

    max_blocks: upper bound on pages in use for KV, cached ones included.
    """

    def __init__(
        self, pages: PageAllocator, block_size: int, max_blocks: int, *, prefix_caching: bool
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._pages = pages
        self._prefix_caching = prefix_caching
        self._by_key: dict[_Key, Block] = {}
        self._idle: OrderedDict[int, Block] = OrderedDict()
        self._num_blocks = 0

    @property
    def num_used(self) -> int:
        """Blocks held by sequences."""
        return self._num_blocks - len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds but that can still be found."""
        return len(self._idle)

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> BlockTable:
        """Take the longest cached prefix of `tokens`; at least the last token is left to compute."""
        table = BlockTable(namespace)
        parent: Hashable = namespace
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (parent, tuple(tokens[start : start + self.block_size]))
            block = self._by_key.get(key)
            if block is None:
                break
            self._take(block)
            table.blocks.append(block)
            parent = block.uid
        table.num_keyed = len(table.blocks)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False (and nothing taken) if pages run out."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        taken: list[Block] = []
        for _ in range(missing):
            page = self._new_page()
            if page is None:
                for block in taken:
                    self._drop(block)
                return False
            self._num_blocks += 1
            taken.append(Block(page, table.namespace))
        table.blocks += taken
        return True

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens findable."""
        if not self._prefix_caching:
            return
        while (table.num_keyed + 1) * self.block_size <= num_computed:
            index = table.num_keyed
            parent = table.blocks[index - 1].uid if index else table.namespace
            key = (parent, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))
            block = table.blocks[index]
            twin = self._by_key.get(key)
            if twin is None:
                block.key = key
                self._by_key[key] = block
            elif twin is not block:
                self._take(twin)
                table.blocks[index] = twin
                self._drop(block)
            table.num_keyed += 1

    def release(self, table: BlockTable) -> None:
        """The sequence is done (or preempted): findable blocks stay cached, the others are freed."""
        for block in reversed(table.blocks):
            block.num_users -= 1
            if block.num_users:
                continue
            if block.key is None:
                self._drop(block)
            else:
                self._idle[block.uid] = block
        table.blocks.clear()
        table.num_keyed = 0

    def forget(self, namespace: Namespace) -> None:
        """Free every cached block of a namespace that no sequence uses any more."""
        for block in [b for b in self._idle.values() if b.namespace == namespace]:
            del self._idle[block.uid]
            self._drop(block)

    def evict_one(self) -> bool:
        """Free the least recently used cached block; False if there is none."""
        if not self._idle:
            return False
        _, block = self._idle.popitem(last=False)
        self._drop(block)
        return True

    def _take(self, block: Block) -> None:
        if block.num_users == 0:
            del self._idle[block.uid]
        block.num_users += 1

    def _new_page(self) -> int | None:
        if self._num_blocks >= self.max_blocks and not self.evict_one():
            return None
        page = self._pages.alloc_page()
        while page is None and self.evict_one():
            page = self._pages.alloc_page()
        return page

    def _drop(self, block: Block) -> None:
        if block.key is not None:
            del self._by_key[block.key]
        self._pages.free(block.page)
        self._num_blocks -= 1
