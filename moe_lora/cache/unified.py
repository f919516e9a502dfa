# SPDX-License-Identifier: Apache-2.0
"""A cache of adapters and history KV over two arenas of pages."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count, takewhile
from typing import Literal

from moe_lora.core.errors import CapacityError
from moe_lora.policies.caching.caching import ANYBODY, FIRST, NOBODY, Asker, CachingPolicy

from .node_mover import NodeMover, first_pages
from .orders import Namespace, Order, Readiness
from .pages import (
    BACKED,
    DYING,
    HAS_DEVICE_PAGES,
    PRIVATE,
    READY,
    TOKEN_BYTES,
    BlockTable,
    Node,
    Tier,
    encode,
)
from .ranking import Ranking
from .room import Room
from .swapper import Swapper
from .tree import DependencyTree

SALT_SHIFT = 32
"""Bits of a token id for a vocabulary."""
MAX_SALTS = 10_000
"""Salts with findable prefixes, the latest."""
SWAP_OUT_ABOVE = 0.95
"""Pages move out above this used share of the device."""
SWAP_IN_BELOW = 0.7
"""Pages move in below this used share."""


class UnifiedCache:
    """Adapters and KV of finished prefixes in a dependency tree (FastLibra, sections 4 and 5).

    For one thread.  now_s never decreases.  No call waits: the caller executes orders (`take_orders`) and
    confirms each (`copied`, `failed`).
    """

    _make_table = BlockTable

    def __init__(
        self,
        *,
        num_device_pages: int,
        num_host_pages: int = 0,
        block_size: int,
        policy: CachingPolicy,
        max_kv_pages: int | None = None,
        max_adapters: int | None = None,
        prefix_caching: bool = True,
        upper: float = SWAP_OUT_ABOVE,
        lower: float = SWAP_IN_BELOW,
        make_tree: Callable[..., DependencyTree] = DependencyTree,
    ) -> None:
        """block_size: tokens per page.  max_kv_pages: on the device, cached included.  max_adapters: with
        device pages.  upper, lower: see `tick`.
        """
        if not 0 <= lower <= upper <= 1:
            raise ValueError(f"lower={lower}, upper={upper} must be shares with lower <= upper <= 1")
        traits = policy.traits
        self._tree = make_tree(
            block_size,
            keeps_dependencies=traits.keeps_dependencies,
            learns_reuse=traits.learns_reuse,
            adapter_recent_s=policy.adapter_recent_s,
        )
        self._mover = NodeMover(self._tree, Tier(num_device_pages), Tier(num_host_pages))
        self._ranking = Ranking(self._mover, policy, max_adapters)
        self._room = Room(self._ranking, max_kv_pages, max_adapters)
        self.max_adapters, self.max_adapter_pages = self._room.max_adapters, self._room.max_adapter_pages
        self._swapper = Swapper(self._room, upper=upper, lower=lower)
        self._sharing = prefix_caching
        self._salts: OrderedDict[str, int] = OrderedDict()
        self._salt_numbers = count(1)
        self.asker = ANYBODY
        """Tenant of later holds and matches."""
        self._tenant = NOBODY
        self._asked_s = -math.inf
        self._block_size = block_size
        self.counters = self._mover.counters
        self._traits = traits
        self._base = self._tree.add_adapter(None, (), 0.0)
        self._base.device_pages = []
        self._tree.refresh(self._base)

    def count_for(self, tenant: str, share: float, now_s: float) -> None:
        """Set the tenant of later holds and matches.  share: weight in the arenas."""
        if self._tenant != NOBODY and self._ranking.shares is None and tenant != self.asker.tenant:
            self._divide()
        self.asker, self._asked_s, shares = Asker(tenant, share), now_s, self._ranking.shares
        self._tenant = FIRST if shares is None else shares.ask(tenant, share, now_s)

    def _divide(self) -> None:
        """Earlier use counts for the first tenant."""
        from moe_lora.policies.caching.arena_shares import ArenaShares

        self._ranking.shares = ArenaShares()
        self._ranking.shares.ask(*self.asker, self._asked_s)

    def add_adapter(
        self,
        namespace: Namespace,
        layer_pages: Sequence[int],
        now_s: float,
        *,
        inherits: Namespace | None = None,
    ) -> None:
        """Add an adapter's node.

        layer_pages: all zero or none: remote, always ready.  inherits: replaced version, a source of visits.
        Raises CapacityError if the adapter can never fit, ValueError for a known namespace, KeyError for an
        unknown replaced version.
        """
        if namespace in self._tree.adapters:
            raise ValueError(f"namespace {namespace!r} is known; give a new version a new uid")
        num_pages, limit = sum(layer_pages), self.max_adapter_pages
        if num_pages > limit:
            raise CapacityError(
                f"the adapter needs {num_pages} pages, the device keeps at most {limit} for adapters; raise "
                "arena_mb, or lower the adapter's rank"
            )
        replaced = None if inherits is None else self._tree.adapters[inherits]
        node = self._tree.add_adapter(namespace, layer_pages, now_s)
        if replaced is not None:
            self._tree.columns.copy_statistics(replaced.row, node.row)
        if not num_pages:
            node.device_pages = []
        self._tree.refresh(node)

    def forget(self, namespace: Namespace) -> None:
        """Remove the adapter: pages are free at once, KV in slices, used content with the last user.

        Raises KeyError for an unknown namespace, ValueError for None.
        """
        if namespace is None:
            raise ValueError("the base model can't be forgotten; give the namespace of an adapter")
        self._mover.let_die(self._tree.adapters[namespace])

    def clear_history(self, namespaces: Iterable[Namespace]) -> None:
        """Make KV unfindable; used pages are free with the last user."""
        for namespace in namespaces:
            for node in list(self._tree.children(self._tree.adapters[namespace])):
                if not node.gone:  # `let_die` frees later nodes of this list too
                    self._mover.let_die(node)

    def evict_all(self) -> None:
        """Free both arenas.  Nothing may be pinned or moving."""
        self.clear_history([name for name, node in self._tree.adapters.items() if not node.gone])
        while self._mover.sweep():
            pass
        for node in self._tree.adapters.values():
            if node.num_pages and node.device_pages is not None:
                self._mover.drop(node)
            if node.host_pages is not None:
                self._mover.drop_host(node)

    def hold(self, namespace: Namespace, now_s: float, *, again: bool = False) -> Readiness:
        """Pin the adapter for a request; load if needed, evicting the least valued nodes.

        NO_ROOM: not pinned; no page is evictable, or history is still being saved.  Counts as a visit except
        with `again`.  The base is always READY.
        """
        node = self._tree.adapters[namespace]
        if node.device_pages is None:
            pages = self._room.take_adapter(node, now_s)
            if pages is None:
                return Readiness.NO_ROOM
            self._mover.bring_in(node, pages)
        self._mover.pin(node)
        if not again:
            self._tree.columns.visit([node], now_s, self._tenant)
            if node.num_pages:
                self.counters.adapter_hits += node.on_device
                self.counters.adapter_misses += not node.on_device
        return self.readiness(namespace)

    def readiness(self, namespace: Namespace) -> Readiness:
        """READY, LOADING, or NO_ROOM; changes nothing."""
        node = self._tree.adapters[namespace]
        if node.on_device:
            return Readiness.READY
        return Readiness.LOADING if node.moving_in else Readiness.NO_ROOM

    def let_go(self, namespace: Namespace, now_s: float) -> None:
        """Undo a `hold`, after the table's release."""
        node = self._tree.adapters[namespace]
        self._mover.unpin(node)
        if not self._traits.keeps_idle_adapters and self._mover.can_leave(node):
            self._swapper.swap_out(node, now_s)
        if self._mover.any_dying:
            self._mover.sweep()

    def pin(self, namespace: Namespace) -> None:
        """Keep on the device until `unpin`."""
        self._mover.pin(self._tree.adapters[namespace])

    def unpin(self, namespace: Namespace) -> None:
        """Undo `pin`."""
        self._mover.unpin(self._tree.adapters[namespace])
        self._mover.sweep()

    def layer_first_pages(self, namespace: Namespace) -> tuple[int, ...]:
        """Start of each layer's run, -1: empty.

        Raises ValueError if the adapter is neither READY nor LOADING.
        """
        node = self._tree.adapters[namespace]
        if node.device_pages is None:
            raise ValueError(f"the adapter of namespace {namespace!r} is not on the device; hold it first")
        return first_pages(node, node.device_pages)

    def place(self, namespace: Namespace) -> Literal["device", "host", "disk"]:
        """Place of the bytes: "device" (ready there), "host", or "disk" (in neither arena)."""
        node = self._tree.adapters[namespace]
        flags = self._tree.columns.flags.item(node.row)
        if flags & READY and node.device_pages is not None:
            return "device"
        return "host" if flags & BACKED else "disk"

    def new_table(self, namespace: Namespace, salt: str = "") -> BlockTable:
        """A table without a lookup."""
        return self._make_table(namespace, salt, self._tenant)

    def match(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        now_s: float,
        *,
        again: bool = False,
        salt: str = "",
    ) -> BlockTable:
        """Pin the longest cached prefix of `tokens`, except the last token.

        The adapter must be held.  Host parts move to the device as room allows (the table is then not
        `ready`), else the match is shorter.  Counts as a visit except with `again`.  salt: must be equal.
        """
        adapter = self._tree.adapters[namespace]
        assert adapter.device_pages is not None or not self._tree.keeps_dependencies, "hold it first"
        table = self._make_table(namespace, salt, self._tenant)
        path: list[Node] = []
        if self._sharing and not adapter.gone:
            path, partial, common = self._tree.walk(adapter, self._salted(tokens, salt) if salt else tokens)
            if partial is not None and not partial.moving:
                path.append(self._mover.split(partial, common))
        depth = self._take(table, path)
        if depth < len(path):
            worth = self._ranking.policy.worth_loading
            rest = takewhile(lambda n: worth(n.first_token, n.num_tokens, n.num_pages), path[depth:])
            self._bring_in(list(rest), now_s)
            depth += self._take(table, path[depth:])
        table.num_matched = table.num_shared * self._block_size
        if not again:
            counters = self.counters
            self._ranking.num_queries += 1
            if depth:
                self._tree.columns.visit(path[:depth], now_s, table.tenant)
            coming = sum([node.num_tokens for node in table.arriving])
            counters.kv_query_tokens += len(tokens)
            counters.kv_host_hit_tokens += coming
            counters.kv_device_hit_tokens += table.num_matched - coming
        return table

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """Make room for `num_tokens` in total; False, without allocation, if pages are short."""
        missing = -(-num_tokens // self._block_size) - len(table.pages)
        if missing > 0:
            if self._ranking.shares is not None:
                self._ranking.shares.make_room_for(table.tenant, now_s)
            pages = self._room.take_kv(missing, PRIVATE, now_s)
            if pages is None:
                self._swapper.note_shortage()
                return False
            table.pages += pages
        return True

    def keep_private(self, table: BlockTable) -> None:
        """In place of `publish`: further blocks are not shared."""

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int, now_s: float) -> None:
        """Make full blocks of the first `num_computed` tokens findable.

        Equal blocks merge: `table.pages` may change.
        """
        size = self._block_size
        if (table.num_shared + 1) * size > num_computed:
            return
        adapter = self._tree.adapters.get(table.namespace)
        if not self._sharing or adapter is None or adapter.gone or (table.tail and table.tail.gone):
            return
        while (table.num_shared + 1) * size <= num_computed:
            start = table.num_shared * size
            fresh = tokens[start : num_computed // size * size]
            fresh = encode(self._salted(fresh, table.salt) if table.salt and not start else fresh)
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

    def release(self, table: BlockTable, now_s: float) -> None:
        """Findable blocks stay if the policy keeps history."""
        tail = table.tail
        self._mover.device.give_back(table.pages[table.num_shared :])
        table.pages, table.num_shared, table.arriving = [], 0, []
        table.tail, table.owns_tail = None, False
        if tail is not None:
            self._mover.unpin(tail)
            if not self._traits.keeps_history:
                self._discard_up(tail)
        if self._mover.any_dying:
            self._mover.sweep()

    def tick(self, now_s: float, batch_size: int) -> bool:
        """Forget a slice, then swap out above `upper`, in below `lower`; every 100 ms.

        True if more is to be forgotten.  batch_size: running requests (equation 3).
        """
        if self._ranking.shares is not None:
            self._ranking.shares.make_room_for(NOBODY, now_s)
        return self._swapper.tick(now_s, batch_size)

    def look_ahead(self, queued: Iterable[tuple[Namespace, Sequence[int], str]]) -> None:
        """Set next requests' adapters and prefixes (tokens and salt)."""
        if self._traits.looks_ahead:
            self._swapper.want(
                self._find(namespace, self._salted(tokens, salt) if salt else tokens)
                for namespace, tokens, salt in queued
            )

    def _salted(self, tokens: Sequence[int], salt: str) -> Sequence[int]:
        """The salt goes into the first token, outside any vocabulary."""
        number = self._salts[salt] = self._salts.pop(salt, 0) or next(self._salt_numbers)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        return [tokens[0] + (number << SALT_SHIFT), *tokens[1:]]

    def note_remote(self, namespace: Namespace, ready: bool) -> None:
        """Presence of a page-less adapter on the LoRA Server."""
        node = self._tree.adapters[namespace]
        node.reachable = ready
        self._tree.refresh(node)

    def watch(self, on_departure: Callable[[Namespace], None]) -> None:
        """Call `on_departure` once an adapter's device pages are freed, also after a failed load."""
        self._mover.on_departure = on_departure

    def watch_loads(self, on_end: Callable[[Namespace], None]) -> None:
        """Call `on_end` at the end or failure of a load."""
        self._mover.on_load_end = on_end

    def take_orders(self) -> list[Order]:
        """Orders since the last call, for any order of execution."""
        orders, self._mover.orders = self._mover.orders, []
        return orders

    def copied(self, copy_id: int) -> None:
        """Raises KeyError for an unknown id."""
        self._mover.copied(copy_id)

    def failed(self, copy_id: int) -> None:
        """Waiters are lost (`BlockTable.lost`, `readiness` NO_ROOM)."""
        self._mover.failed(copy_id)

    def usage(self) -> dict[str, int]:
        """Pages now.  device_kv_used: of sequences.  device_kv_invalid: without the adapter there."""
        device, host, columns = self._mover.device, self._mover.host, self._tree.columns
        rows = columns.where(HAS_DEVICE_PAGES)
        rows = rows[~columns.is_adapter[rows]]
        pages, used = columns.pages[rows], self._room.blocked_rows(moving=False)[rows]
        invalid = ~columns.has(columns.adapter_row[rows], HAS_DEVICE_PAGES) & ~columns.has(rows, DYING)
        return {
            "device_kv": device.num_kv,
            "device_adapters": device.num_adapter,
            "device_free": device.num_free,
            "host_kv": host.num_kv,
            "host_adapters": host.num_adapter,
            "host_free": host.num_free,
            "device_kv_used": device.num_kv - int(pages[~used].sum()),
            "device_kv_invalid": int(pages[invalid].sum()),
        }

    def _find(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        adapter = self._tree.adapters.get(namespace)
        if adapter is None or adapter.gone:
            return []
        path, partial, _ = self._tree.walk(adapter, tokens)
        return [adapter, *path, *([partial] if partial is not None else ())]

    def _bring_in(self, path: list[Node], now_s: float) -> bool:
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
        end = table.num_shared + len(tokens) // (TOKEN_BYTES * self._block_size)
        pages = table.pages[table.num_shared : end]
        tail = table.tail if table.owns_tail else None
        if tail and tail.pins == 1 and not (tail.num_children or tail.host_pages is not None or tail.moving):
            self._mover.device.hand_over(pages, tail.row)
            self._tree.lengthen(tail, tokens, pages, now_s)
        else:
            node = self._tree.add_kv(parent, tokens, now_s)
            self._tree.columns.tenant[node.row] = table.tenant
            self._mover.settle(node, pages)
            self._move_tail(table, node, owned=True)
        table.num_shared = end

    def _adopt(self, table: BlockTable, twin: Node) -> bool:
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
