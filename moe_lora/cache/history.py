"""KV of sequences: found in the tree, grown in private, made findable, and left behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from .node import TOKEN_BYTES, Node, encode
from .node_mover import NodeMover
from .orders import Namespace
from .pages import PRIVATE, BlockTable
from .room import Room


class History:
    """What `UnifiedCache` does for block tables.

    keeps_history: KV of finished sequences stays.  sharing: equal prefixes are found at all.
    """

    def __init__(self, room: Room, mover: NodeMover, *, keeps_history: bool, sharing: bool) -> None:
        self._room = room
        self._mover = mover
        self._tree = mover.tree
        self._block_size = mover.tree.block_size
        self._keeps_history = keeps_history
        self._sharing = sharing

    def match(self, namespace: Namespace, tokens: Sequence[int], now_s: float, *, again: bool) -> BlockTable:
        """See `UnifiedCache.match`."""
        adapter = self._tree.adapters[namespace]
        assert adapter.device_pages is not None or not self._tree.keeps_dependencies, "hold it first"
        table = BlockTable(namespace)
        path = self._path(adapter, tokens)
        depth = self._take(table, path)
        if depth < len(path):
            self._bring_in(self._worth_loading(path[depth:]), now_s)
            depth += self._take(table, path[depth:])
        table.num_matched = table.num_shared * self._block_size
        if not again:
            self._count(path[:depth], table, len(tokens), now_s)
        return table

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """See `UnifiedCache.grow`."""
        missing = -(-num_tokens // self._block_size) - len(table.pages)
        if missing > 0:
            pages = self._room.take_kv(missing, PRIVATE, now_s)
            if pages is None:
                return False
            table.pages += pages
        return True

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int, now_s: float) -> None:
        """See `UnifiedCache.publish`."""
        size = self._block_size
        if (table.num_shared + 1) * size > num_computed:
            return
        adapter = self._tree.adapters.get(table.namespace)
        if not self._sharing or adapter is None or adapter.gone or (table.tail and table.tail.gone):
            return
        while (table.num_shared + 1) * size <= num_computed:
            start = table.num_shared * size
            fresh = encode(tokens[start : num_computed // size * size])
            parent = table.tail or adapter
            twin = self._tree.child(parent, fresh)
            if twin is None:
                self._insert(table, parent, fresh, now_s)
                return
            common = self._tree.common(twin.tokens, fresh)
            if common < twin.num_pages:
                if twin.moving:
                    return
                twin = self._mover.split(twin, common)
            if not self._adopt(table, twin):
                return

    def release(self, table: BlockTable) -> None:
        """See `UnifiedCache.release`."""
        tail = table.tail
        self._mover.device.give_back(table.pages[table.num_shared :])
        table.pages, table.num_shared, table.arriving = [], 0, []
        table.tail, table.owns_tail = None, False
        if tail is not None:
            self._mover.unpin(tail)
            if not self._keeps_history:
                self._discard_up(tail)
        self._mover.sweep()

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """Nodes that a request needs, its adapter first; changes nothing."""
        adapter = self._tree.adapters.get(namespace)
        if adapter is None or adapter.gone:
            return []
        path, partial, _ = self._tree.walk(adapter, tokens, self._most(tokens))
        return [adapter, *path, *([partial] if partial is not None else ())]

    def _most(self, tokens: Sequence[int]) -> int:
        """Tokens that may be matched: whole blocks, the last token not among them."""
        return max(0, len(tokens) - 1) // self._block_size * self._block_size

    def _path(self, adapter: Node, tokens: Sequence[int]) -> list[Node]:
        if not self._sharing or adapter.gone:
            return []
        path, partial, common = self._tree.walk(adapter, tokens, self._most(tokens))
        if partial is not None and not partial.moving:
            path.append(self._mover.split(partial, common))
        return path

    def _worth_loading(self, path: list[Node]) -> list[Node]:
        """The first ones, up to one that is rather computed anew."""
        worth = self._room.ranking.policy.worth_loading
        return list(takewhile(lambda node: worth(node.first_token, node.num_tokens, node.num_pages), path))

    def _bring_in(self, path: list[Node], now_s: float) -> bool:
        """Order these nodes to the device, the first ones if there is no room for all; whether all."""
        pages = self._room.take_kv(sum(node.num_pages for node in path), PRIVATE, now_s) if path else []
        if pages is None:
            middle = len(path) // 2
            return (
                middle > 0 and self._bring_in(path[:middle], now_s) and self._bring_in(path[middle:], now_s)
            )
        at = 0
        for node in path:
            part = pages[at : at + node.num_pages]
            at += node.num_pages
            self._mover.device.hand_over(part, node.row)
            self._mover.bring_in(node, part)
        return True

    def _take(self, table: BlockTable, path: list[Node]) -> int:
        """Let the table use these further nodes, as far as they have device pages; how many it uses."""
        depth = 0
        for node in path:
            if node.device_pages is None:
                break
            depth += 1
            table.pages += node.device_pages
            if node.moving_in:
                table.arriving.append(node)
        if depth:
            table.num_shared = len(table.pages)
            self._move_tail(table, path[depth - 1], owned=False)
        return depth

    def _move_tail(self, table: BlockTable, tail: Node, *, owned: bool) -> None:
        self._mover.pin(tail)
        if table.tail is not None:
            self._mover.unpin(table.tail)
        table.tail, table.owns_tail = tail, owned

    def _insert(self, table: BlockTable, parent: Node, tokens: bytes, now_s: float) -> None:
        """Give the sequence's own full blocks to the tree: at the end of its own tail, or as a new node."""
        end = table.num_shared + len(tokens) // (TOKEN_BYTES * self._block_size)
        pages = table.pages[table.num_shared : end]
        tail = table.tail
        if tail is not None and table.owns_tail and _can_be_lengthened(tail):
            self._mover.device.hand_over(pages, tail.row)
            self._tree.lengthen(tail, tokens, pages, now_s)
        else:
            node = self._tree.add_kv(parent, tokens, now_s)
            self._mover.settle(node, pages)
            self._move_tail(table, node, owned=True)
        table.num_shared = end

    def _adopt(self, table: BlockTable, twin: Node) -> bool:
        """Share a node whose KV the sequence has computed too; False if it is still on its way."""
        start = table.num_shared
        own = table.pages[start : start + twin.num_pages]
        if twin.device_pages is None:
            self._mover.settle(twin, own)
        elif twin.on_device:
            table.pages[start : start + twin.num_pages] = twin.device_pages
            self._mover.device.give_back(own)
        else:
            return False
        table.num_shared += twin.num_pages
        self._move_tail(table, twin, owned=False)
        return True

    def _discard_up(self, node: Node | None) -> None:
        while node is not None and not (node.is_adapter or node.pins or node.num_children or node.moving):
            parent = node.parent
            self._mover.discard(node)
            node = parent

    def _count(self, path: list[Node], table: BlockTable, num_tokens: int, now_s: float) -> None:
        ranking, counters = self._room.ranking, self._mover.counters
        ranking.num_queries += 1
        if path:
            ranking.columns.visit(path, now_s)
        coming = sum([node.num_tokens for node in table.arriving])
        counters.kv_query_tokens += num_tokens
        counters.kv_host_hit_tokens += coming
        counters.kv_device_hit_tokens += table.num_matched - coming


def _can_be_lengthened(tail: Node) -> bool:
    return tail.pins == 1 and not tail.num_children and tail.host_pages is None and not tail.moving
