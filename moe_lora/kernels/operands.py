"""What the operations of one engine step need beside their operands.

Legend: T token rows, S sequences, B blocks per sequence, L layers, N slots, X offset-table entries per layer.

These tensors never enter a compiled graph: operations reach them through a channel (see `ops`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES, MAX_LORA_RANK

if TYPE_CHECKING:
    from moe_lora.core.shape import Site


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
    of each entry over the layers (empty = no adapter), on the host.  present: [N, L] bool, on the host: the
    layer's bytes are there, kept by who copies them.
    """

    def __init__(self, num_slots: int, num_layers: int, num_entries: int, device: torch.device) -> None:
        shape = (num_slots, num_layers, num_entries)
        self.a_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.b_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lora_rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.max_lora_ranks: list[tuple[int, ...]] = [()] * num_slots
        self.present = np.zeros((num_slots, num_layers), dtype=bool)
        self._checked: dict[tuple[int, int, int], tuple[tuple[int, ...], int]] = {}

    @property
    def num_slots(self) -> int:
        return self.lora_rank.shape[0]

    def grown(self, num_slots: int) -> SlotTable:
        """A copy with more slots, the new ones empty."""
        _, num_layers, num_entries = self.lora_rank.shape
        table = SlotTable(num_slots, num_layers, num_entries, self.lora_rank.device)
        for name in ("a_offset", "b_offset", "lora_rank", "scale"):
            getattr(table, name)[: self.num_slots].copy_(getattr(self, name))
        table.max_lora_ranks[: self.num_slots] = self.max_lora_ranks
        table.present[: self.num_slots] = self.present
        return table

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

    def checked_rank(self, site: Site, itemsize: int, arena_bytes: int) -> int:
        """Largest rank of any adapter at `site`, having checked that its matrices lie within the arena.

        itemsize: bytes of an element.  Looks at the tables, and so waits for the device, only if one was
        written since the last call.  Raises ValueError for an offset or a rank outside what is allowed, and
        for a site whose entries the tables don't have.
        """
        key = (site.entry_base, itemsize, arena_bytes)
        tables = (self.a_offset, self.b_offset, self.lora_rank)
        versions = tuple(table._version for table in tables)
        if self._checked.get(key, ((), 0))[0] != versions:
            self._checked[key] = (versions, self._check_site(site, itemsize, arena_bytes))
        return self._checked[key][1]

    def _check_site(self, site: Site, itemsize: int, arena_bytes: int) -> int:
        modules = len(site.modules)
        entries = slice(site.entry_base, site.entry(0, max(1, site.num_experts)))
        num_entries = self.lora_rank.shape[2]
        if not 0 <= entries.start <= entries.stop <= num_entries:
            raise ValueError(
                f"site {site.name!r} has entries {entries.start}..{entries.stop - 1}, the slot table has "
                f"{num_entries} per layer; make it with the shape that the site belongs to"
            )
        ranks = self.lora_rank[:, :, entries].cpu().long()
        out = torch.tensor(site.out_features).repeat(ranks.shape[2] // modules)
        bad = (ranks < 0) | (ranks > MAX_LORA_RANK)
        for name, offsets, width in (
            ("a_offset", self.a_offset, torch.full_like(out, site.in_features)),
            ("b_offset", self.b_offset, out),
        ):
            start = offsets[:, :, entries].cpu()
            end = start + ranks * width * itemsize
            bad |= (ranks > 0) & ((start < 0) | (start % MATRIX_ALIGN_BYTES != 0) | (end > arena_bytes))
            if bad.any():
                index = tuple(bad.nonzero()[0].tolist())
                raise ValueError(
                    f"{name} {int(start[index])} with rank {int(ranks[index])} at slot {index[0]}, layer "
                    f"{index[1]}, entry {index[2]} of site {site.name!r} does not fit: offsets are multiples "
                    f"of {MATRIX_ALIGN_BYTES}, matrices end within the arena's {arena_bytes} bytes, ranks "
                    f"lie between 0 and {MAX_LORA_RANK}"
                )
        return int(ranks.max()) if ranks.numel() else 0

    def clear(self, slot: int) -> None:
        """Make `slot` mean "no delta anywhere"."""
        self.present[slot] = False
        self.lora_rank[slot].zero_()
        self.max_lora_ranks[slot] = ()


class LoraOperands(NamedTuple):
    """What the LoRA operations of one site work on.

    x: [T, H], or [T*K, H] at an expert site whose rows are already spread over the experts.
    ids: [T, K] int32 (output row t*K + k belongs to expert ids[t, k], -1 = none), None at a dense site.
    layer: row of the slot table.  token_slots: [T] int32 adapter slot of each token, -1 = none.
    arena: flat uint8 with the matrices, of x's dtype, that `slots` points at.
    """

    x: torch.Tensor
    ids: torch.Tensor | None
    site: Site
    layer: int
    token_slots: torch.Tensor
    slots: SlotTable
    arena: torch.Tensor


@dataclass(kw_only=True)
class StepTables:
    """One step's batch, all int32; operations want it on the arena's device.

    query_start: [S + 1] first row of each sequence; rows of a sequence are consecutive tokens.
    seq_lens: [S] tokens of the sequence including this step's rows; 0 marks a padding sequence.
    block_tables: [S, B] page of each block.
    decode: every sequence computes one token; kernels may launch otherwise then, but add in the same order.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    decode: bool = False

    def to(self, device: torch.device) -> StepTables:
        """The same tables with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


class AttentionOperands(NamedTuple):
    """What paged attention of one layer works on.

    q: [T, heads, head_dim], k and v: [T, kv heads, head_dim] in the layout's dtype (head h reads kv head
    h // (heads / kv heads)).  sinks: [heads] logits that join the softmax without a value (GPT-OSS), or None.
    window: each row sees its last `window` tokens, itself included; 0 = all.  arena: where K and V lie.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    window: int
    layer: int
    step: StepTables
    layout: KvLayout
    arena: torch.Tensor
