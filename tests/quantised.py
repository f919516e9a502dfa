"""Checkpoints whose weights are those that a quantised base stands for: oracles of its tests."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor
from torchao.quantization.granularity import PerRow

from moe_lora.core.hf_config import read_config
from moe_lora.models.loader import SINGLE_NAME
from moe_lora.models.quantised_weight import Quantisation
from moe_lora.models.spec import model_spec
from moe_lora.models.weights import weight_map

QUANTISED = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight")


@cache
def dequantised_checkpoint(model_dir: Path, quantisation: Quantisation, folder: Path) -> Path:
    """The checkpoint with each quantised weight replaced by what torchao's `dequantize` gives of it."""
    shutil.copytree(model_dir, folder)
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / SINGLE_NAME).items()}
    pieces = weight_map(model_spec(read_config(folder)), tensors)
    for name, parts in pieces.items():
        if name.endswith(QUANTISED) or (name == "head" and quantisation.head):
            for piece in parts:
                view = tensors[piece.key] if piece.transform is None else piece.transform(tensors[piece.key])
                view.copy_(dequantised(view.contiguous(), quantisation))
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def dequantised(weight: torch.Tensor, quantisation: Quantisation) -> torch.Tensor:
    """What torchao makes of a matrix, or of each of several."""
    form = quantisation.form
    if form.bits == 8:
        return Int8Tensor.from_hp(weight, PerRow()).dequantize()
    group = (*[1] * (weight.dim() - 1), form.group_size)
    return IntxUnpackedToInt8Tensor.from_hp(weight, group, torch.int4).dequantize()
