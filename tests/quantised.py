# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose weights are those that a quantised base stands for: oracles of its tests."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor
from torchao.quantization.granularity import PerRow
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from moe_lora.core.wrong_files import SINGLE_NAME, read_config
from moe_lora.families import model_spec
from moe_lora.models.quantised_weight import Quantisation
from moe_lora.models.weights import weight_map

from .families import load_model, targets_as_given

QUANTISED = (
    *("qkv.weight", "o.weight", "attention.gate.weight", "gate_up.weight", "down.weight"),
    *(f"attention.{name}.weight" for name in ("q", "q_a", "q_b", "kv_a", "qkvz", "out")),
)


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
    if form.name == "fp8":
        return Float8Tensor.from_hp(weight, granularity=PerRow()).dequantize()
    if form.bits == 8:
        return Int8Tensor.from_hp(weight, PerRow()).dequantize()
    group = (*[1] * (weight.dim() - 1), form.group_size)
    return IntxUnpackedToInt8Tensor.from_hp(weight, group, torch.int4).dequantize()


LINEAR = re.compile(
    r"(?:[qkvo]_proj|Wqkv|out_proj|gate_proj|up_proj|down_proj|gate_up_proj|(?:in|out)put_linear|[wv][123]|"
    r"in_proj_(?:qkvz?|z)|q_[ab]_proj|kv_a_proj_with_mqa)(?:\.weight)?$"
)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class TorchaoLinears(TorchFunctionMode):
    """Has torchao compute products of inputs with linear layers and experts, in a dynamic format."""

    def __init__(self, model: torch.nn.Module, quantisation: Quantisation) -> None:
        super().__init__()
        self.form = quantisation.form
        self.num_products = 0
        self._known = {
            weight.untyped_storage().data_ptr()
            for name, weight in model.named_parameters()
            if LINEAR.search(name.replace(".base_layer", ""))
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        linear = func is torch.nn.functional.linear
        if (linear or func in PRODUCTS) and args[1].untyped_storage().data_ptr() in self._known:
            self.num_products += 1
            weight = self._quantised((args[1] if linear else args[1].mT).contiguous())
            return torch.nn.functional.linear(args[0].contiguous(), weight, *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _quantised(self, weight: torch.Tensor) -> torch.Tensor:
        if self.form.bits == 8:
            rows = QuantizeTensorToInt8Kwargs(PerRow())
            return Int8Tensor.from_hp(weight.detach(), PerRow(), act_quant_kwargs=rows)
        return IntxUnpackedToInt8Tensor.from_hp(
            weight.detach(),
            (1, self.form.group_size),
            torch.int4,
            activation_quantization="int8_asym_per_token",
        )


def torchao_logits(
    model_dir: Path, adapter: Path | None, quantisation: Quantisation, prompt: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of transformers and peft in fp32, their base's products computed by torchao.

    Second: expert ids [T, K] of each layer with experts, as its gate chose them.
    """
    model = _adapted(model_dir, adapter)
    chosen: list[torch.Tensor] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        chosen.append(next(one for one in (*args, *kwargs.values()) if not one.is_floating_point()).long())

    experts = [part for name, part in model.named_modules() if name.endswith(".experts")]
    with ExitStack() as stack, torch.inference_mode(), TorchaoLinears(model, quantisation) as mode:
        for one in experts:
            stack.callback(one.register_forward_pre_hook(record, with_kwargs=True).remove)
        logits = model(torch.tensor([list(prompt)])).logits[0].float()
    assert mode.num_products >= 8, "torchao computed attention and MLP or experts of both layers"
    return logits, chosen


@lru_cache(maxsize=3)
def _adapted(model_dir: Path, adapter: Path | None) -> Any:
    model = load_model(model_dir)
    with targets_as_given(model.config.model_type):
        return model if adapter is None else PeftModel.from_pretrained(model, str(adapter)).eval()
