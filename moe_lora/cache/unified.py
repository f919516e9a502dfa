"""One cache of adapters and history KV over two arenas of equal pages; decides, and has others copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moe_lora.policies.caching import CachingPolicy

from .counters import CacheCounters
from .orders import Namespace, Order, Readiness
from .tables import BlockTable


class UnifiedCache:
    """Adapters and the KV of finished prefixes in one dependency tree (FastLibra, sections 4 and 5).

    One thread only.  Time comes in as now_s, never decreasing.  Nothing waits: what needs bytes moved leaves
    an order (`take_orders`) that the caller has executed and then confirms (`copied`, `failed`), from the
    same thread.  on_departure: called with a namespace at the moment its adapter's device pages are given up.
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
        raise NotImplementedError

    # -- adapters

    def add_adapter(self, namespace: Namespace, layer_pages: Sequence[int], now_s: float) -> None:
        """A new node on the second layer.  layer_pages: pages of each layer's extent; all zero (or none):
        its bytes lie elsewhere, it is always ready.  Raises CapacityError if it could never be held,
        ValueError if the namespace is known.
        """
        raise NotImplementedError

    def forget(self, namespace: Namespace) -> None:
        """It will not be asked for again: free its adapter and KV, what is in use when its last user goes."""
        raise NotImplementedError

    def hold(self, namespace: Namespace, now_s: float) -> Readiness:
        """Pin the adapter for one request and have it brought to the device if need be, evicting what the
        policy values least.  NO_ROOM: not pinned.  Counts as a visit.  The base is always READY.
        """
        raise NotImplementedError

    def readiness(self, namespace: Namespace) -> Readiness:
        """READY, COMING, or NO_ROOM if it neither is on the device nor on its way; changes nothing."""
        raise NotImplementedError

    def let_go(self, namespace: Namespace, now_s: float) -> None:
        """Undo one `hold`.  Release the request's table first."""
        raise NotImplementedError

    def pin(self, namespace: Namespace) -> None:
        """Keep the adapter from leaving the device (once it is there) until `unpin`, whoever uses it."""
        raise NotImplementedError

    def unpin(self, namespace: Namespace) -> None:
        """Undo `pin`."""
        raise NotImplementedError

    def layer_first_pages(self, namespace: Namespace) -> tuple[int, ...]:
        """Where each layer's run starts on the device, -1 for empty ones; the adapter must be READY/COMING."""
        raise NotImplementedError

    def place(self, namespace: Namespace) -> str:
        """"device" (ready there), "host", or "disk" (in neither arena)."""
        raise NotImplementedError

    # -- KV

    def match(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> BlockTable:
        """Pin the longest cached prefix of `tokens`; at least the last token is left to compute.

        The adapter must be held.  Parts on the host are ordered to the device if there is room (then the
        table is not `ready` yet), else the match ends before them.  Counts as a visit of each node.
        """
        raise NotImplementedError

    def grow(self, table: BlockTable, num_tokens: int, now_s: float) -> bool:
        """Make room for `num_tokens` in all; False (and nothing taken) if pages run out.

        Evicts at once, without copies: nodes that the host has too first, then the least valued.
        """
        raise NotImplementedError

    def publish(self, table: BlockTable, tokens: Sequence[int], num_computed: int, now_s: float) -> None:
        """Make the full blocks of the first `num_computed` tokens findable; equal blocks become one, so
        `table.pages` may change.
        """
        raise NotImplementedError

    def release(self, table: BlockTable, now_s: float) -> None:
        """The sequence is done (or preempted): its findable blocks stay, if the policy keeps history."""
        raise NotImplementedError

    # -- moving

    def tick(self, now_s: float, batch_size: int) -> None:
        """Swap out above `upper`, in below `lower`, until balanced; to be called every 100 ms.

        batch_size: requests running now (averaged over the last 5 s for equation 3).
        """
        raise NotImplementedError

    def look_ahead(self, queued: Iterable[tuple[Namespace, Sequence[int]]]) -> None:
        """Tell which adapters and prefixes the next queued requests need; replaces what was told before."""
        raise NotImplementedError

    def note_remote(self, namespace: Namespace, ready: bool) -> None:
        """Whether the LoRA Server holds an adapter that has no pages here."""
        raise NotImplementedError

    def take_orders(self) -> list[Order]:
        """Orders since the last call, to be executed in any order."""
        raise NotImplementedError

    def copied(self, copy_id: int) -> None:
        """An order is done.  Unknown ids are refused (KeyError)."""
        raise NotImplementedError

    def failed(self, copy_id: int) -> None:
        """An order can't be done.  What waited for it is lost (`BlockTable.lost`, `readiness` NO_ROOM)."""
        raise NotImplementedError

    # -- figures

    @property
    def counters(self) -> CacheCounters:
        """Totals since the start."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        """Pages now: device_kv, device_adapters, device_free, host_kv, host_adapters, host_free,
        device_kv_used (held by sequences), device_kv_invalid (KV whose adapter is not on the device).
        """
        raise NotImplementedError
