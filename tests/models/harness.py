# SPDX-License-Identifier: Apache-2.0
"""Runs a model step by step without an engine: paged KV, adapters in slots, batches put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.shard import ModelShard
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.engine.step.unequal_layers import RecurrentContext, SizedContext
from moe_lora.kernels.operands import SlotTable, StepTables, kv_layout
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import RowRouting, local_routing
from moe_lora.models.causal_lm import DecoderLayer
from moe_lora.models.loader import load_model
from moe_lora.models.quantised_weight import Quantisation
from tests.slots import write_slot

BLOCK_SIZE = 4
MAX_TOKENS = 160
BLOCKS_PER_SEQUENCE = MAX_TOKENS // BLOCK_SIZE


@dataclass
class Stream:
    """One sequence: its slot (-1 = base), its pages, and how many of its tokens are in the KV cache."""

    slot: int
    pages: list[int]
    length: int = 0


class Harness:
    """A checkpoint with its adapters (slot i = adapters[i]) and room for a number of sequences."""

    def __init__(
        self,
        model_dir: Path,
        adapters: Sequence[Path] = (),
        *,
        dtype: torch.dtype = torch.float32,
        max_sequences: int = 16,
        layer_forward=DecoderLayer.__call__,
        quantisation: Quantisation | None = None,
        shard: ModelShard | None = None,
    ) -> None:
        self.model = load_model(model_dir, dtype, torch.device("cpu"), shard, quantisation)
        self.layer_forward = layer_forward
        shape = self.model.spec.shape
        self.layout = kv_layout(shape, BLOCK_SIZE, dtype)
        packed = [read_adapter(path, shape, dtype) for path in adapters]
        self.pages_per_sequence = BLOCKS_PER_SEQUENCE + shape.state_pages(self.layout.page_bytes)
        num_pages = max_sequences * self.pages_per_sequence
        offset = num_pages * self.layout.page_bytes
        self.arena = torch.zeros(offset + sum(p.nbytes for p in packed), dtype=torch.uint8)
        self.slots = SlotTable(len(packed), shape.num_layers, shape.num_entries, self.arena.device)
        for slot, adapter in enumerate(packed):
            offsets = []
            for layer in adapter.layers:
                offsets.append(offset)
                offset += layer.nbytes
            write_slot(self.slots, slot, self.arena, adapter, offsets)
        backend = LocalBackend(shape, self.arena, self.slots)
        self.context: ExecutionContext
        if shape.global_heads is not None:
            self.context = SizedContext(self.arena, self.layout, backend, shape)
        elif shape.delta is None:
            self.context = ExecutionContext(self.arena, self.layout, backend)
        else:
            self.context = RecurrentContext(self.arena, self.layout, backend, shape)
        # Pages in a scattered order: a sequence whose pages lie side by side would hide addressing errors.
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self._free_pages = order

    def add(self, slot: int = -1) -> Stream:
        """A new, empty sequence of this slot's adapter."""
        pages = [self._free_pages.pop() for _ in range(self.pages_per_sequence)]
        return Stream(slot, pages)

    @torch.inference_mode()
    def step(self, batch: Sequence[tuple[Stream, Sequence[int]]], num_padding: int = 0) -> list[torch.Tensor]:
        """Run these tokens of these sequences in one batch; logits [rows, vocab] per sequence.

        num_padding: rows without a sequence at the end of the batch.
        """
        tokens: list[int] = []
        positions: list[int] = []
        token_slots, starts, lengths = [], [0], []
        for sequence, new in batch:
            tokens += list(new)
            positions += range(sequence.length, sequence.length + len(new))
            token_slots += [sequence.slot] * len(new)
            sequence.length += len(new)
            starts.append(starts[-1] + len(new))
            lengths.append(sequence.length)
        num_rows = len(tokens)
        tables = StepTables(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor([self.columns(s.pages) for s, _ in batch], dtype=torch.int32),
        )
        token_slots += [-1] * num_padding
        self.context.begin_step(tables, self.routing(np.array(token_slots, dtype=np.int32)))
        logits = self.model(
            torch.tensor(tokens + [0] * num_padding),
            torch.tensor(positions + [0] * num_padding),
            torch.arange(num_rows + num_padding) < num_rows,
            torch.arange(num_rows),
            self.context.channels,
            self.layer_forward,
        )
        if isinstance(self.context, RecurrentContext):
            self.context.store_states()
        return list(logits.split([len(new) for _, new in batch]))

    def columns(self, pages: list[int]) -> list[int]:
        """A row of the block table: a recurrent model's state is read and written in place."""
        num = self.pages_per_sequence - BLOCKS_PER_SEQUENCE
        if not num:
            return pages
        assert isinstance(self.context, RecurrentContext)
        return [*pages[:num], *pages[:num], *[0] * (self.context.num_columns - 2 * num), *pages[num:]]

    def routing(self, token_slots: np.ndarray) -> RowRouting:
        """Where the rows of these slots have their deltas from."""
        return local_routing(self.model.spec.shape, token_slots)

    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> tuple[list[Stream], list[torch.Tensor]]:
        """All prompts as one batch."""
        sequences = [self.add(slot) for slot in slots]
        return sequences, self.step(list(zip(sequences, prompts, strict=True)))

    def greedy(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], num_tokens: int
    ) -> list[list[int]]:
        """Greedy continuations of all prompts, decoded in one batch, one token of each per step."""
        sequences, logits = self.prefill(prompts, slots)
        out = [[int(rows[-1].argmax())] for rows in logits]
        while len(out[0]) < num_tokens:
            logits = self.step([(s, done[-1:]) for s, done in zip(sequences, out, strict=True)])
            for done, rows in zip(out, logits, strict=True):
                done.append(int(rows[-1].argmax()))
        return out
