# SPDX-License-Identifier: Apache-2.0
"""What a cache reports of its blocks is what can be found in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lora.cache.pages import Node
from moe_lora.cache.unified import UnifiedCache
from moe_lora.engine.kv_events import KvEvents, ReportedTree
from moe_lora.policies.caching.caching import CACHING_POLICIES, lru
from tests.cache.random_operations import BLOCK, RandomCache
from tests.cache.test_salt import leave
from tests.grids import with_quick

Block = tuple[object, tuple[int, ...]]


class Mirror:
    """A reader: hash -> adapter's content and all tokens up to the block's end."""

    def __init__(self, num_contents: int | None = None) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_removed = self.num_again = 0
        self._num_contents = num_contents

    def content(self, namespace: Any) -> object:
        """A namespace's content, by default its own."""
        return namespace if None in (namespace, self._num_contents) else namespace % self._num_contents

    def seed(self, namespace: Any) -> bytes:
        """As the real one, by a name and the content."""
        version = SimpleNamespace(name="a", packed=SimpleNamespace(content_hash=self.content(namespace)))
        return KvEvents.seed(SimpleNamespace(names={namespace: version}), namespace)

    def stored(
        self, namespace: object, parent: int | None, hashes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        before = () if parent is None else self.blocks[parent][1]
        content = self.content(namespace)
        assert parent is None or self.blocks[parent][0] == content
        size = len(token_ids) // len(hashes)
        assert len(token_ids) == size * len(hashes)
        for number, one in enumerate(hashes):
            block = (content, (*before, *token_ids[: (number + 1) * size]))
            assert self.blocks.get(one, block) == block
            self.num_again += one in self.blocks
            self.blocks[one] = block

    def removed(self, hashes: Sequence[int]) -> None:
        for one in hashes:
            del self.blocks[one]
        self.num_removed += len(hashes)


def reported_cache() -> tuple[Mirror, UnifiedCache]:
    mirror = Mirror()
    make_tree = partial(ReportedTree, report=mirror)
    return mirror, UnifiedCache(num_device_pages=400, block_size=4, policy=lru(), make_tree=make_tree)


def found_in(cache: UnifiedCache) -> list[Block]:
    """Blocks of all nodes that a walk from an adapter can reach."""
    blocks: list[Block] = []

    def look(node: Node, before: tuple[int, ...]) -> None:
        for child in cache._tree.children(node):
            if not child.gone:
                tokens = (*before, *memoryview(child.tokens).cast("q"))
                ends = range(len(before) + BLOCK, len(tokens) + 1, BLOCK)
                blocks.extend((child.namespace, tokens[:end]) for end in ends)
                look(child, tokens)

    for adapter in cache._tree.adapters.values():
        if not adapter.gone:
            look(adapter, ())
    return blocks


@pytest.mark.parametrize("policy", with_quick(sorted(CACHING_POLICIES), ("cost-aware", "fastlibra-wol")))
def test_a_reader_has_the_blocks_that_can_be_found(policy):
    mirror = Mirror()
    use = RandomCache(policy, Random(7), make_tree=partial(ReportedTree, report=mirror))
    most = 0
    for _ in range(1500):
        use.step()
        known = [one for one in mirror.blocks.values() if one[0] not in use.forgotten]
        assert sorted(known, key=repr) == sorted(found_in(use.cache), key=repr)
        most = max(most, len(known))
    assert most > 8
    assert mirror.num_removed > 0 == mirror.num_again
    use.finish()
    assert {namespace for namespace, _ in mirror.blocks.values()} <= {None}


def test_blocks_of_equal_content_are_there_until_the_last_version_loses_them():
    mirror = Mirror(2)
    use = RandomCache("lru", Random(7), make_tree=partial(ReportedTree, report=mirror))
    for _ in range(3000):
        use.step()
        known, found = set(mirror.blocks.values()), {(mirror.content(a), b) for a, b in found_in(use.cache)}
        assert found <= known
        assert {content for content, _ in known - found} <= set(map(mirror.content, use.forgotten))
    assert mirror.num_again > 0
    assert mirror.num_removed > 0
    use.finish()
    assert {content for content, _ in mirror.blocks.values()} <= {None}


def test_prompts_with_a_salt_are_not_reported():
    mirror = Mirror()
    cache = UnifiedCache(
        num_device_pages=400, block_size=4, policy=lru(), make_tree=partial(ReportedTree, report=mirror)
    )
    for _ in range(2):
        leave(cache, list(range(13)), "acme")
    assert mirror.blocks == {}
    leave(cache, list(range(13)), "")
    assert [len(tokens) for _, tokens in mirror.blocks.values()] == [4, 8, 12]
    assert leave(cache, [0, 1, 2, 3, 9, 9, 9, 9, 9], "acme") == 4
    assert len(mirror.blocks) == 3


def test_equal_prompts_of_two_namespaces_have_hashes_of_their_own_and_again_the_same():
    found = []
    for _ in range(2):
        mirror = Mirror()
        cache = UnifiedCache(
            num_device_pages=400, block_size=4, policy=lru(), make_tree=partial(ReportedTree, report=mirror)
        )
        cache.add_adapter(1, (1,), 0.0)
        for namespace in (None, 1):
            cache.hold(namespace, 0.0)
            table = cache.match(namespace, list(range(9)), 0.0)
            assert cache.grow(table, 9, 0.0)
            cache.publish(table, list(range(9)), 9, 0.0)
        assert len(mirror.blocks) == 4
        found.append(list(mirror.blocks))
    assert found[0] == found[1]
