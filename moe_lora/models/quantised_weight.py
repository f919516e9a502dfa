# SPDX-License-Identifier: Apache-2.0
"""Quantised weights of a model.

Legend: E experts, N output width, K input width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moe_lora.core.weight_format import DEFAULT_GROUP_SIZE
from moe_lora.kernels import ops, quantised
from moe_lora.kernels.quantised import Format, format_of

from .stored_weight import StoredWeight

Read = Callable[[torch.Tensor], bool]
"""True if a file's tensor goes into the given tensor, unchanged."""
_AT_ONCE = 1 << 18  # weights; temporaries are several times as large


def rows_at_once(width: int, row_group: int) -> int:
    """Rows to quantise together, a multiple of row_group."""
    return max(1, _AT_ONCE // width // row_group) * row_group


@dataclass(frozen=True)
class Quantisation:
    """A format for linear layers of attention, MLP and experts.

    form: None: the model's dtype.  head: includes the vocabulary head; a tied embedding stays unquantised.
    """

    form: Format | None
    head: bool = False


def quantisation_of(quantize: str, group_size: int | None, head: bool) -> Quantisation | None:
    """The settings' quantisation; None: the checkpoint's formats."""
    if quantize == "checkpoint":
        return None
    if quantize == "none":
        return Quantisation(None)
    if quantize.startswith("int4"):
        group_size = group_size or DEFAULT_GROUP_SIZE
    in_blocks = quantize == "fp8" and group_size
    return Quantisation(format_of(quantize, group_size or 0, group_size if in_blocks else 1), head)


@dataclass(frozen=True)
class WeightLayout:
    """wide: fp32 scales, beyond the precision of the model's dtype.  zeros: with zero points."""

    form: Format
    wide: bool = False
    zeros: bool = False


def common_layout(
    stored: Sequence[StoredWeight], first_rows: Iterable[int], dtype: torch.dtype
) -> WeightLayout | None:
    """The unchanged layout of all parts of a weight; None for several formats.

    first_rows: of each part: no block of rows may cross parts.
    """
    forms = {replace(one.form, row_group=1) for one in stored}
    if len(forms) != 1:
        return None
    row_group = math.gcd(*(one.form.row_group for one in stored), *first_rows)
    form = replace(forms.pop(), row_group=max(1, row_group))
    wide = form.name == "int4" and any(one.scale.dtype != dtype and dtype != torch.float32 for one in stored)
    return WeightLayout(
        format_of(form.name, form.group_size, form.row_group),
        wide,
        any(one.zero is not None for one in stored),
    )


class QuantisedWeight(nn.Module):
    """A matrix [N, K], or one per expert, in a format of `kernels.quantised`; replaces a parameter.

    data, scale, zero: as in `QuantisedOperand`, after the experts' dim.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, layout: WeightLayout) -> None:
        """weight: gives shape, dtype and device.  Raises ValueError for an unfit shape."""
        super().__init__()
        self.shape, self.dtype, self.form = weight.shape, weight.dtype, layout.form
        self.form_text = self.form.text
        *experts, self.num_out, width = weight.shape
        refusal = self.form.refusal(width)
        if refusal is not None:
            raise ValueError(refusal)
        sizes, dtypes = self.form.sizes(self.num_out, width), self.form.dtypes(weight.dtype)
        if layout.wide:
            dtypes = dtypes[0], torch.float32
        parts = dict(zip(("data", "scale"), zip(sizes, dtypes, strict=True), strict=True))
        if layout.zeros:
            parts["zero"] = (self.num_out, self.form.num_groups(width)), torch.int8
        for name in ("data", "scale", "zero"):
            held = None
            if name in parts:
                size, dtype = parts[name]
                held = torch.empty(*experts, *size, dtype=dtype, device=weight.device)
            self.register_buffer(name, held)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `ops.linear`, or with ids as `ops.expert_linear`."""
        return ops.quantised_linear(
            x, self.data, self.scale, self.zero, bias, ids, self.form_text, self.num_out
        )

    def fill(self, index: tuple[Any, ...], weight: torch.Tensor | StoredWeight, read: Read) -> None:
        """Write `weight` into the part of the matrices at index (expert, rows).

        Reads or copies values in the same format, else quantises.  Raises ValueError without a finite scale.
        """
        if len(self.shape) == 2:
            self._fill_rows((), index[0] if index else slice(None), weight, read)
        elif index and isinstance(index[0], int):
            self._fill_rows(index[0], index[1] if index[1:] else slice(None), weight, read)
        else:
            assert isinstance(weight, torch.Tensor)
            for expert, matrix in enumerate(weight):
                self._fill_rows(expert, index[1] if index[1:] else slice(None), matrix, read)

    def _fill_rows(self, expert: Any, rows: slice, weight: torch.Tensor | StoredWeight, read: Read) -> None:
        first, data, scale = rows.indices(self.num_out)[0], self.data[expert], self.scale[expert]
        group = self.form.row_group
        step = rows_at_once(weight.shape[1], group)
        as_it_is = isinstance(weight, StoredWeight) and self._takes(weight)
        in_rows = as_it_is and self.form.bits == 8 and not self.form.dynamic
        is_read = in_rows and read(data[first : first + weight.shape[0]])
        if is_read:
            assert isinstance(weight, StoredWeight)
            scales = weight.scales(group)
            scale[first // group :][: len(scales)] = scales[:, 0] if scale.dim() == 1 else scales
        for row in range(weight.shape[0] if is_read else 0, weight.shape[0], step):
            some = slice(row, min(row + step, weight.shape[0]))
            if isinstance(weight, torch.Tensor):
                plain = weight[some].to(device=data.device, dtype=self.dtype).contiguous()
            elif not as_it_is:
                plain = weight.dequantised(some, self.dtype)
            if as_it_is:
                assert isinstance(weight, StoredWeight)
                q, scales = weight.values(some), weight.scales(group)[row // group : -(-some.stop // group)]
            else:
                q, scales = quantised.quantise(plain, self.form)
                if not scales.isfinite().all():
                    raise ValueError("it holds values that are not finite")
            quantised.put(self.form, q, scales, data, scale, first + row)
        if self.zero is not None:
            stored = weight.zero if isinstance(weight, StoredWeight) else None
            self.zero[expert][first : first + weight.shape[0]] = 0 if stored is None else stored

    def _takes(self, stored: StoredWeight) -> bool:
        form, kept = self.form, stored.form
        return (
            form.name.removesuffix("-dynamic") == kept.name
            and form.group_size == kept.group_size
            and kept.row_group % form.row_group == 0
            and (stored.zero is None or self.zero is not None)
            and (form.name != "int4-dynamic" or stored.scale.dtype == self.scale.dtype)
        )

    def dequantised(self) -> torch.Tensor:
        """The dequantised weights: [N, K] or [E, N, K] of the model's dtype."""
        held = quantised.QuantisedOperand(self.form, self.data, self.scale, self.zero)
        return quantised.dequantise(held, self.num_out, self.shape[-1], self.dtype)
