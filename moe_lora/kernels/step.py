"""What the operations of one engine step need beside their operands.

Legend: T token rows, S sequences, B blocks per sequence, L layers, N slots, X offset-table entries per layer.

These tensors never enter a compiled graph: operations reach them through a channel (see `ops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """How keys and values lie in the arena: one page holds `block_size` tokens of every layer.

    Byte address of K for (page, layer, kv head, token in block):
    page * page_bytes + layer * layer_bytes + ((head * block_size) + token) * head_dim * itemsize;
    V follows K after layer_bytes / 2.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block's K and V in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, rounded up to 64 so that every page is aligned."""
        return -(-self.num_layers * self.layer_bytes // 64) * 64


class SlotTable:
    """Where each resident adapter's matrices lie in the arena, and at which rank.

    a_offset, b_offset: [N, L, X] int64, bytes from the start of the arena (A: `lora_rank` rows of d_in,
    B transposed: `lora_rank` rows of d_out, in the model's dtype).  lora_rank: [N, L, X] int32, 0 = no delta.
    scale: [N, L, X] fp32.  All on the arena's device.  max_lora_ranks: per slot, the largest rank
    of each entry over the layers (empty = no adapter), on the host.
    """

    def __init__(self, num_slots: int, num_layers: int, num_entries: int, device: torch.device) -> None:
        shape = (num_slots, num_layers, num_entries)
        self.a_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.b_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lora_rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.max_lora_ranks: list[tuple[int, ...]] = [()] * num_slots

    @property
    def num_slots(self) -> int:
        return self.lora_rank.shape[0]

    def write_layer(
        self, slot: int, layer: int, table: torch.Tensor, scale: torch.Tensor, itemsize: int, start_bytes: int
    ) -> None:
        """Point the slot's entries of one layer at matrices that lie from start_bytes on in the arena.

        table: [X, 3] int64 (offset of A, offset of B, rank), offsets in elements of itemsize bytes.
        scale: [X] fp32.  The matrices must be there: ranks are written last, and a rank of 0 hides the rest.
        """
        starts = table[:, :2] * itemsize + start_bytes
        self.a_offset[slot, layer].copy_(starts[:, 0])
        self.b_offset[slot, layer].copy_(starts[:, 1])
        self.scale[slot, layer].copy_(scale)
        self.lora_rank[slot, layer].copy_(table[:, 2])

    def clear(self, slot: int) -> None:
        """Make `slot` mean "no delta anywhere"."""
        self.lora_rank[slot].zero_()
        self.max_lora_ranks[slot] = ()


@dataclass(frozen=True)
class Lease:
    """Where the LoRA Server serves an adapter; the generation tells one content of the slot from the next."""

    slot: int
    generation: int


class LeasedAdapter(Protocol):
    """An adapter whose deltas come from the LoRA Server.

    packed: the `adapters.PackedAdapter` in host memory.  lease: None while there is none.
    """

    @property
    def packed(self) -> Any: ...

    @property
    def lease(self) -> Lease | None: ...


@dataclass(frozen=True)
class LeasedRows:
    """Which rows of a step want deltas from the LoRA Server.

    row_adapter: [T] int32 index into `adapters`, -1 = none.
    """

    adapters: Sequence[LeasedAdapter]
    row_adapter: np.ndarray


@dataclass(kw_only=True)
class StepTables:
    """One step's batch, all int32 on the arena's device.

    row_slot: [T] adapter slot of each token row, -1 = base model.
    query_start: [S + 1] first row of each sequence; rows of a sequence are consecutive tokens.
    seq_lens: [S] tokens of the sequence including this step's rows; 0 marks a padding sequence.
    block_tables: [S, B] page of each block.
    has_adapters: some row has a slot.  leased: rows for the LoRA Server, None if there are none.
    decode: every sequence computes one token.
    """

    row_slot: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    has_adapters: bool
    leased: LeasedRows | None = None
    decode: bool = False
