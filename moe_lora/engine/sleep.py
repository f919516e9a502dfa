# SPDX-License-Identifier: Apache-2.0
"""Sleep of an engine: frees memory and refuses requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from moe_lora.core.errors import BusyError, ConfigError
from moe_lora.core.processes import in_thread
from moe_lora.engine.ranks.followers import MemoryOrder, MemoryStep

from .client.messages import Entry, PauseMode, SleepOrder, SleepPart

if TYPE_CHECKING:
    from .core import EngineCore
    from .verbs import Steps


class Sleep:
    """For the engine's thread.

    put: queues an entry for this thread.
    """

    def __init__(self, core: EngineCore, put: Callable[[Entry], None], abort: Callable[[], None]) -> None:
        self._core, self._put, self._abort = core, put, abort
        self.order = SleepOrder()
        self._has_weights = True
        self._changes = False

    def check_awake(self) -> None:
        """Raises BusyError."""
        if self.order.parts:
            raise BusyError("the model is asleep; send the request again after /wake_up")

    def start(
        self,
        parts: Collection[SleepPart],
        mode: PauseMode,
        timeout_s: float,
        *,
        drops_weights: bool,
    ) -> Steps[None]:
        """Free the arenas (kv_cache) and the weights, once no request runs.

        keep: requests compute their KV again afterwards.  Raises TimeoutError; stays awake after an error,
        unless weights may be freed.
        """
        self._check_mode()
        with self._alone():
            end_s, before = time.monotonic() + timeout_s, self.order
            self.order = before.start(parts, drops_weights, mode)
            steps: list[MemoryStep] = []
            try:
                if mode == "abort":
                    self._abort()
                elif mode == "keep":
                    self._core.suspend()
                timer = threading.Timer(timeout_s, self._put, [lambda: None])
                timer.daemon = True
                timer.start()
                yield lambda: self._is_idle() or time.monotonic() >= end_s
                timer.cancel()
                if not self._is_idle():
                    raise TimeoutError(f"requests ran on for {timeout_s:g} s, and the model stays awake")
                self._core.transfers.moves_ahead = not self.order.parts
                if "kv_cache" in parts:
                    self._core.adapters.evict_all()
                    steps.append("free_arenas")
                if drops_weights and self._has_weights:
                    self._has_weights = False
                    steps.append("free_weights")
                yield from self._on_all_ranks(MemoryOrder(tuple(steps)))
            except Exception:
                if "free_weights" not in steps:
                    self._set_order(before)
                raise

    def stop(self, parts: Collection[SleepPart]) -> Steps[None]:
        """Wake these parts up.  Raises ConfigError for an unreadable checkpoint."""
        with self._alone():
            if "weights" in parts and not self._has_weights:
                yield from self._on_all_ranks(MemoryOrder(("read_weights",)))
                self._has_weights = True
            if self.order.parts:
                self._set_order(self.order.stop(parts))

    def _set_order(self, order: SleepOrder) -> None:
        self.order = order
        if not order.parts:
            self._core.suspended = False
            self._core.transfers.moves_ahead = True
            self._core.adapters.bring_evicted()
            self._core.transfers.send()

    def _check_mode(self) -> None:
        """Raises ConfigError for an engine that can't free its memory."""
        rank = self._core.rank
        if rank.device.type != "cpu":
            raise ConfigError(
                f"device={rank.config.device!r} can't sleep: only host memory is given back so far; end the "
                "server to free a GPU, or pause it (/pause)"
            )
        if rank.merges:
            raise ConfigError(
                f"batching={rank.config.batching!r} can't sleep: the weights may hold an adapter; use "
                "batching='unmerged'"
            )

    def _on_all_ranks(self, order: MemoryOrder) -> Steps[None]:
        rank, transfers = self._core.rank, self._core.transfers
        answering = ExitStack()
        answering.enter_context(transfers.followers.answering(order))

        def work() -> None:
            with answering:
                order.carry_out(rank)

        transfers.held = True
        try:
            (yield in_thread(work)).result()
        finally:
            transfers.held = False

    def _is_idle(self) -> bool:
        return not (self._core.has_work or self._core.transfers.busy)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises BusyError beside another change."""
        if self._changes:
            raise BusyError("the model falls asleep or wakes up; send the request again later")
        self._changes = True
        try:
            yield
        finally:
            self._changes = False
