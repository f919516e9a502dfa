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


@dataclass(frozen=True)
class Format:
    """How weights are held.  bits: 8 or 4.  group_size: inputs that share a scale, 0: all of an output's."""

    name: str
    bits: int
    group_size: int

    def refusal(self, width: int) -> str | None:
        """Why a matrix with this many inputs can't be held; None: it can."""
        if self.group_size and width % self.group_size:
            return f"its {width} inputs are no multiple of quantize_group_size={self.group_size}"
        return None

    def sizes(self, num_out: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one matrix's values and scales as they are held."""
        if self.bits == 8:
            return (num_out, width), (num_out,)
        return (num_out, -(-width // _BLOCK) * _BLOCK // 2), (num_out, width // self.group_size)

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Of values and of scales, for a model of `dtype`."""
        return (torch.int8, torch.float32) if self.bits == 8 else (torch.uint8, dtype)


@functools.cache
def format_of(name: str, group_size: int) -> Format:
    """The format of this name.  group_size: for int4 only, 0 elsewhere."""
    return Format(name, 8 if name.startswith("int8") else 4, group_size)


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

    data, scales: shapes as in `Format.sizes`; layout: csrc/unpack.inl.
    """
    rows = slice(first, first + q.shape[0])
    if form.bits == 8:
        data[rows], scales[rows] = q, scale[:, 0]
        return
    nibbles = torch.nn.functional.pad((q + 8).to(torch.uint8), (0, -q.shape[1] % _BLOCK))
    low, high = nibbles.unflatten(1, (-1, 2, _BLOCK // 2)).unbind(2)
    data[rows], scales[rows] = (low | high << 4).flatten(1), scale


def unpack(
    form: Format, data: torch.Tensor, scale: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `put` wrote: values int8 [..., K] and scales [..., G]."""
    if form.bits == 8:
        return data, scale[..., None]
    blocks = data.unflatten(-1, (-1, _BLOCK // 2))
    q = torch.stack([blocks & 15, blocks >> 4], dim=-2).flatten(-3)[..., :width]
    return q.to(torch.int8) - 8, scale


def dequantise(
    form: Format, data: torch.Tensor, scale: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """round(scale * q), [..., K] of dtype: what torchao's `dequantize` gives."""
    q, scales = unpack(form, data, scale, width)
    grouped = q.unflatten(-1, (scales.shape[-1], -1)).float()
    return (grouped * scales[..., None].float()).to(dtype).flatten(-2)


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
