"""What distinguishes the model families, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_lora.core.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: inverse frequencies [head_dim / 2] and the factor on cos and sin (YaRN)."""

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model's architecture; sizes are in `shape`.

    clip_qkv: q, k and v are clamped to +- this value, None = not.  window: attention window per layer in
    tokens, 0 = full.  gate: "softmax_topk" takes the top k of the softmax over all experts, "topk_softmax"
    the softmax over the top k logits.  gate_norm: p of the p-norm that divides the chosen weights, None = not
    normalised.  activation: "silu" is silu(gate) * up, "gpt_oss" its clamped form.
    """

    shape: ModelShape
    rope: RopeSpec
    norm_eps: float
    window: tuple[int, ...]
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    clip_qkv: float | None = None
    gate: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    gate_norm: float | None = 1.0
    gate_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gpt_oss"] = "silu"
    activation_limit: float = 7.0
    tie_word_embeddings: bool = False
