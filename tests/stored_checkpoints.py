# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the formats that come quantised, written by each format's definition, with plain twins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor
from torchao.quantization.granularity import PerRow

from moe_lora.core.wrong_files import SINGLE_NAME, read_config
from moe_lora.families import model_spec
from moe_lora.models.weights import HeadRows, weight_map

from .families import make_checkpoint
from .quantised import QUANTISED

Tensors = dict[str, torch.Tensor]
GROUP, BLOCK = 32, 16


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """compressed-tensors' pack_to_int32 along the last dim: value + 2**(bits - 1), the first one lowest."""
    fields = (values.long() + (1 << bits - 1)).unflatten(-1, (-1, 32 // bits))
    words = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def integers(
    weight: torch.Tensor, bits: int, group: int, asymmetric: bool, older: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' tensors of a weight, by the end of their names, and the weights they stand for.

    older: its files before 17 April 2025, whose zero points are not packed.
    """
    grouped, high = weight.unflatten(-1, (-1, group)), (1 << bits - 1) - 1
    zero = torch.zeros_like(grouped[..., 0])
    scale = grouped.abs().amax(-1) / high
    if asymmetric:
        low, span = grouped.amin(-1), grouped.amax(-1) - grouped.amin(-1)
        scale = span / (2 * high + 1)
        zero = (-high - 1 - low / scale).round().clamp(-high - 1, high)
    q = (grouped / scale[..., None] + zero[..., None]).round().clamp(-high - 1, high)
    tensors = {
        "_packed": packed(q.flatten(-2), bits),
        "_scale": scale,
        "_shape": torch.tensor(weight.shape),
    }
    if older:
        tensors["_zero_point"] = zero.to(torch.int8)
    elif asymmetric:
        rows = torch.nn.functional.pad(zero, (0, 0, 0, -len(zero) % (32 // bits)))
        tensors["_zero_point"] = packed(rows.T.contiguous(), bits).T.contiguous()
    return tensors, ((q - zero[..., None]) * scale[..., None]).flatten(-2)


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of BLOCK x BLOCK, those at the ends smaller; scale_inv multiplies."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / 448
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :width]
    q = (weight / whole).to(torch.float8_e4m3fn)
    return {"": q, "_scale_inv": scale}, q.float() * whole


def compressed(bits: int, group: int | None, asymmetric: bool = False) -> dict[str, object]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not asymmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "actorder": None,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**section, "config_groups": groups, "quantization_status": "compressed"}


Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
SCHEMES: dict[str, tuple[dict[str, object], Writer]] = {
    "w4a16": (compressed(4, GROUP), lambda w: integers(w, 4, GROUP, False)),
    "w4a16-asymmetric": (compressed(4, GROUP, True), lambda w: integers(w, 4, GROUP, True)),
    "w8a16": (compressed(8, None), lambda w: integers(w, 8, w.shape[1], False)),
    "w8a16-groups": (compressed(8, GROUP), lambda w: integers(w, 8, GROUP, False)),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        fp8_blocks,
    ),
}
TORCHAO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torchao-int8": lambda w: Int8Tensor.from_hp(w, PerRow()),
    "torchao-int4": lambda w: IntxUnpackedToInt8Tensor.from_hp(w, (*[1] * (w.dim() - 1), GROUP), torch.int4),
    "torchao-fp8": lambda w: Float8Tensor.from_hp(w, granularity=PerRow()),
}
KINDS = (*SCHEMES, *TORCHAO)


def linear_keys(model_dir: Path, tensors: Tensors) -> list[str]:
    """Names of the tensors that quantisers take: linear layers, and experts that lie as such."""
    pieces = weight_map(model_spec(read_config(model_dir)), tensors)
    return [
        piece.key
        for name, parts in pieces.items()
        if name.endswith((*QUANTISED, "latent_k.weight"))
        for piece in parts
        if piece.transform is None or isinstance(piece.transform, HeadRows)
    ]


def fused(tensors: Tensors) -> Tensors:
    """Mixtral's experts as transformers 5 has them in memory."""
    layers = {key.partition(".block_sparse")[0] for key in tensors if ".block_sparse" in key}
    out = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    out = {key.replace("block_sparse_moe.gate", "mlp.gate"): tensor for key, tensor in out.items()}
    for layer in layers:
        number = sum(key.startswith(f"{layer}.") and key.endswith(".w1.weight") for key in tensors)
        of = [f"{layer}.block_sparse_moe.experts.{e}" for e in range(number)]
        gate_up = [torch.cat([tensors[f"{e}.w1.weight"], tensors[f"{e}.w3.weight"]]) for e in of]
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{layer}.mlp.experts.down_proj"] = torch.stack([tensors[f"{e}.w2.weight"] for e in of])
    return out


def stored_pair(model_dir: Path, kind: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of this kind made of a plain one, and the plain one that it stands for."""
    stored, plain = folder / "stored", folder / "plain"
    shutil.copytree(model_dir, stored)
    shutil.copytree(model_dir, plain)
    tensors = load_file(model_dir / SINGLE_NAME)
    written, meant, metadata = dict(tensors), dict(tensors), {"format": "pt"}
    if kind in TORCHAO:
        section = {"quant_method": "torchao", "quant_type": {"default": {}}}
        for key in linear_keys(model_dir, tensors):
            written[key] = TORCHAO[kind](tensors[key])
            meant[key] = written[key].dequantize()
        written, found = flatten_tensor_state_dict(written)
        metadata |= found
    else:
        section, write = SCHEMES[kind]
        for key in linear_keys(model_dir, tensors):
            parts, meant[key] = write(tensors[key])
            del written[key]
            written |= {key + end: part for end, part in parts.items()}
    save_file(written, stored / SINGLE_NAME, metadata=metadata)
    save_file(meant, plain / SINGLE_NAME, metadata={"format": "pt"})
    set_quantisation(stored, section)
    return stored, plain


def set_quantisation(model_dir: Path, section: dict[str, object]) -> None:
    """Name it in config.json."""
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 blocks [*shape, 16] and scales near 1 [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
    return blocks, torch.randint(122, 126, shape, generator=generator).byte()


def dequantised_blocks(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What transformers makes of them, transposed."""
    module = pytest.importorskip("transformers.integrations.mxfp4")
    return module.convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def mxfp4_pair(folder: Path) -> tuple[Path, Path]:
    """A plain GPT-OSS checkpoint as transformers dequantises it, and the one with MXFP4 experts."""
    plain, quantised = folder / "plain", folder / "quantised"
    make_checkpoint("gpt_oss", plain, intermediate_size=64, num_hidden_layers=1)
    tensors = load_file(plain / SINGLE_NAME)
    packed = dict(tensors)
    for seed, name in enumerate(("gate_up_proj", "down_proj")):
        key = f"model.layers.0.mlp.experts.{name}"
        _, width, out = packed.pop(key).shape  # stored as [E, in, out]
        blocks, scales = random_blocks(4, out, width // 32, seed=seed)
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        tensors[key] = dequantised_blocks(blocks, scales, torch.float32)
    save_file(tensors, plain / SINGLE_NAME)
    shutil.copytree(plain, quantised)
    save_file(packed, quantised / SINGLE_NAME)
    set_quantisation(quantised, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain, quantised
