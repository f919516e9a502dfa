# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: formats, quantisation, memory layout.

Legend: E experts, N output width, K input width, G groups of K.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from moe_lora.core.weight_format import group_refusal

_BLOCK = 64  # 4-bit values per 32 bytes
_BLOCK_OUT = 16  # outputs per block of dynamic weights
_MAX_DYNAMIC_WIDTH = 1 << 16  # 255 * 128 times this is just below 2**31


@dataclass(frozen=True)
class Format:
    """Format of weights."""

    name: str
    """int8, int4, fp8 (E4M3) or mxfp4; "-dynamic" also quantises inputs to 8 bits, row by row."""
    group_size: int = 0
    """Inputs per scale; 0: all."""
    row_group: int = 1
    """Outputs per scale (fp8)."""

    @property
    def text(self) -> str:
        """The format as an argument; see `format_named`."""
        return f"{self.name}/{self.group_size}/{self.row_group}"

    @property
    def bits(self) -> int:
        return 4 if "4" in self.name else 8

    @property
    def dynamic(self) -> bool:
        """True if inputs are quantised too."""
        return self.name.endswith("-dynamic")

    def refusal(self, width: int) -> str | None:
        """The reason against this width, or None."""
        if self.group_size and self.name != "fp8" and (refusal := group_refusal(width, self.group_size)):
            return refusal
        if self.dynamic and width > _MAX_DYNAMIC_WIDTH:
            return f"integer sums over its {width} inputs don't fit 32 bits; up to {_MAX_DYNAMIC_WIDTH} do"
        return None

    def num_groups(self, width: int) -> int:
        """Scales per output."""
        return -(-width // self.group_size) if self.group_size else 1

    def sizes(self, num_out: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of values and scales in memory."""
        groups = self.num_groups(width)
        if self.dynamic:
            blocks = -(-num_out // _BLOCK_OUT)
            if self.bits == 8:
                return (blocks, -(-width // 4), _BLOCK_OUT, 4), (blocks, _BLOCK_OUT)
            return (blocks, width // 8, _BLOCK_OUT, 4), (blocks, groups, _BLOCK_OUT)
        if self.bits == 8:
            per_output = self.name == "int8" and not self.group_size
            scales = (num_out,) if per_output else (-(-num_out // self.row_group), groups)
            return (num_out, width), scales
        return (num_out, -(-width // _BLOCK) * _BLOCK // 2), (num_out, groups)

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of values and scales, for a model of `dtype`."""
        match self.name:
            case "fp8":
                return torch.float8_e4m3fn, torch.float32
            case "mxfp4":
                return torch.uint8, torch.uint8
        return (torch.int8, torch.float32) if self.bits == 8 else (torch.uint8, dtype)


@functools.cache
def format_named(text: str) -> Format:
    """Inverse of `Format.text`."""
    name, group_size, row_group = text.split("/")
    return format_of(name, int(group_size), int(row_group))


@functools.cache
def format_of(name: str, group_size: int = 0, row_group: int = 1) -> Format:
    """The named format, one object per format."""
    return Format(name, group_size, row_group)


Unpacked = tuple[torch.Tensor, torch.Tensor]


class QuantisedOperand(NamedTuple):
    """Quantised weights of a matrix, or of E, in the layout of `put`."""

    form: Format
    data: torch.Tensor
    scale: torch.Tensor
    """Of `Format.dtypes`, or fp32 if a checkpoint's would lose bits."""
    zero: torch.Tensor | None = None
    """int8 [..., N, G] zero points; None: 0."""


def quantise(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's symmetric values [N, K] and scales [N / row_group, G] of a matrix [N, K].

    Scales: fp32 for int8 and fp8, the weight's dtype for int4.
    """
    made: Any
    if form.name == "fp8":
        block = (form.row_group, form.group_size or weight.shape[1])
        if block == (1, weight.shape[1]):
            made = _torchao().Float8Tensor.from_hp(weight, granularity=_torchao().PerRow())
        else:
            num_out, width = weight.shape
            whole = torch.nn.functional.pad(weight, (0, -width % block[1], 0, -num_out % block[0]))
            made = _torchao().Float8Tensor.from_hp(whole, granularity=_torchao().granularity.PerBlock(block))
            return made.qdata[:num_out, :width], made.scale
    elif form.bits == 8:
        made = _torchao().Int8Tensor.from_hp(weight, _torchao().PerRow())
    else:
        int4 = torch.int4  # type: ignore[attr-defined]
        made = _torchao().IntxUnpackedToInt8Tensor.from_hp(weight, (1, form.group_size), int4)
    return made.qdata, made.scale


def put(
    form: Format, q: torch.Tensor, scale: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, first: int
) -> None:
    """Write `quantise`'s [R, K] and [R / row_group, G] to a matrix from row `first`, a multiple of row_group.

    q of mxfp4: codes, uint8.  Layouts: csrc/unpack.inl and csrc/dynamic.inl.
    """
    rows = slice(first, first + q.shape[0])
    if form.dynamic:
        numbers = torch.arange(rows.start, rows.stop, device=q.device)
        in_blocks = (numbers // _BLOCK_OUT, numbers % _BLOCK_OUT)
        data.transpose(1, 2)[in_blocks] = _fours(form, q)
        scales.view(data.shape[0], -1, _BLOCK_OUT).transpose(1, 2)[in_blocks] = scale
        return
    first_scale = first // form.row_group
    scales[first_scale : first_scale + scale.shape[0]] = scale[:, 0] if scales.dim() == 1 else scale
    if form.bits == 8:
        data[rows] = q
        return
    codes = q if form.name == "mxfp4" else (q + 8).to(torch.uint8)
    nibbles = torch.nn.functional.pad(codes, (0, -q.shape[1] % _BLOCK))
    low, high = nibbles.unflatten(1, (-1, 2, _BLOCK // 2)).unbind(2)
    data[rows] = (low | high << 4).flatten(1)


def _fours(form: Format, q: torch.Tensor) -> torch.Tensor:
    if form.bits == 8:
        return torch.nn.functional.pad(q, (0, -q.shape[1] % 4)).unflatten(1, (-1, 4))
    low, high = (q + 8).to(torch.uint8).unflatten(1, (-1, 2, 4)).unbind(2)
    return low | high << 4


def unpack(weight: QuantisedOperand, num_out: int, width: int) -> Unpacked:
    """Inverse of `put`: values [..., N, K] and scales [..., N, G]; the product is the weights.

    int8 values (int16 after zero points), float8 of fp8.  MXFP4: twice the values, half the scales.
    """
    form, data, scale, zero = weight
    if form.dynamic:
        data = data.transpose(-3, -2).flatten(-4, -3)[..., :num_out, :, :]
        scale = scale.unflatten(-2, (-1, 1)) if form.bits == 8 else scale
        scale = scale.transpose(-2, -1).flatten(-3, -2)[..., :num_out, :]
        if form.bits == 4:
            data = torch.stack([data & 15, data >> 4], dim=-2).to(torch.int8) - 8
        return data.flatten(scale.dim() - 1)[..., :width], scale
    if form.bits == 8:
        sizes = form.sizes(num_out, width)[1]
        scale = scale[..., None] if len(sizes) == 1 else scale
        scale = scale if form.row_group == 1 else scale.repeat_interleave(form.row_group, -2)
        return data if zero is None else _less(data, zero), scale[..., :num_out, :]
    blocks = data.unflatten(-1, (-1, _BLOCK // 2))
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-2).flatten(-3)[..., :width]
    if form.name == "mxfp4":
        one = torch.ones(scale.shape, device=scale.device)
        return _TWICE_E2M1.to(codes.device)[codes.int()], torch.ldexp(one, scale.int() - E8M0_BIAS - 1)
    q = codes.to(torch.int8) - 8
    return q if zero is None else _less(q, zero), scale


E8M0_BIAS = 127
_TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the values of FP4 codes, E2M1 (OCP Microscaling Formats v1.0)."""


def _less(q: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    grouped = q.short().unflatten(-1, (zero.shape[-1], -1))
    return (grouped - zero[..., None]).flatten(-2)


def dequantise(weight: QuantisedOperand, num_out: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """round(scale * q), [..., K] of dtype, equal to torchao's `dequantize`."""
    q, scales = unpack(weight, num_out, width)
    group_size = weight.form.group_size
    if group_size and width % group_size:
        scales = scales.repeat_interleave(group_size, -1)[..., :width]
        return (q.float() * scales.float()).to(dtype)
    grouped = q.unflatten(-1, (scales.shape[-1], -1)).float()
    return (grouped * scales[..., None].float()).to(dtype).flatten(-2)


def quantise_rows(x: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A dynamic format's inputs: values int8 [T, K], scales fp32 [T, 1] and zero points int8 [T, 1].

    As torchao: symmetric beside int8 weights; asymmetric, in x's dtype, beside int4.
    """
    block, ao = (1, x.shape[1]), _torchao().quant_primitives
    if form.bits == 8:
        made = _torchao().Int8Tensor.from_hp(x, _torchao().PerRow())
        return made.qdata, made.scale, torch.zeros_like(made.scale, dtype=torch.int8)
    kind = ao.MappingType.ASYMMETRIC
    scale, zero = ao.choose_qparams_affine(
        x, kind, block, torch.int8, zero_point_dtype=torch.int8, keepdim=True
    )
    return ao.quantize_affine(x, block, scale, zero, torch.int8), scale.float(), zero


@functools.cache
def _torchao() -> ModuleType:
    """torchao.quantization, without warnings of unused CUDA extensions."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.quantization as found
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    return found
