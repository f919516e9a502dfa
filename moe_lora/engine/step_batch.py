"""One step's input, as the ranks of an instance pass it on.

Legend: T token rows.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_lora.lora.row_routing import RowRouting
from moe_lora.kernels.operands import StepTables


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Tensors on the host until `to`.

    tokens, positions: [T] int64.  logit_rows: int64, rows whose logits are wanted.  num_live: rows from
    there on are padding.  routing: where the rows' deltas are computed.  compiled: whether a graph runs the
    layers.  any_rows: mark that graph as good for any number of rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    num_live: int
    tables: StepTables
    routing: RowRouting
    compiled: bool
    any_rows: bool

    def to(self, device: torch.device) -> StepBatch:
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            logit_rows=self.logit_rows.to(device, non_blocking=True),
            tables=self.tables.to(device),
        )


class _Pickler(pickle.Pickler):
    """Host tensors travel as numpy arrays: torch's own way costs a storage object for each."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def packed_message(message: Any) -> bytes:
    """The message, host tensors anywhere in it included, as one buffer that `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()
