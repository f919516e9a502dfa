# SPDX-License-Identifier: Apache-2.0
"""Recomputes what the cache keeps up to date, from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import networkx as nx
import numpy as np

from moe_lora.cache.pages import (
    CAN_BACK_UP,
    CAN_ENTER,
    CAN_LEAVE,
    CAN_LEAVE_HOST,
    DYING,
    FREE,
    HAS_DEVICE_PAGES,
    PRIVATE,
    BlockTable,
    Node,
    Tier,
)
from moe_lora.cache.unified import UnifiedCache


def check(cache: UnifiedCache, tables: Iterable[BlockTable], holds: Counter[object]) -> None:
    """All invariants.  tables: those in use.  holds: times each namespace is held."""
    tree, mover = cache._tree, cache._mover
    tables = list(tables)
    nodes = [node for node in tree.graph if isinstance(node, Node)]
    assert nx.is_tree(tree.graph)
    assert {node.row for node in nodes} == {r for r, node in enumerate(tree.columns.nodes) if node}
    private = [page for table in tables for page in table.pages[table.num_shared :]]
    check_tier(mover.device, {node: node.device_pages for node in nodes}, private)
    check_tier(mover.host, {node: node.host_pages for node in nodes}, [])
    pins = Counter(table.tail for table in tables if table.tail is not None)
    for node in nodes:
        held = holds[node.namespace] if node.is_adapter else 0
        assert node.pins == pins[node] + held
        check_structure(cache, node)
        check_columns(cache, node)
    for table in tables:
        check_table(cache, table)
    with_pages = [n for n in nodes if n.is_adapter and n.num_pages and n.device_pages is not None]
    assert mover.num_device_adapters == len(with_pages)
    assert mover.held == {node for node in nodes if node.pins}
    assert set(mover.moving.values()) == {node for node in nodes if node.moving}


def check_tier(tier: Tier, owned: dict[Node, list[int] | None], private: list[int]) -> None:
    """Every page has one owner at most, and it is the one on record."""
    expected = np.full(tier.num_pages, FREE)
    taken = list(private)
    expected[private] = PRIVATE
    for node, pages in owned.items():
        if pages:
            assert len(pages) == node.num_pages
            expected[pages] = node.row
            taken += pages
    assert len(taken) == len(set(taken)), "a page has two owners"
    assert tier.num_free == tier.num_pages - len(taken), "a page has leaked"
    np.testing.assert_array_equal(tier.owner, expected)
    adapters = sum(len(pages or ()) for node, pages in owned.items() if node.is_adapter)
    assert (tier.num_adapter, tier.num_kv) == (adapters, len(taken) - adapters)


def check_structure(cache: UnifiedCache, node: Node) -> None:
    """A node's place in the tree, and who may be on the device without whom."""
    tree = cache._tree
    children = list(tree.graph.successors(node))
    assert node.num_children == len(children)
    assert node.num_device_children == sum(child.device_pages is not None for child in children)
    assert not (node.moving_in and node.moving_out)
    assert node.heir is None or (node.heir in children and tree.child(node, node.heir.tokens) is node.heir)
    if node.is_adapter:
        check_runs(node)
        return
    (parent,) = tree.graph.predecessors(node)
    assert parent is node.parent
    assert node.adapter is tree.adapters[node.namespace]
    assert parent.namespace == node.namespace
    assert node.num_tokens == node.num_pages * tree.block_size > 0
    assert node.first_token == parent.first_token + parent.num_tokens
    assert node.device_pages is not None or node.host_pages is not None, "a node that is nowhere"
    if not node.gone:
        assert tree.child(parent, node.tokens) is node
        if node.device_pages is not None:
            assert parent.is_adapter or parent.device_pages is not None, "KV without what it follows"
            if tree.keeps_dependencies and not node.adapter.gone:
                assert node.adapter.device_pages is not None, "invalid KV"


def check_runs(adapter: Node) -> None:
    """Each layer's pages on the device lie side by side."""
    if adapter.device_pages is None:
        return
    start = 0
    for length in adapter.layer_pages or ():
        run = adapter.device_pages[start : start + length]
        assert run == list(range(run[0], run[0] + length)) if run else length == 0
        start += length


def check_columns(cache: UnifiedCache, node: Node) -> None:
    """What decisions are made from says what the node says."""
    tree, columns, row = cache._tree, cache._tree.columns, node.row
    on_device, on_host = node.device_pages is not None, node.host_pages is not None
    still = bool(node.num_pages) and not node.moving
    children = list(tree.graph.successors(node))
    if node.is_adapter and not tree.keeps_dependencies:
        leaf = True
    else:
        leaf = all(child.device_pages is None for child in children)
    assert columns.nodes[row] is node
    assert columns.pages[row] == node.num_pages
    assert columns.is_adapter[row] == node.is_adapter
    assert bool(columns.flags[row] & HAS_DEVICE_PAGES) == on_device
    assert bool(columns.flags[row] & CAN_LEAVE) == (still and on_device and leaf and not node.pins)
    dying = node.gone or node.adapter.gone
    assert bool(columns.flags[row] & DYING) == dying
    assert not (dying and columns.flags[row] & CAN_BACK_UP)
    needs = node.parent is None or node.parent.device_pages is not None
    if node.parent is not None and node.parent.is_adapter and not tree.keeps_dependencies:
        needs = True
    from_disk = node.is_adapter and not node.failed
    may_enter = still and not on_device and (on_host or from_disk) and needs and not dying
    assert bool(columns.flags[row] & CAN_ENTER) == may_enter
    host_leaf = on_device or node.is_adapter or not children
    assert bool(columns.flags[row] & CAN_LEAVE_HOST) == (still and on_host and host_leaf)
    if not node.is_adapter:
        assert columns.num_tokens[row] == node.num_tokens
        assert columns.first_token[row] == node.first_token


def check_table(cache: UnifiedCache, table: BlockTable) -> None:
    """Its shared pages are those of the nodes from the adapter down to its tail."""
    path: list[int] = []
    node = table.tail
    while node is not None and not node.is_adapter:
        assert node.device_pages is not None, "a pinned node has left the device"
        path = node.device_pages + path
        node = node.parent
    assert table.pages[: table.num_shared] == path
