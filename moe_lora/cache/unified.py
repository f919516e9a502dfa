"""One cache of adapters and history KV over two arenas of equal pages; decides, and has others copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from moe_lora.core.errors import CapacityError
from moe_lora.policies.caching import CachingPolicy

from .history import History
from .node import DYING, HAS_DEVICE_PAGES
from .node_mover import NodeMover, first_pages
from .orders import CacheCounters, Namespace, Order, Readiness
from .pages import BlockTable, Tier
from .ranking import Ranking
from .room import Limits, Room, blocked_rows
from .swapper import Swapper
from .tree import DependencyTree

# Who has how many pages.


def usage(ranking: Ranking) -> dict[str, int]:
    """See `UnifiedCache.usage`."""
    device, host, columns = ranking.mover.device, ranking.mover.host, ranking.columns
    rows = columns.where(HAS_DEVICE_PAGES)
    rows = rows[~columns.is_adapter[rows]]
    pages, used = columns.pages[rows], blocked_rows(ranking, moving=False)[rows]
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


class UnifiedCache:
    """Adapters and the KV of finished prefixes in one dependency tree (FastLibra, sections 4 and 5).

    One thread only.  Time comes in as now_s, never decreasing.  Nothing waits: what needs bytes moved leaves
    an order (`take_orders`) that the caller has executed and then confirms (`copied`, `failed`), from the
    same thread.  on_departure: called with a namespace at the moment its adapter's device pages are given up
    (also where its load failed).
    """

    on_departure: Callable[[Namespace], None] | None = None

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
        upper: float = 0.95,
        lower: float = 0.70,
    ) -> None:
        """block_size: tokens per KV page.  max_kv_pages: upper bound on KV pages of the device, cached ones
        included.  max_adapters: upper bound on adapters with pages on the device (slots).  upper, lower:
        shares of the device above which `tick` swaps out and below which it swaps in.
        """
        if not 0 <= lower <= upper <= 1:
            raise ValueError(f"lower={lower}, upper={upper} must be shares with lower <= upper <= 1")
        traits = policy.traits
        self._tree = DependencyTree(
            block_size,
            keeps_dependencies=traits.keeps_dependencies,
            learns_reuse=traits.learns_reuse,
            adapter_recent_s=policy.adapter_recent_s,
        )
        self._mover = NodeMover(self._tree, Tier(num_device_pages), Tier(num_host_pages))
        self._mover.on_departure = self._note_departure
        self._ranking = Ranking(self._mover, policy)
        limits = _limits(num_device_pages, traits.adapter_share, max_kv_pages, max_adapters)
        self._room = Room(
            self._ranking,
            limits,
            partitioned=traits.adapter_share is not None,
            saves=traits.uses_host_for_kv and num_host_pages > 0,
        )
        self._history = History(
            self._room, self._mover, keeps_history=traits.keeps_history, sharing=prefix_caching
        )
        self._swapper = Swapper(
            self._room, traits, upper=upper, lower=lower, back_up_pages=max(1, num_device_pages // 20)
        )
        self._traits = traits
        self._base = self._tree.add_adapter(None, (), 0.0)
        self._base.device_pages = []
        self._tree.refresh(self._base)

    # -- adapters

    def add_adapter(
        self,
        namespace: Namespace,
        layer_pages: Sequence[int],
        now_s: float,
        *,
        inherits: Namespace | None = None,
    ) -> None:
        """A new node on the second layer.  layer_pages: pages of each layer's extent; all zero (or none):
        its bytes lie elsewhere, it is always ready.  inherits: the version that it replaces, with whose
        visits it begins, lest it be the first to give way.  Raises CapacityError if it could never be held,
        ValueError if the namespace is known, KeyError if the one it replaces is not.
        """
        if namespace in self._tree.adapters:
            raise ValueError(f"namespace {namespace!r} is known; give a new version a new uid")
        num_pages, limit = sum(layer_pages), self._room.limits.adapter_pages
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
        """It will not be asked for again: its pages are free at once, its KV in slices from now on, what is
        in use when its last user goes; what is not free yet gives way first.

        Raises KeyError for an unknown namespace, ValueError for None.
        """
        if namespace is None:
            raise ValueError("the base model can't be forgotten; give the namespace of an adapter")
        self._mover.let_die(self._tree.adapters[namespace])

    def hold(self, namespace: Namespace, now_s: float, *, again: bool = False) -> Readiness:
        """Pin the adapter for one request and have it brought to the device if need be, evicting what the
        policy values least.  NO_ROOM: not pinned, and nothing to evict, or history in its place is being
        saved to the host first: ask again.  Counts as a visit, unless this request held it before, or it is
        for no request (`again`).  The base is always READY.
        """
        node = self._tree.adapters[namespace]
        if node.device_pages is None:
            pages = self._room.take_adapter(node, now_s)
            if pages is None:
                return Readiness.NO_ROOM
            self._mover.bring_in(node, pages)
        self._mover.pin(node)
        if not again:
            self._tree.columns.visit([node], now_s)
            if node.num_pages:
                self.counters.adapter_hits += node.on_device
                self.counters.adapter_misses += not node.on_device
        return self.readiness(namespace)

    def readiness(self, namespace: Namespace) -> Readiness:
        """READY, LOADING, or NO_ROOM if it neither is on the device nor on its way; changes nothing."""
        node = self._tree.adapters[namespace]
        if node.on_device:
            return Readiness.READY
        return Readiness.LOADING if node.moving_in else Readiness.NO_ROOM

    def let_go(self, namespace: Namespace, now_s: float) -> None:
        """Undo one `hold`.  Release the request's table first."""
        node = self._tree.adapters[namespace]
        self._mover.unpin(node)
        if not self._traits.keeps_idle_adapters and self._mover.can_leave(node):
            self._swapper.swap_out(node, now_s)
        self._mover.sweep()

    def pin(self, namespace: Namespace) -> None:
        """Keep the adapter from leaving the device (once it is there) until `unpin`, whoever uses it."""
        self._mover.pin(self._tree.adapters[namespace])

    def unpin(self, namespace: Namespace) -> None:
        """Undo `pin`."""
        self._mover.unpin(self._tree.adapters[namespace])
        self._mover.sweep()

    def layer_first_pages(self, namespace: Namespace) -> tuple[int, ...]:
        """Where each layer's run starts on the device, -1 for empty ones.

        Raises ValueError if the adapter is neither READY nor LOADING.
        """
        node = self._tree.adapters[namespace]
        if node.device_pages is None:
            raise ValueError(f"the adapter of namespace {namespace!r} is not on the device; hold it first")
        return first_pages(node, node.device_pages)

    def place(self, namespace: Namespace) -> Literal["device", "host", "disk"]:
        """Where its bytes are: "device" (ready there), "host", or "disk" (in neither arena)."""
        node = self._tree.adapters[namespace]
        if node.on_device:
            return "device"
        return "host" if node.on_host else "disk"

    # -- KV

    def match(
        self, namespace: Namespace, tokens: Sequence[int], now_s: float, *, again: bool = False
    ) -> BlockTable:
        """Pin the longest cached prefix of `tokens`; at least the last token is left to compute.

        The adapter must be held.  Parts on the host are ordered to the device if there is room (then the
        table is not `ready` yet), else the match ends before them.
        Counts as a visit of each node, unless this request was matched before (`again`).
        """
        return self._history.match(namespace, tokens, now_s, again=again)

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """Make room for `num_tokens` in all; False (and nothing taken) if pages run out.

        Evicts at once, without copies: nodes that the host has too first, then the least valued.
        """
        grown = self._history.grow(table, num_tokens, now_s)
        if not grown:
            self._swapper.note_shortage()
        return grown

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int, now_s: float) -> None:
        """Make the full blocks of the first `num_computed` tokens findable; equal blocks become one, so
        `table.pages` may change.
        """
        self._history.publish(table, tokens, num_computed, now_s)

    def release(self, table: BlockTable, now_s: float) -> None:
        """The sequence is done (or preempted): its findable blocks stay, if the policy keeps history."""
        self._history.release(table)

    # -- moving

    def tick(self, now_s: float, batch_size: int) -> bool:
        """Forget a little more, swap out above `upper`, in below `lower`, until balanced; to be called every
        100 ms.  Returns whether there may be more to forget.

        batch_size: requests running now (averaged over the last 5 s for equation 3).
        """
        return self._swapper.tick(now_s, batch_size)

    def look_ahead(self, queued: Iterable[tuple[Namespace, Sequence[int]]]) -> None:
        """Tell which adapters and prefixes the next queued requests need; replaces what was told before."""
        if self._traits.looks_ahead:
            self._swapper.want(self._history.find(namespace, tokens) for namespace, tokens in queued)

    def note_remote(self, namespace: Namespace, ready: bool) -> None:
        """Whether the LoRA Server holds an adapter that has no pages here."""
        node = self._tree.adapters[namespace]
        node.reachable = ready
        self._tree.refresh(node)

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be executed in any order."""
        return self._mover.take_orders()

    def copied(self, copy_id: int) -> None:
        """An order is done.  Unknown ids are refused (KeyError)."""
        self._mover.copied(copy_id)

    def failed(self, copy_id: int) -> None:
        """An order can't be done.  What waited for it is lost (`BlockTable.lost`, `readiness` NO_ROOM)."""
        self._mover.failed(copy_id)

    # -- figures

    @property
    def counters(self) -> CacheCounters:
        """Totals since the start."""
        return self._mover.counters

    def usage(self) -> dict[str, int]:
        """Pages now: device_kv, device_adapters, device_free, host_kv, host_adapters, host_free,
        device_kv_used (held by sequences), device_kv_invalid (KV whose adapter is not on the device).
        """
        return usage(self._ranking)

    def _note_departure(self, namespace: Namespace) -> None:
        if self.on_departure is not None:
            self.on_departure(namespace)


def _limits(
    num_pages: int, adapter_share: float | None, max_kv_pages: int | None, max_adapters: int | None
) -> Limits:
    adapter_pages = num_pages if adapter_share is None else int(adapter_share * num_pages)
    kv_pages = num_pages if adapter_share is None else num_pages - adapter_pages
    return Limits(
        kv_pages=kv_pages if max_kv_pages is None else min(kv_pages, max_kv_pages),
        adapter_pages=adapter_pages,
        num_adapters=num_pages if max_adapters is None else max_adapters,
    )
