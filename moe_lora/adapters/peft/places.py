"""Where LoRA may sit in each family: PEFT module paths and expert parameters mapped to sites.

Torch-free. A place is one LoRA pair (lora_A, lora_B) of the file. Several parameters of one module
(the experts of a layer) are nested by PEFT: the last one defined has the bare key, each earlier one
one `.base_layer` more; so the order of the places of a path is the order of their definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moe_lora.core.shape import ModelShape

Form = Literal["matrix", "fused", "rows"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One LoRA pair.

    parameter: name below the module. modules: indices in the site that the pair feeds.
    expert: which one, None if dense or all at once. form: "matrix" (one linear layer), "fused" (3-D
    parameter of all experts), "rows" (2-D parameter with the experts stacked in its rows).
    optional_linear: a linear layer in older transformers only.
    """

    site: str
    modules: tuple[int, ...]
    parameter: str = "weight"
    expert: int | None = None
    form: Form = "matrix"
    interleaved: bool = False
    optional_linear: bool = False


@dataclass(frozen=True)
class PlaceMap:
    """All places of a model: module path → (layer, places in order of definition)."""

    by_path: dict[str, tuple[int, tuple[Place, ...]]]
    layer_prefix: str


@lru_cache(maxsize=8)
def place_map(shape: ModelShape, old_mixtral_names: bool = False) -> PlaceMap:
    """Places of every layer. old_mixtral_names: `block_sparse_moe` instead of `mlp`."""
    layer_prefix = "transformer.blocks" if shape.family == "dbrx" else "model.layers"
    in_layer = _dbrx_layer() if shape.family == "dbrx" else _layer(shape, old_mixtral_names)
    by_path = {
        f"{layer_prefix}.{layer}.{path}": (layer, places)
        for layer in range(shape.num_layers)
        for path, places in in_layer.items()
    }
    return PlaceMap(by_path, layer_prefix)


def _layer(shape: ModelShape, old_mixtral_names: bool) -> dict[str, tuple[Place, ...]]:
    places: dict[str, tuple[Place, ...]] = {
        f"self_attn.{name}_proj": (Place(site="qkv", modules=(i,)),) for i, name in enumerate("qkv")
    }
    places["self_attn.o_proj"] = (Place(site="o", modules=(0,)),)
    if shape.family == "llama":
        return places | _expert_modules("mlp", ("gate_proj", "up_proj", "down_proj"), None)
    router = "router" if shape.family == "gpt_oss" else "gate"
    moe = "block_sparse_moe" if old_mixtral_names else "mlp"
    places[f"{moe}.{router}"] = (Place(site="router", modules=(0,), optional_linear=True),)
    interleaved = shape.family == "gpt_oss"
    places[f"{moe}.experts"] = (
        Place(
            site="gate_up", modules=(0, 1), parameter="gate_up_proj", form="fused", interleaved=interleaved
        ),
        Place(site="down", modules=(0,), parameter="down_proj", form="fused"),
    )
    leaves = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
    if shape.family in leaves:
        for expert in range(shape.num_experts):
            places |= _expert_modules(f"{moe}.experts.{expert}", leaves[shape.family], expert)
    return places


def _expert_modules(
    prefix: str, leaves: tuple[str, str, str], expert: int | None
) -> dict[str, tuple[Place, ...]]:
    optional = expert is not None
    return {
        f"{prefix}.{leaf}": (Place(site=site, modules=(module,), expert=expert, optional_linear=optional),)
        for leaf, (site, module) in zip(leaves, (("gate_up", 0), ("gate_up", 1), ("down", 0)), strict=True)
    }


def _dbrx_layer() -> dict[str, tuple[Place, ...]]:
    return {
        "norm_attn_norm.attn.Wqkv": (Place(site="qkv", modules=(0,)),),
        "norm_attn_norm.attn.out_proj": (Place(site="o", modules=(0,)),),
        "ffn.router.layer": (Place(site="router", modules=(0,)),),
        "ffn.experts.mlp": (
            Place(site="gate_up", modules=(0,), parameter="w1", form="rows"),
            Place(site="gate_up", modules=(1,), parameter="v1", form="rows"),
            Place(site="down", modules=(0,), parameter="w2", form="rows"),
        ),
    }
