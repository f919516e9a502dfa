# SPDX-License-Identifier: Apache-2.0
"""Tiers of nodes' pages, and orders for moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from .orders import CacheCounters, Copy, LoadAdapter, Namespace, Order
from .pages import CAN_LEAVE, CAN_LEAVE_HOST, Node, Tier
from .tree import DependencyTree

SLICE = 64
"""Nodes freed per sweep, blocking the engine's thread."""


class NodeMover:
    """Changes nodes' states, pages and places in the tree."""

    on_departure: Callable[[Namespace], None] | None = None
    on_load_end: Callable[[Namespace], None] | None = None

    def __init__(self, tree: DependencyTree, device: Tier, host: Tier) -> None:
        self.tree = tree
        self.device = device
        self.host = host
        self.counters = CacheCounters()
        self.held: set[Node] = set()
        self.moving: dict[int, Node] = {}
        self.num_device_adapters = 0
        """Arriving adapters included."""
        self.orders: list[Order] = []
        self._copy_ids = itertools.count()
        self.any_dying = False
        self._to_sweep: list[int] = []

    def can_leave(self, node: Node) -> bool:
        """True for an idle device leaf."""
        return bool(self.tree.columns.flags[node.row] & CAN_LEAVE)

    def pin(self, node: Node) -> None:
        """Add a user; a leaving node stays."""
        node.pins += 1
        node.leaves = False
        if node.pins == 1:
            self.held.add(node)
            self.tree.keep(node)

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0
        if node.pins == 0:
            self.held.discard(node)
            self.tree.refresh(node)

    def bring_in(self, node: Node, pages: list[int]) -> None:
        """Order the bytes into these device pages."""
        copy_id = next(self._copy_ids)
        order: Order
        if node.host_pages is not None:
            order = Copy(copy_id, node.namespace, node.is_adapter, True, tuple(pages), tuple(node.host_pages))
            self.counters.pages_in += len(pages)
        else:
            order = LoadAdapter(copy_id, node.namespace, first_pages(node, pages))
            self.counters.pages_loaded += len(pages)
        node.moving_in, node.failed = True, False
        self._enqueue(order, node)
        self._set_device(node, pages)
        if node.is_adapter:
            self.num_device_adapters += 1
            self.counters.adapter_loads += 1

    def settle(self, node: Node, pages: list[int]) -> None:
        """The bytes are in these device pages already."""
        self.device.hand_over(pages, node.row)
        self._set_device(node, pages)

    def send_out(self, node: Node, host_pages: list[int], *, leaves: bool) -> None:
        """Order the bytes into host pages; leaves: then free the device pages."""
        assert node.device_pages is not None
        copy_id = next(self._copy_ids)
        device_pages = tuple(node.device_pages)
        order = Copy(copy_id, node.namespace, node.is_adapter, False, device_pages, tuple(host_pages))
        node.host_pages, node.moving_out, node.leaves = host_pages, True, leaves
        self.counters.pages_out += len(host_pages)
        self._enqueue(order, node)
        self.tree.refresh(node)

    def drop(self, node: Node) -> None:
        """Free a device leaf's pages.  KV without a host copy is gone, with its host subtree."""
        assert self.can_leave(node), "only idle leaves leave the device"
        if not node.is_adapter and node.host_pages is None:
            self.counters.pages_dropped += node.num_pages
        self._leave_device(node)
        if not node.is_adapter and node.host_pages is None:
            for lower in self.tree.bottom_up(node) if node.num_children else (node,):
                self.discard(lower)

    def drop_host(self, node: Node) -> None:
        """Free the host pages."""
        assert self.tree.columns.flags[node.row] & CAN_LEAVE_HOST
        self._leave_host(node)
        if not node.is_adapter and node.device_pages is None:
            self.tree.remove(node)

    def discard(self, node: Node) -> None:
        """Free an unused node without children."""
        assert not node.pins
        assert not node.moving
        self._leave(node)
        self.tree.remove(node)

    def let_die(self, node: Node) -> None:
        """Make the subtree unfindable.

        An idle adapter's pages are free at once, the rest by `sweep`.  One array operation marks all KV: up
        to 100 000 nodes.
        """
        self.any_dying = True
        if node.is_adapter:
            self.tree.hide(node)
            self.tree.columns.let_die(node.row)
            if not (node.pins or node.moving):
                self._leave(node)
        else:
            for lower in self.tree.bottom_up(node):
                self.tree.hide(lower)
                self.tree.refresh(lower)
        self.sweep()

    def sweep(self) -> bool:
        """Free a slice of unused dying nodes; True if more may remain."""
        num_freed, columns, is_listed_anew = 0, self.tree.columns, False
        while self.any_dying and num_freed < SLICE:
            if not self._to_sweep:
                if is_listed_anew:  # the others are in use
                    return False
                self._to_sweep, is_listed_anew = columns.dying()[::-1], True
                self.any_dying = bool(self._to_sweep)
                continue
            node = columns.nodes[self._to_sweep.pop()]
            if node is None or not node.dying or node.pins or node.moving or node.num_children:
                continue
            self.discard(node)
            num_freed += 1
        return self.any_dying

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a KV node; returns the new first part."""
        head = self.tree.split(node, num_blocks)
        for tier, pages in ((self.device, head.device_pages), (self.host, head.host_pages)):
            if pages is not None:
                tier.hand_over(pages, head.row)
        return head

    def copied(self, copy_id: int) -> None:
        """An order is done."""
        node = self.moving.pop(copy_id)
        leaves, node.leaves = node.leaves, False
        if node.is_adapter and node.moving_in:
            self._end_load(node)
        node.moving_in = node.moving_out = False
        self.tree.refresh(node)
        if leaves and self.can_leave(node):
            self.drop(node)
        self.sweep()

    def failed(self, copy_id: int) -> None:
        node = self.moving.pop(copy_id)
        node.leaves = False
        if node.moving_out:
            node.moving_out = False
            self._leave_host(node)
        elif node.is_adapter:
            node.moving_in, node.failed = False, True
            self._end_load(node)
            self._leave_device(node)
            for child in list(self.tree.children(node)):
                if child.device_pages is not None and self.tree.keeps_dependencies:
                    self.let_die(child)
        else:
            node.moving_in, node.lost = False, True
            self.let_die(node)
        self.sweep()

    def _end_load(self, node: Node) -> None:
        if self.on_load_end is not None:
            self.on_load_end(node.namespace)

    def _enqueue(self, order: Order, node: Node) -> None:
        self.orders.append(order)
        self.moving[order.copy_id] = node

    def _leave(self, node: Node) -> None:
        if node.device_pages is not None:
            self._leave_device(node)
        self._leave_host(node)

    def _leave_device(self, node: Node) -> None:
        assert node.device_pages is not None
        self.device.give_back(node.device_pages, is_adapter=node.is_adapter)
        self._set_device(node, None)
        if node.is_adapter and node.num_pages:
            self.num_device_adapters -= 1
            self.counters.adapter_evictions += 1
            if self.on_departure is not None:
                self.on_departure(node.namespace)

    def _leave_host(self, node: Node) -> None:
        if node.host_pages is not None:
            self.host.give_back(node.host_pages, is_adapter=node.is_adapter)
            node.host_pages = None
            self.tree.refresh(node)

    def _set_device(self, node: Node, pages: list[int] | None) -> None:
        node.device_pages = pages
        self.tree.refresh(node)
        parent = node.parent
        if parent is not None:
            parent.num_device_children += -1 if pages is None else 1
            if not (parent.pins or parent.moving_in):  # a busy parent can't leave
                self.tree.refresh(parent)
        if node.num_children > node.num_device_children and not node.gone:  # none below a dying node
            for child in self.tree.children(node):
                self.tree.refresh(child)


def first_pages(node: Node, pages: list[int]) -> tuple[int, ...]:
    """Start of each layer's run among an adapter's pages; -1: empty."""
    assert node.layer_pages is not None
    starts = itertools.accumulate(node.layer_pages, initial=0)
    return tuple(
        pages[start] if length else -1 for start, length in zip(starts, node.layer_pages, strict=False)
    )
