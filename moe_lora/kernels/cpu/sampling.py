# SPDX-License-Identifier: Apache-2.0
"""Draws of next tokens, and masks of logits; calls release the GIL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .library import checked, lib


def draw(logits: torch.Tensor, settings: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`kernels.triton.sampling.draw`, unless scores are within rounding."""
    num_rows, vocab = logits.shape
    tokens_S = torch.empty(num_rows, dtype=torch.int64)
    settings_at = checked(settings, "settings", torch.float32, 3 * num_rows)
    numbers_at = checked(numbers, "numbers", torch.int64, 3 * num_rows)
    threads, logits_at = _call_on(logits)
    lib.moe_lora_draw(threads, logits_at, num_rows, vocab, settings_at, numbers_at, tokens_S.data_ptr())
    return tokens_S


def mask(logits_SV: torch.Tensor, rows: Sequence[int], words: Sequence[np.ndarray]) -> None:
    """Set logits without a bit to -inf: bit i of words[n][w] is token 32 w + i in row rows[n].

    logits: [S, V].  words: [ceil(V / 32)] uint32.  Raises ValueError for bad operands.
    """
    num_rows, vocab = logits_SV.shape
    rows_N, words_NW = np.array(rows, np.int64), np.stack(words)
    if words_NW.shape[1] * 32 < vocab or rows_N.min() < 0 or rows_N.max() >= num_rows:
        raise ValueError(f"masks {words_NW.shape} of rows {[*rows]} do not fit logits {[num_rows, vocab]}")
    threads, logits_at = _call_on(logits_SV)
    numbers, masks = (rows_N.ctypes.data, len(rows_N)), (words_NW.ctypes.data, words_NW.shape[1])
    lib.moe_lora_mask(threads, logits_at, vocab, *numbers, *masks)


def _call_on(logits: torch.Tensor) -> tuple[int, int]:
    """Number of threads, and the address."""
    return torch.get_num_threads(), checked(logits, "logits", torch.float32, logits.numel())
