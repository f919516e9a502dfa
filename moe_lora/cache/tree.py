# SPDX-License-Identifier: Apache-2.0
"""Dependencies: adapters below a virtual root, KV below an adapter by token prefix.

A radix tree of runs of full blocks.  Source: FastLibra, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from .columns import Columns
from .orders import Namespace
from .pages import ONLY_IDLE, TOKEN_BYTES, Node, encode_more, flags_of

_ROOT = "root"


class DependencyTree:
    """Structure, and the movable nodes.

    keeps_dependencies: see `Traits`.
    """

    def __init__(
        self,
        block_size: int,
        *,
        keeps_dependencies: bool,
        learns_reuse: bool,
        adapter_recent_s: float,
    ) -> None:
        self.block_size = block_size
        self.keeps_dependencies = keeps_dependencies
        self.graph: nx.DiGraph = nx.DiGraph()
        self.columns = Columns(adapter_recent_s, block_size=block_size, learns_reuse=learns_reuse)
        self.adapters: dict[Namespace, Node] = {}
        self._block_bytes = block_size * TOKEN_BYTES
        self._child: dict[tuple[Node, bytes], Node] = {}

    def add_adapter(self, namespace: Namespace, layer_pages: Sequence[int], now_s: float) -> Node:
        columns, row = self.columns, self.columns.new_row()
        node = Node(namespace, row, sum(layer_pages), layer_pages=tuple(layer_pages))
        node.adapter = node
        columns.nodes[row] = node
        columns.is_adapter[row] = True
        columns.pages[row] = node.num_pages
        columns.adapter_row[row] = row
        columns.last_used_s[row] = now_s
        self.adapters[namespace] = node
        self.graph.add_edge(_ROOT, node)
        return node

    def add_kv(self, parent: Node, tokens: bytes, now_s: float) -> Node:
        """A run of blocks below `parent`, visited once."""
        assert parent.adapter is not None
        columns, row = self.columns, self.columns.new_row()
        node = Node(
            parent.namespace,
            row,
            len(tokens) // self._block_bytes,
            parent,
            parent.adapter,
            tokens=tokens,
            first_token=parent.first_token + parent.num_tokens,
        )
        columns.nodes[row] = node
        columns.adapter_row[row] = parent.adapter.row
        columns.visits[row] = 1
        columns.turn[row] = columns.turn.item(parent.row) + 1
        columns.last_used_s[row] = now_s
        self._measure(node)
        columns.recall(node, now_s)
        self.graph.add_edge(parent, node)
        self._child[parent, tokens[: self._block_bytes]] = parent.heir = node
        parent.num_children += 1
        return node

    def walk(self, adapter: Node, tokens: Sequence[int]) -> tuple[list[Node], Node | None, int]:
        """Nodes that match the tokens except the last; a partly matching next node; the matching blocks."""
        most = max(0, len(tokens) - 1) // self.block_size * self.block_size
        path: list[Node] = []
        node, at, size, find = adapter, 0, self._block_bytes, self._child.get
        prompt, limit = b"", most * TOKEN_BYTES
        while at + size <= limit:
            if at + size > len(prompt):
                prompt = encode_more(prompt, tokens, most, at + size)
            child = node.heir
            if child is None or not prompt.startswith(child.tokens, at):
                child = find((node, prompt[at : at + size]))
                if child is None:
                    break
                node.heir = child
                end = at + len(child.tokens)
                if end > len(prompt):
                    prompt = encode_more(prompt, tokens, most, end)
                if not prompt.startswith(child.tokens, at):
                    return path, child, self.common(child.tokens, prompt[at:end])
            path.append(child)
            node = child
            at += len(child.tokens)
        return path, None, 0

    def common(self, ours: bytes, theirs: bytes) -> int:
        """Number of common leading blocks, at least one."""
        size = self._block_bytes
        low, high = 1, min(len(ours), len(theirs)) // size
        while low < high:
            middle = (low + high + 1) // 2
            if ours[low * size : middle * size] == theirs[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child of these tokens' first block."""
        return self._child.get((parent, tokens[: self._block_bytes]))

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a KV node after `num_blocks`; returns the new first part.

        The second part stays the same object: pins hold for the whole.
        """
        assert not node.moving
        assert node.parent is not None
        parent, cut = node.parent, num_blocks * self._block_bytes
        columns, row = self.columns, self.columns.new_row()
        head = Node(
            node.namespace, row, num_blocks, parent, node.adapter, None, node.tokens[:cut], node.first_token
        )
        columns.nodes[row] = head
        columns.adapter_row[row] = columns.adapter_row[node.row]
        columns.copy_statistics(node.row, row)
        for side in ("device_pages", "host_pages"):
            pages = getattr(node, side)
            if pages is not None:
                setattr(head, side, pages[:num_blocks])
                setattr(node, side, pages[num_blocks:])
        head.num_children = 1
        head.num_device_children = int(node.device_pages is not None)
        head.gone = node.gone
        if self._child.get(self._key(node)) is node:
            self._child[self._key(node)] = parent.heir = head
        node.parent, node.tokens = head, node.tokens[cut:]
        node.first_token += head.num_tokens
        node.recalled = max(0, node.recalled - cut)
        node.num_pages -= num_blocks
        self._child[self._key(node)] = node
        self.graph.remove_edge(parent, node)
        self.graph.add_edge(parent, head)
        self.graph.add_edge(head, node)
        for part in (head, node):
            self._measure(part)
            self.refresh(part)
        return head

    def lengthen(self, node: Node, tokens: bytes, pages: list[int], now_s: float) -> None:
        """Append blocks to a leaf on the device only."""
        assert node.device_pages is not None
        node.tokens += tokens
        node.device_pages += pages
        node.num_pages += len(pages)
        self._measure(node)
        self.columns.recall(node, now_s)

    def children(self, node: Node) -> Iterator[Node]:
        return self.graph.successors(node)

    def bottom_up(self, node: Node) -> list[Node]:
        """The node and its subtree, children before parents."""
        return list(nx.dfs_postorder_nodes(self.graph, node))

    def hide(self, node: Node) -> None:
        """Make the node unfindable."""
        node.gone = True
        parent = node.parent
        if parent is not None and self._child.get(self._key(node)) is node:
            del self._child[self._key(node)]
            if parent.heir is node:
                parent.heir = None

    def remove(self, node: Node) -> None:
        """Remove a node without children and pages."""
        assert node.num_children == 0
        assert node.device_pages is None or not node.num_pages
        assert node.host_pages is None
        self.hide(node)
        if node.is_adapter:
            del self.adapters[node.namespace]
        elif node.parent is not None:
            node.parent.num_children -= 1
            self.refresh(node.parent)
        self.graph.remove_node(node)
        self.columns.give_back(node.row)

    def keep(self, node: Node) -> None:
        """The first pin: a faster `refresh`."""
        flags, row = self.columns.flags, node.row
        flags[row] = flags.item(row) & ~ONLY_IDLE

    def refresh(self, node: Node) -> None:
        """Update the node's possible moves."""
        self.columns.flags[node.row] = flags_of(node, keeps_dependencies=self.keeps_dependencies)

    def _key(self, node: Node) -> tuple[Node, bytes]:
        assert node.parent is not None
        return node.parent, node.tokens[: self._block_bytes]

    def _measure(self, node: Node) -> None:
        columns, row = self.columns, node.row
        columns.pages[row] = node.num_pages
        columns.first_token[row] = node.first_token
        columns.num_tokens[row] = node.num_tokens
