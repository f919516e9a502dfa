# SPDX-License-Identifier: Apache-2.0
"""Draws of next tokens in numpy and torch: what the kernels compute, said once more in other words."""

from __future__ import annotations

import numpy as np
import torch

from moe_lora.core.request import SamplingParams
from moe_lora.engine.step.sampler import truncated_probabilities


def exponential_noise(seed: int, position: int, num: int) -> np.ndarray:
    """Draws [num] fp64 > 0 of the exponential distribution: numpy's Philox, -log of (x + 1/2) / 2^32."""
    philox = np.random.Philox(key=seed % 2**64, counter=position << 192)
    halves = philox.random_raw(-(-num // 2)).astype("<u8", copy=False).view("<u4")[:num]
    return -np.log((halves + 0.5) * 2.0**-32)


def scores(logits_SV: torch.Tensor, rows: list[tuple[SamplingParams, int, int]]) -> torch.Tensor:
    """Probability / noise [S, V] of each row's settings, seed and position; the highest wins."""
    probs_SV = truncated_probabilities(logits_SV, [params for params, _, _ in rows])
    noise = [exponential_noise(seed, position, probs_SV.shape[1]) for _, seed, position in rows]
    return probs_SV / torch.from_numpy(np.stack(noise)).float()
