# SPDX-License-Identifier: Apache-2.0
"""One step's input for all ranks.

Legend: T token rows, S sequences, B blocks of the longest sequence.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from moe_lora.kernels.operands import StepBounds, StepTables
from moe_lora.lora.row_routing import RowRouting

if TYPE_CHECKING:
    from .prompt_reports import PromptRows
    from .routed_experts import ExpertRows

_ALIGN_BYTES = 64


RANK_STEP = 64
"""Bounds of ranks are multiples of this, like workspaces."""
Place: TypeAlias = tuple[int, int]
"""Source and group of sites."""


@dataclass(frozen=True)
class CaptureSteps:
    """Have all ranks capture all shapes in the same order."""

    ranks: tuple[int, ...]


class StepBuffer:
    """Device memory for a step's input, filled from page-locked memory.

    `memory` stays while large enough.  A copy follows the earlier step's kernels on the device's stream: each
    reads the right input.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def fill(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, valid until the next call."""
        sizes = [-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays]
        starts = np.cumsum([0, *sizes]).tolist()
        if starts[-1] > self.memory.numel():
            self.memory = self.memory.new_empty(1 << starts[-1].bit_length())
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        for start, array in zip(starts, arrays, strict=False):
            staged.numpy()[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        self.memory[: starts[-1]].copy_(staged, non_blocking=True)
        return [
            self.memory[start : start + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Tensors on the host until `through`.

    tokens, positions: [T] int64.  live: [T] bool, False for padding.  logit_rows: int64.  any_rows: compile
    for any number of rows.  drawn: tokens of the step before, on the device: token -1 - i is number i.
    prompt: rows of reports.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    logit_rows: torch.Tensor
    tables: StepTables
    routing: RowRouting
    compiled: bool
    any_rows: bool
    drawn: torch.Tensor | None = None
    prompt: PromptRows | ExpertRows | None = None

    def with_drawn(self) -> StepBatch:
        """The batch with tokens from `drawn` in place."""
        if self.drawn is not None and len(self.drawn):  # a step without samples has no draws
            number = (-1 - self.tokens).clamp(min=0)
            self.tokens.copy_(torch.where(self.tokens < 0, self.drawn.index_select(0, number), self.tokens))
        return self

    def through(self, buffer: StepBuffer, bounds: StepBounds | None = None) -> StepBatch:
        """The batch on the buffer's device, with the slots of its rows.

        bounds None: the step's own lengths.
        """
        tables, slots = self.tables, self.routing.slots_here() | self.routing.frames_pushed()
        lengths = (tables.query_start, tables.seq_lens)
        arrays = [self.tokens, self.positions, self.live, self.logit_rows, *lengths, tables.block_tables]
        tokens, positions, live, logit_rows, query_start, seq_lens, block_tables, *row_slots = buffer.fill(
            [*(array.numpy() for array in arrays), *slots.values()]
        )
        return replace(
            self,
            tokens=tokens,
            positions=positions,
            live=live,
            logit_rows=logit_rows,
            tables=StepTables(
                query_start=query_start,
                seq_lens=seq_lens,
                block_tables=block_tables,
                decode=tables.decode,
                bounds=bounds or StepBounds.of(*lengths),
            ),
            routing=replace(self.routing, on_device=dict(zip(slots, row_slots, strict=True))),
        ).with_drawn()


class _Pickler(pickle.Pickler):
    """Host tensors as numpy arrays: torch's way needs a storage object each."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and not obj.is_meta:
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def packed_message(message: Any) -> bytes:
    """The message, with host tensors at any depth, for `pickle.loads`."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def with_places(batch: StepBatch, places: Sequence[Place]) -> RowRouting:
    """The batch's routing with terms at these places: a further route without rows."""
    terms = np.concatenate([batch.routing.terms[-1:], batch.routing.terms])
    for source, group in places:
        terms["source"][0, group, 0] = source
    return replace(batch.routing, terms=terms)
