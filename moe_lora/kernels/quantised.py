"""Quantised weights: their formats, how torchao makes them, how they lie in memory, and what they mean.

Legend: E experts, N output width, K input width, G groups of K.

torchao is the quantiser. Its values and scales are kept as plain tensors, in the layout that the kernels of
`cpu/csrc` read, so that compiled code sees tensors and integers only.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

_BLOCK = 64  # int4 values that share 32 bytes
_BLOCK_OUT = 16  # outputs whose dynamic weights lie together
_MAX_DYNAMIC_WIDTH = 1 << 16  # 255 * 128 times that is just below 2**31


@dataclass(frozen=True)
class Format:
    """How weights are held.  bits: 8 or 4.  group_size: inputs that share a scale, 0: all of an output's.

    dynamic: inputs are quantised too, row by row, to 8 bits.
    """

    name: str
    bits: int
    group_size: int
    dynamic: bool = False

    def refusal(self, width: int) -> str | None:
        """Why a matrix with this many inputs can't be held; None: it can."""
        if self.group_size and width % self.group_size:
            return f"its {width} inputs are no multiple of quantize_group_size={self.group_size}"
        if self.dynamic and width > _MAX_DYNAMIC_WIDTH:
            return f"integer sums over its {width} inputs don't fit 32 bits; up to {_MAX_DYNAMIC_WIDTH} do"
        return None

    def sizes(self, num_out: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one matrix's values and scales as they are held."""
        if self.dynamic:
            blocks = -(-num_out // _BLOCK_OUT)
            if self.bits == 8:
                return (blocks, -(-width // 4), _BLOCK_OUT, 4), (blocks, _BLOCK_OUT)
            return (blocks, width // 8, _BLOCK_OUT, 4), (blocks, width // self.group_size, _BLOCK_OUT)
        if self.bits == 8:
            return (num_out, width), (num_out,)
        return (num_out, -(-width // _BLOCK) * _BLOCK // 2), (num_out, width // self.group_size)

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Of values and of scales, for a model of `dtype`."""
        return (torch.int8, torch.float32) if self.bits == 8 else (torch.uint8, dtype)


@functools.cache
def format_of(name: str, group_size: int) -> Format:
    """The format of this name.  group_size: for int4 only, 0 elsewhere."""
    return Format(name, 8 if name.startswith("int8") else 4, group_size, name.endswith("-dynamic"))


Unpacked = tuple[torch.Tensor, torch.Tensor]


class QuantisedOperand(NamedTuple):
    """Weights as operations take them: values and scales of one matrix, or of E, as `put` writes them."""

    form: Format
    data: torch.Tensor
    scale: torch.Tensor


def quantise(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's symmetric values and scales of a matrix [N, K]: int8 [N, K], and [N, G].

    Scales are fp32 for int8 and of the weight's dtype for int4, as torchao has them.
    """
    made: Any
    if form.bits == 8:
        made = _torchao().Int8Tensor.from_hp(weight, _torchao().PerRow())
    else:
        int4 = torch.int4  # type: ignore[attr-defined]
        made = _torchao().IntxUnpackedToInt8Tensor.from_hp(weight, (1, form.group_size), int4)
    return made.qdata, made.scale


def put(
    form: Format, q: torch.Tensor, scale: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, first: int
) -> None:
    """Write what `quantise` gives for some rows, [R, K] and [R, G], to a matrix held from row `first` on.

    data, scales: shapes as in `Format.sizes`; layouts: csrc/unpack.inl and csrc/dynamic.inl.
    """
    rows = torch.arange(first, first + q.shape[0], device=q.device)
    if form.dynamic:
        in_blocks = (rows // _BLOCK_OUT, rows % _BLOCK_OUT)
        data.transpose(1, 2)[in_blocks] = _fours(form, q)
        scales.view(data.shape[0], -1, _BLOCK_OUT).transpose(1, 2)[in_blocks] = scale
    elif form.bits == 8:
        data[rows], scales[rows] = q, scale[:, 0]
    else:
        nibbles = torch.nn.functional.pad((q + 8).to(torch.uint8), (0, -q.shape[1] % _BLOCK))
        low, high = nibbles.unflatten(1, (-1, 2, _BLOCK // 2)).unbind(2)
        data[rows], scales[rows] = (low | high << 4).flatten(1), scale


def _fours(form: Format, q: torch.Tensor) -> torch.Tensor:
    """[R, K] as groups of four bytes, [R, K / 4 or K / 8, 4]."""
    if form.bits == 8:
        return torch.nn.functional.pad(q, (0, -q.shape[1] % 4)).unflatten(1, (-1, 4))
    low, high = (q + 8).to(torch.uint8).unflatten(1, (-1, 2, 4)).unbind(2)
    return low | high << 4


def unpack(form: Format, data: torch.Tensor, scale: torch.Tensor, num_out: int, width: int) -> Unpacked:
    """What `put` wrote: values int8 [..., N, K] and scales [..., N, G]."""
    if form.dynamic:
        data = data.transpose(-3, -2).flatten(-4, -3)[..., :num_out, :, :]
        scale = scale.unflatten(-2, (-1, 1)) if form.bits == 8 else scale
        scale = scale.transpose(-2, -1).flatten(-3, -2)[..., :num_out, :]
        if form.bits == 4:
            data = torch.stack([data & 15, data >> 4], dim=-2).to(torch.int8) - 8
        return data.flatten(scale.dim() - 1)[..., :width], scale
    if form.bits == 8:
        return data, scale[..., None]
    blocks = data.unflatten(-1, (-1, _BLOCK // 2))
    q = torch.stack([blocks & 15, blocks >> 4], dim=-2).flatten(-3)[..., :width]
    return q.to(torch.int8) - 8, scale


def dequantise(
    form: Format, data: torch.Tensor, scale: torch.Tensor, num_out: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """round(scale * q), [..., K] of dtype: what torchao's `dequantize` gives."""
    q, scales = unpack(form, data, scale, num_out, width)
    grouped = q.unflatten(-1, (scales.shape[-1], -1)).float()
    return (grouped * scales[..., None].float()).to(dtype).flatten(-2)


def quantise_rows(x: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A dynamic format's inputs: values int8 [T, K], scales fp32 [T, 1] and zero points int8 [T, 1].

    torchao's: symmetric beside int8 weights, asymmetric and with every step in x's dtype beside int4.
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
    """torchao.quantization with what we use; its import warns of CUDA extensions that we don't use."""
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
