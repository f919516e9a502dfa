"""Weights of a model that are held quantised.

Legend: T token rows, E experts, N output width, K input width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_lora.kernels import ops, quantised
from moe_lora.kernels.quantised import Format, format_of

DEFAULT_GROUP_SIZE = 64
_AT_ONCE = 1 << 18  # weights; the quantiser's temporaries are several times as large as what it is given


@dataclass(frozen=True)
class Quantisation:
    """Linear layers of attention, MLP and experts in a format; router, norms and embeddings stay as they are.

    head: the vocabulary head too; a tied embedding stays beside it.
    """

    form: Format
    head: bool = False


def quantisation_of(quantize: str, group_size: int | None, head: bool) -> Quantisation | None:
    """What the settings of these names ask for; None: nothing."""
    if quantize == "none":
        return None
    group_size = (group_size or DEFAULT_GROUP_SIZE) if quantize.startswith("int4") else 0
    return Quantisation(format_of(quantize, group_size), head)


class QuantisedWeight(nn.Module):
    """A matrix [N, K], or one per expert, in a format of `kernels.quantised`; stands where a parameter would.

    data, scale: as `Format.sizes` says, after the experts' dim.
    """

    data: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, form: Format) -> None:
        """weight: gives shape, dtype and device.  Raises ValueError if the format can't hold the shape."""
        super().__init__()
        self.shape, self.dtype, self.form = weight.shape, weight.dtype, form
        *experts, self.num_out, width = weight.shape
        refusal = form.refusal(width)
        if refusal is not None:
            raise ValueError(refusal)
        sizes, dtypes = form.sizes(self.num_out, width), form.dtypes(weight.dtype)
        for name, size, dtype in zip(("data", "scale"), sizes, dtypes, strict=True):
            self.register_buffer(name, torch.empty(*experts, *size, dtype=dtype, device=weight.device))

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `ops.linear`, or with ids as `ops.expert_linear`."""
        form = self.form
        return ops.quantised_linear(
            x, self.data, self.scale, bias, ids, form.name, form.group_size, self.num_out
        )

    def fill(self, index: tuple[Any, ...], weight: torch.Tensor) -> None:
        """Quantise `weight` into the part of the matrices that index, of expert and rows, names.

        A few rows at a time, so that no matrix is there twice.  Raises ValueError for weights without finite
        scale.
        """
        if len(self.shape) == 2:
            self._fill_rows((), index[0] if index else slice(None), weight)
        elif index and isinstance(index[0], int):
            self._fill_rows(index[0], index[1] if index[1:] else slice(None), weight)
        else:
            for expert, matrix in enumerate(weight):
                self._fill_rows(expert, index[1] if index[1:] else slice(None), matrix)

    def _fill_rows(self, expert: Any, rows: slice, weight: torch.Tensor) -> None:
        first, data, scale = rows.indices(self.num_out)[0], self.data[expert], self.scale[expert]
        step = max(1, _AT_ONCE // weight.shape[1])
        for row in range(0, weight.shape[0], step):
            some = weight[row : row + step].to(device=data.device, dtype=self.dtype).contiguous()
            q, scales = quantised.quantise(some, self.form)
            if not scales.isfinite().all():
                raise ValueError("it holds values that are not finite")
            quantised.put(self.form, q, scales, data, scale, first + row)

    def dequantised(self) -> torch.Tensor:
        """The weights that the values and scales stand for: [N, K] or [E, N, K] of the model's dtype."""
        return quantised.dequantise(
            self.form, self.data, self.scale, self.num_out, self.shape[-1], self.dtype
        )
