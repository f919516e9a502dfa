"""GPT-OSS: attention sinks, alternating windows, biases everywhere, clamped activation, MXFP4 experts.

Legend: E experts, F expert inner size, H hidden size.  Checkpoints interleave gate (even) and up (odd).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, Piece, WeightMap, attention_weights, stem_weights
from .spec import ModelSpec, require, require_plain, rope_spec

# MXFP4 weights (OCP Microscaling Formats v1.0): FP4 E2M1 values with one E8M0 scale per 32 of them.


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """out[..., 32 * g + i] = E2M1(nibble i of block g) * 2 ** (scales[..., g] - 127).

    blocks: [..., G, 16] uint8, two values per byte, low nibble first.  scales: [..., G] uint8.
    Returns [..., 32 * G] fp32, exact for scale bytes of 2 and more (E2M1 has two significant bits, so bf16
    holds the values too).
    """
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks.shape == (*scales.shape, 16)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    nibbles = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(values[nibbles.int()], exponents[..., None]).flatten(-2)


DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ConfigError for an option that is not supported."""
    quantisation = config.get("quantization_config") or {}
    require(quantisation, "quantization_config", quant_method=("mxfp4",))
    require_plain({**config, "quantization_config": None})
    require(config, swiglu_alpha=(1.702,))
    shape = ModelShape.from_hf_config(config)
    bias = config.get("attention_bias", True)
    rope_given = config.get("rope_parameters") or config.get("rope_scaling")
    return ModelSpec(
        shape=shape,
        rope=rope_spec(
            config if rope_given else {**config, "rope_scaling": DEFAULT_YARN},
            shape.head_dim,
            default_theta=150000.0,
        ),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        window=_windows(config, shape.num_layers),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        gate="topk_softmax",
        gate_bias=True,
        mlp_bias=True,
        activation="gpt_oss",
        activation_limit=config.get("swiglu_limit", 7.0),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
    )


def _windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Attention window of each layer in tokens, 0 = full; without layer_types every other layer slides."""
    pattern = ("sliding_attention", "full_attention")
    kinds = config.get("layer_types") or [pattern[layer % 2] for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(pattern):
        raise ConfigError(
            f"config.json has layer_types={kinds!r}; needed are {num_layers} of {' or '.join(pattern)}"
        )
    window = config.get("sliding_window") or 0
    return tuple(window if kind == pattern[0] else 0 for kind in kinds)


def weight_map(spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap:
    weights = stem_weights(spec)
    for layer in range(spec.shape.num_layers):
        source, target = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
        weights |= attention_weights(spec, layer)
        for kind in ("weight", "bias"):
            weights[f"{target}.gate.{kind}"] = [Piece(f"{source}.router.{kind}")]
        quantised = f"{source}.experts.gate_up_proj_blocks" in checkpoint
        matrices = _mxfp4_matrices if quantised else _plain_matrices
        weights |= matrices(spec, f"{source}.experts", target)
        weights[f"{target}.gate_up.bias"] = [
            Piece(f"{source}.experts.gate_up_proj_bias", (slice(None), rows), partial(_every_other, first))
            for first, rows in enumerate(_halves(spec))
        ]
        weights[f"{target}.down.bias"] = [Piece(f"{source}.experts.down_proj_bias")]
    return weights


def _halves(spec: ModelSpec) -> tuple[slice, slice]:
    """Rows of gate and of up in the fused parameter."""
    inner = spec.shape.intermediate_size
    return slice(0, inner), slice(inner, 2 * inner)


def _every_other(first: int, stored: torch.Tensor) -> torch.Tensor:
    """Gate (first 0) or up (first 1) of an interleaved last dim."""
    return stored[..., first::2]


def _plain_matrices(spec: ModelSpec, source: str, target: str) -> WeightMap:
    """Experts in floating point: gate_up_proj [E, H, 2F], down_proj [E, F, H]."""
    return {
        f"{target}.gate_up.weight": [
            Piece(f"{source}.gate_up_proj", (slice(None), rows), lambda t, i=first: _every_other(i, t).mT)
            for first, rows in enumerate(_halves(spec))
        ],
        f"{target}.down.weight": [Piece(f"{source}.down_proj", (), lambda t: t.mT)],
    }


def _mxfp4_matrices(spec: ModelSpec, source: str, target: str) -> WeightMap:
    """Experts as blocks and scales of [E, 2F, H] and [E, H, F], dequantised one expert at a time."""

    def piece(name: str, expert: int, rows: slice, index: tuple[Any, ...]) -> Piece:
        def transform(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return dequantise(blocks[expert, rows], scales[expert, rows])

        key = f"{source}.{name}"
        return Piece(f"{key}_blocks", (expert, *index), transform, extra_keys=(f"{key}_scales",))

    experts = range(spec.shape.num_experts)
    return {
        f"{target}.gate_up.weight": [
            piece("gate_up_proj", e, slice(first, None, 2), (rows,))
            for e in experts
            for first, rows in enumerate(_halves(spec))
        ],
        f"{target}.down.weight": [piece("down_proj", e, slice(None), ()) for e in experts],
    }
