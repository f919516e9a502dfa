# SPDX-License-Identifier: Apache-2.0
"""Estimated times of steps and weight changes before any measurement: bytes by bandwidth.

Policies that compare modes start with these times, scaled by measured steps
(`policies.merging.merging_costs`), so only ratios matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moe_lora.core.shape import DEFAULT_TARGETS, ModelShape
from moe_lora.policies.merging.merging_costs import Uid
from moe_lora.timing.step_model import StepModel, feature_names

_COPY_BYTES = 64 << 20
_NUM_COPIES = 3
FOLD_PASSES, TAKE_OUT_PASSES = 3, 2
"""Reads and writes of the changed weights: W and W_a, and the products; the originals, and W."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the best of a few copies."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        start_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _COPY_BYTES / best_s


def bytes_per_rank(shape: ModelShape, itemsize: int) -> tuple[int, int]:
    """Bytes of an adapter on all usual sites over all layers: dense sites, experts (all)."""
    parts = [0, 0]
    for site in map(shape.site, DEFAULT_TARGETS):
        features = sum(site.in_features + out for out in site.out_features)
        parts[site.num_experts > 0] += features * max(1, site.num_experts) * itemsize * shape.num_layers
    return parts[0], parts[1]


def expected_step_times(
    shape: ModelShape, itemsize: int, kernel: str, bytes_per_s: float, expert_parallel: int = 1
) -> StepModel:
    """A step reads the weights and the adapters' matrices once."""
    dense_rank, expert_rank = bytes_per_rank(shape, itemsize)
    weights = [shape.vocab_size * shape.hidden_size * itemsize, 0]
    for site in shape.sites:
        num_bytes = site.in_features * site.total_out_features * max(1, site.num_experts) * itemsize
        weights[site.num_experts > 0] += num_bytes * shape.num_layers
    seconds = {
        "step": weights[0] / bytes_per_s,
        "experts": weights[1] / expert_parallel / bytes_per_s,
        "adapter_ranks": dense_rank / bytes_per_s,
        "expert_ranks": expert_rank / expert_parallel / bytes_per_s,
    }
    assert set(seconds) <= set(feature_names(kernel, "full", "decode"))
    share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
    return StepModel(kernel=kernel, form="full", expert_share=share, decode_s=seconds, prefill_s=seconds)


def expected_swap_times(num_bytes: Callable[[Uid], int], bytes_per_s: float) -> Callable[[Uid, Uid], float]:
    """num_bytes: of the weights that an adapter changes."""

    def seconds(before: Uid, after: Uid) -> float:
        out = 0 if before is None else TAKE_OUT_PASSES * num_bytes(before)
        return (out + (0 if after is None else FOLD_PASSES * num_bytes(after))) / bytes_per_s

    return seconds
