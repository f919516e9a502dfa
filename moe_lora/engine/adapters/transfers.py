# SPDX-License-Identifier: Apache-2.0
"""The cache's orders: sent to all ranks between steps, confirmed when done."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.cache.orders import Copy, Namespace, Order
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.engine.ranks.followers import BeginOrder, Followers
from moe_lora.timing.host_times import LinkTime

from .adapter_store import AdapterVersion
from .copies import BringAdapter, ClearSlot, RankCopier, RankOrder, Steps

if TYPE_CHECKING:
    from .manager import AdapterManager

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
LOOK_S = 0.0002
FOLLOWERS_LOOK_S = 0.001


class Mover(threading.Thread):
    """Executes orders in sequence, beside the engine's thread.

    on_done: called from this thread after each copy.
    """

    def __init__(
        self, device: torch.device, on_done: Callable[[], None], bytes_per_s: float | None = None
    ) -> None:
        super().__init__(name="mover", daemon=True)
        self._on_done = on_done
        self._link = None if bytes_per_s is None else LinkTime(bytes_per_s)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.start()

    def submit(self, number: int, steps: Steps) -> None:
        """Queue the steps; `finished` reports their end.

        On CUDA the copy runs after the calling thread's launches: pages of a running step stay untouched.
        """
        launched = None
        if self._stream is not None:
            launched = torch.cuda.Event()
            launched.record()
        self._orders.put((number, steps, launched))

    def finished(self) -> list[tuple[int, Exception | None]]:
        """Copies ended since the last call, with errors."""
        ended = []
        while not self._done.empty():
            ended.append(self._done.get())
        return ended

    def close(self) -> None:
        """End after the running copy.  Idempotent."""
        self._closing.set()
        self._orders.put(None)
        if self is not threading.current_thread():
            self.join(CLOSE_TIMEOUT_S)

    def run(self) -> None:
        while self._take_one():
            continue

    def _take_one(self) -> bool:
        """Execute the next order; False at the end.

        A separate method: a waiting thread must keep no reference to an adapter's memory.
        """
        order = self._orders.get()
        if order is None or self._closing.is_set():
            return False
        number, steps, launched = order
        error: Exception | None = None
        try:
            self._carry_out(steps, launched)
        except Exception as problem:
            logger.exception("a copy failed")
            error = problem
        self._done.put((number, error))
        self._on_done()
        return True

    def _carry_out(self, steps: Steps, launched: torch.cuda.Event | None) -> None:
        start_s, num_bytes = time.monotonic(), 0
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and launched is not None:
                self._stream.wait_event(launched)
            for step_bytes in steps:
                if self._stream is not None:
                    self._stream.synchronize()
                num_bytes += step_bytes
                if self._link is not None:
                    self._closing.wait(max(0.0, start_s + self._link.seconds(num_bytes) - time.monotonic()))


_Order = tuple[int, Steps, "torch.cuda.Event | None"]


class Transfers:
    """Sends the cache's orders to all ranks beside the steps, and confirms them.

    A second mover loads adapters from a pool: slow peers delay no copy.  Called by the engine's own thread.

    A copy counts as done, or failed, once ended on all ranks: no step waits.
    """

    blocking = False
    """True: no step starts during an adapter's load (emulates S-LoRA)."""
    moves_ahead = True
    """False: no page moves ahead of need."""
    held = False
    """True: orders wait."""
    on_change: Callable[[], None] | None = None
    """Called from another thread after a copy."""

    def __init__(
        self,
        cache: UnifiedCache,
        manager: AdapterManager,
        copier: RankCopier,
        clock: Clock,
        *,
        make_mover: Callable[[Callable[[], None]], Mover],
        interval_s: float,
        followers: Followers,
    ) -> None:
        self.on_bring: Callable[[AdapterVersion], None] = lambda adapter: None
        """Called at the start of a load."""
        self.on_load: Callable[[AdapterVersion, Exception | None], None] = lambda adapter, error: None
        """Called at the end of a load, with the error of a failed load."""
        self._cache = cache
        self._host_loads = manager.host_loads
        self._adapters = manager.versions
        self._copier = copier
        self._clock = clock
        self.followers = followers
        self._make_mover = make_mover
        self._mover = make_mover(self._tell)
        self._fetcher: Mover | None = None
        self._interval_s = interval_s
        self._balanced = False
        self._next_tick_s = clock.now_s()
        self._under_way: dict[int, AdapterVersion | None] = {}
        """Order number -> loading adapter, if any."""
        self._sharing: dict[int, RankOrder] = {}
        """Orders with an adapter on the way to a file."""
        self._slots: dict[Namespace, int] = {}
        self._free_slots = list(range(manager.num_slots - 1, -1, -1))
        cache.watch(self._clear_slot)

    @property
    def busy(self) -> bool:
        """True while copies run."""
        return bool(self._under_way)

    def settle(self) -> None:
        """Confirm done and failed copies."""
        if not self._under_way:
            return
        ended = self._mover.finished() + (self._fetcher.finished() if self._fetcher is not None else [])
        lagged = self.followers.lagging
        failed = self._begin_shared(ended)
        finished = failed + self.followers.ended_everywhere(ended)
        if lagged and finished:
            self._tell()
        for number, error in finished:
            adapter = self._under_way.pop(number)
            if error is not None:
                self._cache.failed(number)
            else:
                self._cache.copied(number)
                if adapter is not None:
                    adapter.slot = self._slots.get(adapter.uid)
            if adapter is not None:
                self._end_bringing(adapter.packed.content_hash)
                self.on_load(adapter, error)

    def tick(self, batch_size: int) -> float | None:
        """Send new orders; let the cache move pages ahead of need, at intervals.

        Returns the seconds until the next call; None: at the next event.  An idle engine continues until no
        move is left.
        """
        if self._send():
            self._balanced = False
        wait_s = None
        if self.moves_ahead:
            now_s = self._clock.now_s()
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + self._interval_s
                more = self._cache.tick(now_s, batch_size)
                self._balanced = not (self._send() or more)
            wait_s = None if self._balanced else self._next_tick_s - now_s
        return FOLLOWERS_LOOK_S if self.followers.lagging else wait_s

    def send(self) -> None:
        """Send the cache's orders."""
        self._balanced = False
        self._send()

    def wait_for_adapters(self) -> bool:
        """Wait for all loads; True if an adapter was loading."""
        waited = False
        while any(self._under_way.values()):
            time.sleep(LOOK_S)
            self.settle()
            waited = True
        return waited

    def figures(self, page_bytes: int, max_kv_pages: int) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        counters, pages = self._cache.counters, self._cache.usage()
        num_pages = {
            "adapter_load_bytes": counters.pages_loaded,
            "swapped_in_bytes": counters.pages_in,
            "swapped_out_bytes": counters.pages_out,
            "kv_lost_bytes": counters.pages_dropped,
            "device_kv_bytes": pages["device_kv"],
            "device_kv_invalid_bytes": pages["device_kv_invalid"],
            "device_adapter_bytes": pages["device_adapters"],
            "host_kv_bytes": pages["host_kv"],
            "host_adapter_bytes": pages["host_adapters"],
        }
        for tier in ("device", "host"):
            num_pages[f"{tier}_bytes"] = sum(pages[f"{tier}_{part}"] for part in ("kv", "adapters", "free"))
        return {
            "kv_usage": pages["device_kv_used"] / max_kv_pages,
            "adapter_loads": counters.adapter_loads,
            "adapter_evictions": counters.adapter_evictions,
            "kv_query_tokens": counters.kv_query_tokens,
            "kv_device_hit_tokens": counters.kv_device_hit_tokens,
            "kv_host_hit_tokens": counters.kv_host_hit_tokens,
        } | {name: number * page_bytes for name, number in num_pages.items()}

    def close(self) -> None:
        self._mover.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def _send(self) -> bool:
        orders = [] if self.held else self._cache.take_orders()
        for order in orders:
            self._begin(order)
        return bool(orders)

    def _begin(self, order: Order) -> None:
        adapter: AdapterVersion | None = None
        if isinstance(order, Copy) and not (order.is_adapter and order.to_device):
            rank_order: RankOrder = order
        else:
            adapter = self._adapters.get(order.namespace)
            if adapter is None:  # dropped meanwhile
                self._cache.failed(order.copy_id)
                return
            slot = self._slots[adapter.uid] = adapter.loading_slot = self._free_slots.pop()
            first_pages = self._cache.layer_first_pages(adapter.uid)
            pages = order if isinstance(order, Copy) else None
            group = None if self._host_loads is None else self._host_loads.first_group(adapter.uid)
            if self.followers.layers is not None:
                self.followers.layers.clear(slot)
            content_hash = adapter.packed.content_hash
            tables = None if pages is None else self._copier.tables(content_hash)
            rank_order = BringAdapter(slot, content_hash, first_pages, pages, group, tables)
            self.on_bring(adapter)
        self._under_way[order.copy_id] = adapter
        if (steps := self._copier.shared_first(rank_order)) is not None:
            self._sharing[order.copy_id] = rank_order
            self._fetching.submit(order.copy_id, steps)
        else:
            self._begin_everywhere(order.copy_id, rank_order)

    def _begin_everywhere(self, number: int, order: RankOrder) -> None:
        self.followers.tell(BeginOrder(number, order))
        mover = self._fetching if self._copier.fetches(order) else self._mover
        mover.submit(number, self._copier.begin(order))

    def _begin_shared(self, ended: list[tuple[int, Exception | None]]) -> list[tuple[int, Exception | None]]:
        """Take adapters in files out of `ended`, and begin the loads; returns the failed."""
        shared = [one for one in ended if one[0] in self._sharing]
        for number, error in shared:
            ended.remove((number, error))
            order = self._sharing.pop(number)
            if error is None:
                self._begin_everywhere(number, order)
        return [one for one in shared if one[1] is not None]

    @property
    def _fetching(self) -> Mover:
        if self._fetcher is None:
            self._fetcher = self._make_mover(self._tell)
        return self._fetcher

    def _end_bringing(self, content_hash: str) -> None:
        others = (other for other in self._under_way.values() if other is not None)
        if all(other.packed.content_hash != content_hash for other in others):
            self._copier.ended(content_hash)

    def _clear_slot(self, namespace: Namespace) -> None:
        slot = self._slots.pop(namespace, None)
        if slot is None:
            return
        self.followers.tell(ClearSlot(slot))
        self._copier.carry_out(ClearSlot(slot))
        self._free_slots.append(slot)
        if namespace in self._adapters:
            self._adapters[namespace].slot = self._adapters[namespace].loading_slot = None

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()
