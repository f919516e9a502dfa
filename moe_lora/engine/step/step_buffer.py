# SPDX-License-Identifier: Apache-2.0
"""A single copy, without a wait, of a step's input to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN_BYTES = 64


class StepBuffer:
    """Device memory for a step's input, filled from page-locked memory.

    `memory` stays the same tensor while large enough.  A step's copy follows the earlier step's kernels on
    the device's stream: each reads the right input.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def fill(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, valid until the next call."""
        sizes = [-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays]
        starts = np.cumsum([0, *sizes]).tolist()
        if starts[-1] > self.memory.numel():
            self.memory = self.memory.new_empty(1 << starts[-1].bit_length())
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        for start, array in zip(starts, arrays, strict=False):
            staged.numpy()[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        self.memory[: starts[-1]].copy_(staged, non_blocking=True)
        return [
            self.memory[start : start + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
