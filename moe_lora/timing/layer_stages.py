# SPDX-License-Identifier: Apache-2.0
"""Stage times of a layer on an emulated device."""

from __future__ import annotations

from collections.abc import Sequence

from moe_lora.config.optional_parts import StepProfile
from moe_lora.core.shape import ModelShape, Site


def decode_layer_s(
    profile: StepProfile, num_rows: int, *, adapters: bool, remote: bool
) -> tuple[float, float]:
    """Seconds of a layer's decode rows with an idle LoRA Server, and of the deltas.

    attention(T) + experts(T) + lora(T); remote: attention(T) + max(experts(T), transfer(T) + lora(T)), or the
    sum without overlap.
    """
    lora_s = delta_s = profile.lora.seconds(num_rows) if adapters else 0.0
    if remote and adapters:
        delta_s += profile.transfer.seconds(num_rows)
    experts_s = with_deltas_s(profile, profile.experts.seconds(num_rows), delta_s, remote=remote)
    return profile.attention.seconds(num_rows) + experts_s, lora_s


def with_deltas_s(profile: StepProfile, base_s: float, delta_s: float, *, remote: bool) -> float:
    """Seconds of a base GEMM with deltas, beside or after."""
    return max(base_s, delta_s) if remote and profile.overlap else base_s + delta_s


def share_of_layer(site: Site, shape: ModelShape) -> float:
    """An expert site's share of a layer's expert (else MLP) work, in matrices."""
    return len(site.modules) / sum(len(other.modules) for other in mlp_sites(shape))


def mlp_sites(shape: ModelShape) -> Sequence[Site]:
    return [site for site in shape.sites if site.is_routed] or shape.sites[-2:]


def prefill_shares(shape: ModelShape) -> list[float]:
    """Each site's share of a layer's prompt, in multiply-adds per token."""
    work = [
        site.in_features * site.total_out_features * (shape.num_experts_per_token if site.num_experts else 1)
        for site in shape.sites
    ]
    return [one / sum(work) for one in work]
