"""Where the families' checkpoints keep the parameters of a layer stack (see `loader.WeightMap`).

Legend: E experts, F expert inner size, H hidden size.
"""

from __future__ import annotations

from moe_lora.core.shape import ModelShape

from .loader import Checkpoint, Piece, WeightMap
from .spec import ModelSpec


def stem_weights(
    spec: ModelSpec, *, embedding: str = "model.embed_tokens.weight", norm: str = "model.norm.weight"
) -> WeightMap:
    """Embedding, last norm and head."""
    weights = {"embedding": [Piece(embedding)], "norm.weight": [Piece(norm)]}
    if not spec.tie_word_embeddings:
        weights["head"] = [Piece("lm_head.weight")]
    return weights


def attention_weights(spec: ModelSpec, layer: int) -> WeightMap:
    """Norms and attention of one layer, named alike in every family but DBRX."""
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    site = spec.shape.site("qkv")
    weights: WeightMap = {
        f"{target}.attention_norm.weight": [Piece(f"{source}.input_layernorm.weight")],
        f"{target}.mlp_norm.weight": [Piece(f"{source}.post_attention_layernorm.weight")],
    }
    for kind in _kinds(spec.qkv_bias):
        weights[f"{target}.attention.qkv.{kind}"] = [
            Piece(f"{source}.self_attn.{name}_proj.{kind}", (slice(column, column + width),))
            for name, column, width in zip("qkv", site.columns, site.out_features, strict=True)
        ]
    for kind in _kinds(spec.o_bias):
        weights[f"{target}.attention.o.{kind}"] = [Piece(f"{source}.self_attn.o_proj.{kind}")]
    for name in ("q_norm", "k_norm") if spec.qk_norm else ():
        weights[f"{target}.attention.{name}.weight"] = [Piece(f"{source}.self_attn.{name}.weight")]
    if spec.sinks:
        weights[f"{target}.attention.sinks"] = [Piece(f"{source}.self_attn.sinks")]
    return weights


def dense_mlp_weights(spec: ModelSpec, layer: int) -> WeightMap:
    """Gate, up and down projections of a dense layer."""
    source, target = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
    inner = spec.shape.intermediate_size
    weights: WeightMap = {}
    for kind in _kinds(spec.mlp_bias):
        weights[f"{target}.gate_up.{kind}"] = [
            Piece(f"{source}.gate_proj.{kind}", (slice(0, inner),)),
            Piece(f"{source}.up_proj.{kind}", (slice(inner, 2 * inner),)),
        ]
        weights[f"{target}.down.{kind}"] = [Piece(f"{source}.down_proj.{kind}")]
    return weights


def expert_weights(
    shape: ModelShape, layer: int, checkpoint: Checkpoint, module: str, names: tuple[str, str, str]
) -> WeightMap:
    """Gate and experts of one layer in either form that transformers writes.

    The older form keeps one matrix per expert under `module`, with `names` for gate, up and down; the fused
    form keeps `mlp.experts.gate_up_proj` [E, 2F, H] (gate rows first) and `mlp.experts.down_proj` [E, H, F].
    """
    fused, target = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
    if f"{fused}.experts.gate_up_proj" in checkpoint:
        return {
            f"{target}.gate.weight": [Piece(f"{fused}.gate.weight")],
            f"{target}.gate_up.weight": [Piece(f"{fused}.experts.gate_up_proj")],
            f"{target}.down.weight": [Piece(f"{fused}.experts.down_proj")],
        }
    source, inner = f"model.layers.{layer}.{module}", shape.intermediate_size
    gate, up, down = names
    rows = ((gate, slice(0, inner)), (up, slice(inner, 2 * inner)))
    experts = range(shape.num_experts)
    return {
        f"{target}.gate.weight": [Piece(f"{source}.gate.weight")],
        f"{target}.gate_up.weight": [
            Piece(f"{source}.experts.{e}.{name}.weight", (e, part)) for e in experts for name, part in rows
        ],
        f"{target}.down.weight": [Piece(f"{source}.experts.{e}.{down}.weight", (e,)) for e in experts],
    }


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
