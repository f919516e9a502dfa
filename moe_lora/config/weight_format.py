# SPDX-License-Identifier: Apache-2.0
"""The format of an instance's weights, by the engine's settings and the model's config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_lora.core.weight_format import DEFAULT_GROUP_SIZE, UNQUANTISED, WeightFormat
from moe_lora.families import family_of
from moe_lora.families.schema.config_json import text_config

_SCALE_BITS = {"int8": 32.0, "int4": 16.0}
"""Of a group's scale; int4's are in the model's dtype, 16 bits taken."""
_ZERO_POINT_BITS = 8.0


def weight_format(
    config: Mapping[str, Any],
    quantize: str = "checkpoint",
    quantize_group_size: int | None = None,
    quantize_head: bool = False,
) -> WeightFormat:
    """What an engine with these settings holds of a model.  config: its config.json, {} if there is none.

    An unknown scheme counts as unquantised: an engine refuses the scheme.
    """
    if quantize == "none":
        return UNQUANTISED
    if quantize == "checkpoint":
        return _stored(text_config(config).get("quantization_config") or {}, config)
    kind, _, dynamic = quantize.partition("-")
    group_size = quantize_group_size or (DEFAULT_GROUP_SIZE if kind == "int4" else 0)
    end = "+head" if quantize_head else ""
    return _format(kind, group_size, f"-{dynamic}" if dynamic else "", end)


def _format(
    kind: str, group_size: int, dynamic: str = "", end: str = "", zero_points: bool = False
) -> WeightFormat:
    bits = 4.0 if kind == "int4" else 8.0
    if group_size and kind != "fp8":
        bits += _SCALE_BITS["int8" if kind == "int8" else "int4"] / group_size
        bits += zero_points * _ZERO_POINT_BITS / group_size
    name = f"{kind}{dynamic}{f'-{group_size}' if group_size else ''}{end}"
    return WeightFormat(name, bits, bits)


def _stored(section: Mapping[str, Any], config: Mapping[str, Any]) -> WeightFormat:
    """By config.json's quantization_config.  A tied head is the embedding, which none of these quantise."""
    match section.get("quant_method"):
        case "mxfp4":
            return WeightFormat("mxfp4", None, 4.25)
        case "fp8":
            found = _format("fp8", _block_width(section.get("weight_block_size")))
        case "compressed-tensors":
            group: Mapping[str, Any] = next(iter((section.get("config_groups") or {}).values()), {})
            weights = group.get("weights") or {}
            block = _block_width(weights.get("block_structure"))
            kind = "fp8" if weights.get("type") == "float" else f"int{weights.get('num_bits')}"
            stays = any("lm_head" in name for name in section.get("ignore") or ())  # or "re:.*lm_head"
            end = "" if stays or text_config(config).get("tie_word_embeddings") else "+head"
            group_size = int(block or weights.get("group_size") or 0)
            return _format(kind, group_size, end=end, zero_points=weights.get("symmetric") is False)
        case "torchao":
            text = str(section.get("quant_type"))
            size = re.search(r"group_size\D+(\d+)", text)
            kind = "fp8" if "Float8" in text else "int4" if "nt4" in text else "int8"
            found = _format(kind, int(size[1]) if size and kind == "int4" else 0)
        case _:
            return UNQUANTISED
    experts_stay = family_of(config).experts_stay
    return WeightFormat(found.name, found.attention_bits, None if experts_stay else found.expert_bits)


def _block_width(block: Any) -> int:
    """Of [height, width]; 0 without one."""
    return int(block[1]) if isinstance(block, list) and len(block) == 2 else 0
