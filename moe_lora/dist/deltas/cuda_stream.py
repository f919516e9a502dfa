# SPDX-License-Identifier: Apache-2.0
"""A CUDA device's current stream as a `stream_backend.Stream`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from moe_lora.core.errors import ConfigError
from moe_lora.kernels.page_locked import page_lock
from moe_lora.kernels.triton.configs import kernels


class CudaStream:
    """Queues torch operations; signals are kernels of `kernels.triton.signals`, compiled here for words and
    counters at multiples of 16 bytes, as in `StreamSession`.

    Raises ImportError without Triton.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._signals = kernels("signals")
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        own = torch.zeros(16, dtype=torch.int64, pin_memory=True)
        self.ask(own, (0, 0, 0, 0, 0), own[8:9], counter)
        self.wait(own[8:9], counter)
        self.synchronize()

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Through pinned memory that torch keeps until the copy ends."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def queue(self, operation: Callable[[], object]) -> None:
        operation()

    def ask(
        self, header: torch.Tensor, facts: Sequence[int], word: torch.Tensor, counter: torch.Tensor
    ) -> None:
        self._signals.launch_ask(counter, header, word, facts)

    def wait(self, word: torch.Tensor, counter: torch.Tensor) -> None:
        self._signals.launch_wait(counter, word)

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """Page-lock the memory, for asynchronous copies.  Raises ConfigError."""
        try:
            return page_lock(memory, self.device)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 1e6:.3g} MB of a host worker's frames can't be page-locked ({error}); "
                "lower host_workers, or set host_workers=0"
            ) from error

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
