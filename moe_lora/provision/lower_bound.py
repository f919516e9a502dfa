# SPDX-License-Identifier: Apache-2.0
"""Lower bound of GPUs for a load on any cluster: operations and bytes over peak rates.

Shares no code with the sizing (`provision.plan`): the bound must expose errors there.  Legend: D hidden, F
expert hidden, K experts per row, H query heads, G KV heads, d head size, l layers, R LoRA rank.

    FLOP of a token    l (4 D d (H + G) + 6 K D F) + share of adapters * l 2 K (2 D + 3 F) R
    FLOP of a pair     4 l H d                          (a token and an attended token)
    bytes of a pair    KV of a token                    (decode reads the context of each row)
    bytes in memory    l (2 D d (H + G) + 3 D F experts), by weight format

The delta counts one A for gate and up.  Left out: windowed attention, output head, embedding, gate, norms,
repeated weight reads, network, loads, goals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_lora.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a mean request.  Pairs are of a token and an attended token."""

    computed_tokens: float
    """Prompt without prefix hits, and output except the last."""
    prompt_pairs: float
    decode_pairs: float


class WorkSum:
    """Work of requests, one after the other."""

    def __init__(self) -> None:
        self._number = self._computed = self._prompt_pairs = self._decode_pairs = 0

    def add(self, prompt: int, hit: int, output: int) -> None:
        """Add a request of these tokens; hit: of its prefix."""
        own = prompt - hit
        self._number += 1
        self._computed += own + output - 1
        self._prompt_pairs += own * hit + own * (own + 1) // 2
        self._decode_pairs += (output - 1) * prompt + (output - 1) * output // 2

    def mean(self) -> Work:
        """Mean work."""
        return Work(
            computed_tokens=self._computed / self._number,
            prompt_pairs=self._prompt_pairs / self._number,
            decode_pairs=self._decode_pairs / self._number,
        )


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """The bound, and GPUs for operations, KV reads, weights."""

    gpus: int
    flop_gpus: float
    byte_gpus: float
    memory_gpus: float

    @property
    def text(self) -> str:
        """The bound and terms in a line."""
        return (
            f"{self.gpus} GPU{'' if self.gpus == 1 else 's'} at peak rates: operations {self.flop_gpus:.1f}, "
            f"KV reads {self.byte_gpus:.1f}, weights in memory {self.memory_gpus:.1f}"
        )


def lower_bound(
    shape: ModelShape,
    work: Work,
    *,
    rate_per_s: float,
    adapter_rank: float,
    flop_per_s: float,
    bytes_per_s: float,
    weight_bits: tuple[float, float],
    memory_bytes: float,
) -> LowerBound:
    """The bound in GPUs.

    rate_per_s: requests.  adapter_rank: mean, 0 for the base model.  weight_bits: of attention, of experts.
    flop_per_s, bytes_per_s, memory_bytes: of a GPU.
    """
    width, inner, chosen = shape.hidden_size, shape.intermediate_size, max(1, shape.num_experts_per_token)
    heads = shape.num_heads + shape.num_kv_heads
    token = shape.num_layers * (4 * width * shape.head_dim * heads + 6 * chosen * width * inner)
    delta = shape.num_layers * 2 * chosen * (2 * width + 3 * inner) * adapter_rank
    whole = 1 - shape.num_windowed_layers / shape.num_layers
    pair = 4 * whole * shape.num_layers * shape.num_heads * shape.head_dim
    pairs = work.prompt_pairs + work.decode_pairs
    flop = rate_per_s * (work.computed_tokens * (token + delta) + pairs * pair)
    read = rate_per_s * work.decode_pairs * whole * shape.kv_bytes_per_token()
    attention = shape.num_layers * 2 * width * shape.head_dim * heads
    experts = shape.num_layers * 3 * width * inner * max(1, shape.num_experts)
    weights = (attention * weight_bits[0] + experts * weight_bits[1]) / 8
    terms = flop / flop_per_s, read / bytes_per_s, weights / memory_bytes
    return LowerBound(
        gpus=max(1, math.ceil(max(terms))),
        flop_gpus=terms[0],
        byte_gpus=terms[1],
        memory_gpus=terms[2],
    )
