# SPDX-License-Identifier: Apache-2.0
"""One server rank's adapters: the arena, and a thread that loads layer by layer.

Legend: M slots, L layers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from moe_lora.adapters.packed import LayerShard, PackedAdapter, PackedLayer
from moe_lora.cache.leases.residency import Run
from moe_lora.core.errors import ConfigError, StorageError
from moe_lora.core.partition import Partition
from moe_lora.core.shape import ModelShape
from moe_lora.kernels.operands import SlotTable
from moe_lora.kernels.page_locked import Staging
from moe_lora.lora.row_routing import RoutedAdapter
from moe_lora.timing.host_times import LinkTime

from .messages import Memory
from .rank_memory import rank_parts

logger = logging.getLogger(__name__)


NUM_TRIES = 3
"""Tries of a load with transient errors."""
PAUSE_S = 0.2
PASSING = (OSError, StorageError)


@dataclass(eq=False)
class _Loading:
    """A load in progress: remaining layers.  due_s: earliest time of the next."""

    slot: int
    generation: int
    epoch: int
    packed: PackedAdapter
    runs: deque[tuple[int, Run]]
    num_failures: int = 0
    due_s: float = 0.0


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch the context's work on the stream, if given."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"no memory on {device} for {num_bytes / 1e9:.3g} GB of adapters on a rank of the LoRA Server; "
            "lower lora_server.memory_gb (--lora-server-memory-gb) or the capacity, or use a larger host: a "
            "plan of `moe-lora provision` is for the GPUs that it names"
        ) from error


class ServerAdapterStore:
    """The adapters of one server rank.

    generation: [M] content of each slot, loaded or loading; a request with a lower one is late.  loaded: [M,
    L] generation of each layer in the arena.  epoch: number of `start_over` calls.  contents: of used slots.
    reading: lock for reads of slot table and arena.  slots: num_parts rows a slot, by instance rank with
    divided sites.  led: True if load commands can come.  Loads interleave by layer (InfiniLoRA section 5.3);
    layer_wise False loads whole adapters in sequence.  Raises ConfigError without the memory.
    """

    def __init__(
        self,
        shape: ModelShape,
        partition: Partition,
        server_rank: int,
        memory: Memory,
        device: torch.device,
        *,
        load_bytes_per_s: float | None = None,
        layer_wise: bool = True,
    ) -> None:
        self._shape = shape
        self._partition = partition
        self.server_rank = server_rank
        self._page_bytes = memory.page_bytes
        self.on_progress: Callable[[], None] = lambda: None
        """Called, from any thread, if a waiting request may be answered."""
        self.on_tables: Callable[[], None] = lambda: None
        """Called on changes of `generation` or `loaded`, with old content intact or new content there."""
        self.on_failure: Callable[[str, int, Exception], None] = lambda content_hash, generation, error: None
        """Called, from any thread, with content hash, generation and error of a failed load."""
        self._link = None if load_bytes_per_s is None else LinkTime(load_bytes_per_s)
        self._layer_wise = layer_wise
        self.arena = _allocate(memory.num_pages[server_rank] * memory.page_bytes, device)
        on_cuda = self.arena.is_cuda
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._staging = Staging() if on_cuda else None
        self.num_parts = max(1, len(partition.shards))
        self.slots = SlotTable(memory.capacity * self.num_parts, shape.num_layers, shape.num_entries, device)
        self.generation = np.zeros(memory.capacity, dtype=np.int64)
        self.loaded = np.zeros((memory.capacity, shape.num_layers), dtype=np.int64)
        self.contents: dict[int, tuple[int, RoutedAdapter]] = {}
        self._loading: deque[_Loading] = deque()
        self._lacking: dict[int, int] = {}
        """Slot -> generation of content that is still on the way."""
        self.epoch = self._first_generation = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.reading = threading.Lock()
        self.led = True
        self.loaded_bytes = 0
        self._thread = threading.Thread(target=self._run, name="adapter-loads", daemon=True)
        self._thread.start()

    def load(
        self,
        slot: int,
        generation: int,
        packed: PackedAdapter,
        runs: Mapping[int, Run],
        epoch: int | None = None,
    ) -> None:
        """Start to load this rank's part into runs of pages, unless evicted.  epoch: of the order."""
        with self._changed:
            if self._is_late(slot, generation, epoch):
                return
            self.generation[slot] = generation
            self._lacking.pop(slot, None)
            self.contents[slot] = generation, RoutedAdapter(packed.content_hash, packed.targets)
            # Layers without content here are loaded at once.
            for layer in set(range(self._shape.num_layers)) - set(runs):
                self.loaded[slot, layer] = generation
            self.on_tables()
            order = deque(sorted(runs.items()))
            if order:
                self._loading.append(_Loading(slot, generation, self.epoch, packed, order))
            self._changed.notify_all()
        self.on_progress()

    def await_content(self, slot: int, generation: int, epoch: int) -> None:
        """Refuse requests for this content until its load."""
        with self._changed:
            if generation > int(self.generation[slot]) and epoch == self.epoch:
                self._lacking[slot] = generation
        self.on_progress()

    def _is_late(self, slot: int, generation: int, epoch: int | None) -> bool:
        """Requires the lock."""
        return generation < int(self.generation[slot]) or epoch not in (None, self.epoch)

    def evict(self, slot: int, generation: int, epoch: int | None = None) -> None:
        """Stop serving this content, or cancel its load."""
        with self._changed:
            if self._is_late(slot, generation, epoch):
                return
            self._loading = deque(loading for loading in self._loading if loading.slot != slot)
            self.generation[slot] = generation + 1
            self._lacking.pop(slot, None)
            self.contents.pop(slot, None)
            self.on_tables()
            with self.reading:
                self._clear(slot)
        self.on_progress()

    def start_over(self, first_generation: int) -> None:
        """Drop everything: generations start above first_generation."""
        with self._changed:
            self._loading.clear()
            self._lacking.clear()
            self.contents.clear()
            self.epoch += 1
            self._first_generation = first_generation
            self.generation[:] = first_generation
            self.loaded[:] = 0
            self.on_tables()
            with self.reading:
                for slot in range(len(self.generation)):
                    self._clear(slot)
        self.on_progress()

    def _clear(self, slot: int) -> None:
        for row in range(slot * self.num_parts, (slot + 1) * self.num_parts):
            self.slots.clear(row)

    def grow(self, num_slots: int) -> None:
        """Grow to at least num_slots slots; earlier requests for new slots are stale."""
        with self._changed:
            more = num_slots - len(self.generation)
            if more <= 0:
                return
            slots = self.slots.grown(num_slots * self.num_parts)
            with self.reading:
                self.slots = slots
            # The data loop reads a slot once in `generation`.
            self.loaded = np.pad(self.loaded, ((0, more), (0, 0)))
            self.generation = np.pad(self.generation, (0, more), constant_values=self._first_generation)
            self.on_tables()

    def set_led(self, led: bool) -> None:
        """Without a leader, requests for missing content do not wait."""
        self.led = led
        self.on_progress()

    def has_left(self, slot: int, generation: int) -> bool:
        """True if the slot has, or will have, other content."""
        return slot < len(self.generation) and generation < int(self.generation[slot])

    def is_stale(self, slot: np.ndarray, generation: np.ndarray) -> bool:
        """True if some row's content has left, or is still on the way."""
        lacking = self._lacking.copy().items()
        return bool((generation < self.generation[slot]).any()) or any(
            bool(((slot == there) & (generation == awaited)).any()) for there, awaited in lacking
        )

    def is_ready(self, slot: np.ndarray, generation: np.ndarray, layer: int) -> bool:
        """True if all rows' adapters have this layer."""
        return bool((self.loaded[slot, layer] == generation).all())

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with on_stream(self._stream):
            self._load_all()

    def _load_all(self) -> None:
        while (step := self._next_layer()) is not None:
            try:
                self._serve_layer(*step)
            except Exception as error:
                self._fail(*step, error)

    def _next_layer(self) -> tuple[_Loading, int, Run] | None:
        with self._changed:
            while not self._stopping:
                now_s = time.monotonic()
                loading = next((one for one in self._loading if one.due_s <= now_s), None)
                if loading is not None:
                    layer, run = loading.runs.popleft()
                    if self._layer_wise or not loading.runs:
                        self._loading.remove(loading)
                    if self._layer_wise and loading.runs:
                        self._loading.append(loading)
                    return loading, layer, run
                pauses = [one.due_s - now_s for one in self._loading]
                self._changed.wait(min(pauses, default=None))
        return None

    def _serve_layer(self, loading: _Loading, layer: int, run: Run) -> None:
        start_s, last = time.monotonic(), not loading.runs
        num_bytes = self._load_layer(loading, layer, run)
        if self._link is not None:
            time.sleep(max(0.0, self._link.seconds(num_bytes) - (time.monotonic() - start_s)))
        with self._changed:
            if self._is_wanted(loading) and (self._layer_wise or last):
                self.loaded[loading.slot, layer if self._layer_wise else slice(None)] = loading.generation
                self.on_tables()
        self.on_progress()

    def _fail(self, loading: _Loading, layer: int, run: Run, error: Exception) -> None:
        content_hash = loading.packed.content_hash
        with self._changed:
            if not self._is_wanted(loading):
                return
            loading.num_failures += 1
            if isinstance(error, PASSING) and loading.num_failures < NUM_TRIES:
                logger.warning("layer %d of adapter %s is tried again: %s", layer, content_hash, error)
                loading.due_s = time.monotonic() + PAUSE_S
                loading.runs.appendleft((layer, run))
                if loading not in self._loading:
                    self._loading.append(loading)
                return
        logger.error("layer %d of adapter %s can't be loaded", layer, content_hash, exc_info=error)
        self.give_up(content_hash, loading.slot, loading.generation, error, loading.epoch)

    def give_up(self, content_hash: str, slot: int, generation: int, error: Exception, epoch: int) -> None:
        """Stop serving the content, then call `on_failure`."""
        try:
            self.evict(slot, generation, epoch)
        except Exception:
            logger.exception("slot %d can't be cleared", slot)
        self.on_failure(content_hash, generation, error)

    def _is_wanted(self, loading: _Loading) -> bool:
        """True unless evicted since the start; requires the lock."""
        same_content = bool(self.generation[loading.slot] == loading.generation)
        return same_content and loading.epoch == self.epoch

    def _load_layer(self, loading: _Loading, layer: int, run: Run) -> int:
        packed = loading.packed.layers[layer]
        parts = rank_parts(loading.packed, self._partition, self.server_rank, layer, loading.slot)
        start = run[0] * self._page_bytes
        num_bytes = parts[-1].num_elements * packed.data.element_size()
        assert num_bytes <= run[1] * self._page_bytes
        with self._changed:
            if not self._is_wanted(loading):
                return 0
            self._follow_others()
        # Without the lock: this thread writes a later owner's load after this one.
        self._copy(packed, parts, self.arena[start : start + num_bytes])
        with self._changed:
            if not self._is_wanted(loading):
                return 0
            self._follow_others()
            with self.reading:
                where = range(start, start + num_bytes)
                for row, part in enumerate(parts, loading.slot * self.num_parts):
                    self.slots.write_layer(
                        row, layer, part.table, part.scale, packed.data.element_size(), where
                    )
        self.loaded_bytes += num_bytes
        return num_bytes

    def _follow_others(self) -> None:
        """The loader's stream waits for former owners' deltas, and slot table changes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self.arena.device))

    def _copy(self, packed: PackedLayer, parts: Sequence[LayerShard], target: torch.Tensor) -> None:
        data = target.view(packed.data.dtype)
        if self._staging is not None:
            data = packed.data.new_empty(parts[-1].num_elements)
        for part in parts:
            part.copy(packed.data, data)
        if self._staging is not None:
            self._staging.copy(data.view(torch.uint8), target)
        if self._stream is not None:
            self._stream.synchronize()
