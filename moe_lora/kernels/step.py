"""What the operations of one engine step need beside their operands.

Legend: T token rows, S sequences, B blocks per sequence, L layers, N slots, X offset-table entries per layer.

These tensors never enter a compiled graph: operations reach them through a channel (see `ops`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

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

    def clear(self, slot: int) -> None:
        """Make `slot` mean "no delta anywhere"."""
        self.lora_rank[slot].zero_()
        self.max_lora_ranks[slot] = ()


@dataclass(kw_only=True)
class StepTables:
    """One step's batch, all int32; operations want it on the arena's device.

    row_slot: [T] adapter slot of each token row, -1 = base model.
    query_start: [S + 1] first row of each sequence; rows of a sequence are consecutive tokens.
    seq_lens: [S] tokens of the sequence including this step's rows; 0 marks a padding sequence.
    block_tables: [S, B] page of each block.
    """

    row_slot: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    has_adapters: bool

    def to(self, device: torch.device) -> StepTables:
        """The same tables with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)
