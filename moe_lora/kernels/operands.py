# SPDX-License-Identifier: Apache-2.0
"""Layouts of pages, and tables of a step; never in a compiled graph (see `ops`).

Legend: T token rows, S sequences, B blocks per sequence, L layers, N slots, X offset-table entries per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES, RANK_LIMITS

if TYPE_CHECKING:
    from moe_lora.core.attention_shapes import GlobalHeads
    from moe_lora.core.shape import ModelShape, Site


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Layout of K and V: a page holds `block_size` tokens of every layer.

    Byte address of K: page * page_bytes + layer * layer_bytes + (head * block_size + token) * head_dim *
    itemsize; V follows after value_bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    has_values: bool = True
    """False: K is V too."""
    least_bytes: int = 0
    """Of a page, for layers of another layout behind these."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block's K and V in a layer."""
        num_parts = 1 + self.has_values
        return num_parts * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes from K to V."""
        return self.layer_bytes // 2 if self.has_values else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, rounded up to 64."""
        return -(-max(self.num_layers * self.layer_bytes, self.least_bytes) // 64) * 64


def kv_layout(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KvLayout:
    """Layout of a model's KV; with heads of two sizes, of the layers with a window."""
    layout = KvLayout(
        num_layers=max(1, shape.num_kv_layers),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=dtype,
        has_values=shape.mla is None,
    )
    return layout if shape.global_heads is None else with_full_layers(layout, shape.global_heads)[0]


def with_full_layers(layout: KvLayout, sizes: GlobalHeads) -> tuple[KvLayout, KvLayout]:
    """Layouts of the layers with a window, and of the full layers in the same pages.

    layout: of all layers, with heads of the first kind.  Full layers are numbered from the first multiple of
    their size behind the rest.
    """
    first = replace(layout, num_layers=layout.num_layers - len(sizes.layers))
    full = replace(layout, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim)
    end = -(-first.num_layers * first.layer_bytes // full.layer_bytes) + len(sizes.layers)
    return replace(first, least_bytes=end * full.layer_bytes), replace(full, num_layers=end)


class SlotTable:
    """Offsets and ranks of resident adapters' matrices in the arena.

    Tensors are on the arena's device, and never read back.  A: `lora_rank` rows of d_in; B, transposed:
    `lora_rank` rows of d_out.
    """

    def __init__(self, num_slots: int, num_layers: int, num_entries: int, device: torch.device) -> None:
        shape = (num_slots, num_layers, num_entries)
        self.a_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        """[N, L, X] bytes from the arena's start, like b_offset."""
        self.b_offset = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lora_rank = torch.zeros(shape, dtype=torch.int32, device=device)
        """[N, L, X]; 0: no delta."""
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.ranks = np.zeros((num_slots, num_entries), dtype=np.int32)
        """[N, X]: largest over the layers, loads in progress included."""
        self.end_bytes = 0
        self.present = np.zeros((num_slots, num_layers), dtype=bool)
        """[N, L]: loaded layers, set by the copier."""

    @property
    def num_slots(self) -> int:
        return self.lora_rank.shape[0]

    def grown(self, num_slots: int) -> SlotTable:
        """A copy with further, empty slots."""
        _, num_layers, num_entries = self.lora_rank.shape
        table = SlotTable(num_slots, num_layers, num_entries, self.lora_rank.device)
        for name in ("a_offset", "b_offset", "lora_rank", "scale"):
            getattr(table, name)[: self.num_slots].copy_(getattr(self, name))
        table.ranks[: self.num_slots] = self.ranks
        table.end_bytes = self.end_bytes
        table.present[: self.num_slots] = self.present
        return table

    def write_layer(
        self, slot: int, layer: int, table: torch.Tensor, scale: torch.Tensor, itemsize: int, where: range
    ) -> None:
        """Point the slot's entries of a layer at matrices in these bytes of the arena.

        table: [X, 3] int64 on the host: offsets of A and B in elements from the first byte, and rank.  scale:
        [X] fp32.  Entries beyond X stay.  The matrices must be loaded: ranks are written last, and rank 0
        hides the rest.  Raises ValueError for impossible offsets and ranks.
        """
        starts = table[:, :2] * itemsize + where.start
        ranks = table[:, 2].numpy()
        used = starts.numpy()[ranks > 0]
        # A matrix has at least as many elements as rows.
        ends = used + ranks[ranks > 0, None] * itemsize
        if (used % MATRIX_ALIGN_BYTES).any() or (used < where.start).any() or (ends > where.stop).any():
            raise ValueError(
                f"matrices of slot {slot}, layer {layer} begin at bytes {used.min()} to {used.max()}; they "
                f"must lie in {where.start}..{where.stop} and begin at multiples of {MATRIX_ALIGN_BYTES}"
            )
        limit = RANK_LIMITS.get(self.lora_rank.device.type)
        if (ranks < 0).any() or (limit is not None and (ranks > limit).any()):
            raise ValueError(
                f"slot {slot}, layer {layer} has ranks {ranks.min()}..{ranks.max()}; this device computes "
                f"ranks from 0 to {'any' if limit is None else limit}"
            )
        num = len(ranks)
        np.maximum(self.ranks[slot, :num], ranks, out=self.ranks[slot, :num])
        self.end_bytes = max(self.end_bytes, where.stop)
        self.a_offset[slot, layer, :num].copy_(starts[:, 0])
        self.b_offset[slot, layer, :num].copy_(starts[:, 1])
        self.scale[slot, layer, :num].copy_(scale)
        self.lora_rank[slot, layer, :num].copy_(table[:, 2])

    def largest_rank(self, site: Site) -> int:
        """Largest rank at the site.  Raises ValueError for a site outside the table."""
        first, end = site.entry_base, site.entry(0, max(1, site.num_experts))
        if not 0 <= first <= end <= self.ranks.shape[1]:
            raise ValueError(
                f"site {site.name!r} has entries {first}..{end - 1}, the slot table has "
                f"{self.ranks.shape[1]} per layer; make it with the shape that the site belongs to"
            )
        return int(self.ranks[:, first:end].max(initial=0))

    def site_ranks(self, slots: np.ndarray, sites: Sequence[Site]) -> list[int]:
        """Largest rank over these slots (-1: none) at each site."""
        ranks = self.ranks[sorted(set(slots.tolist()) - {-1})].max(0, initial=0)
        return [int(ranks[s.entry_base : s.entry_base + s.num_entries].max(initial=0)) for s in sites]

    def clear(self, slot: int) -> None:
        """Remove all deltas of `slot`."""
        self.present[slot] = False
        self.lora_rank[slot].zero_()
        self.ranks[slot] = 0


class LoraOperands(NamedTuple):
    """Operands of LoRA operations at a site."""

    x: torch.Tensor
    """[T, H], or [T*K, H] with a row per expert."""
    ids: torch.Tensor | None
    """[T, K] int32, -1: no expert; None at a dense site.  Output row t*K + k belongs to ids[t, k]."""
    site: Site
    layer: int
    """Row of the slot table."""
    token_slots: torch.Tensor
    """[T] int32, -1: no adapter."""
    slots: SlotTable
    arena: torch.Tensor
    """Flat uint8, with matrices of x's dtype."""


class StepBounds(NamedTuple):
    """Bounds of a step's lengths, on the host."""

    has_single: bool
    """Some sequence has one row."""
    has_several: bool
    """Some sequence has more rows."""
    longest_single: int
    """Most tokens of a sequence with one row."""
    single_tokens: int | None = None
    """Most tokens of these together; None: longest_single each."""

    @classmethod
    def of(cls, query_start: torch.Tensor, seq_lens: torch.Tensor) -> StepBounds:
        """Bounds of host lengths.  Raises TypeError for lengths on a device."""
        num_rows, lens = np.diff(query_start.numpy()), seq_lens.numpy()
        single = num_rows == 1
        longest, tokens = int(lens[single].max(initial=0)), int(lens[single].sum())
        return cls(bool(single.any()), bool((num_rows > 1).any()), longest, tokens)


@dataclass(kw_only=True)
class StepTables:
    """A step's batch, int32, on the arena's device for operations."""

    query_start: torch.Tensor
    """[S + 1]: first row of each sequence."""
    seq_lens: torch.Tensor
    """[S]: tokens with this step's rows; 0: a padding sequence."""
    block_tables: torch.Tensor
    """[S, B]: pages."""
    decode: bool = False
    """One token per sequence.  Launches may differ, the order of sums may not."""
    bounds: StepBounds | None = None
    """Of lengths on a device."""

    def to(self, device: torch.device) -> StepTables:
        """These host tables on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, bounds=StepBounds.of(self.query_start, self.seq_lens), **moved)


class Rotation(NamedTuple):
    """Changes of q and k before attention: clamp, RMS norm over head_dim, rotation (v: clamp only)."""

    cos: torch.Tensor
    """[T, R / 2] fp32, like sin; the first R of head_dim are rotated."""
    sin: torch.Tensor
    q_weight: torch.Tensor | None
    """[head_dim] of the RMS norm; None: no norm."""
    k_weight: torch.Tensor | None
    eps: float
    clip: float | None
    """Largest absolute value; None: no clamp."""
    head_dim: int = 0
    """0: R."""
    neighbours: bool = False
    """Pairs are (2 i, 2 i + 1), else (i, i + R / 2)."""


class AttentionOperands(NamedTuple):
    """Operands of paged attention of a layer."""

    q: torch.Tensor
    """[T, heads, head_dim] in the layout's dtype; head h reads kv head h // (heads / kv heads)."""
    k: torch.Tensor
    """[T, kv heads, head_dim], like v."""
    v: torch.Tensor
    sinks: torch.Tensor | None
    """[heads] logits without a value in the softmax (GPT-OSS)."""
    scale: float
    window: int
    """Each row sees the last `window` tokens; 0: all."""
    layer: int
    step: StepTables
    layout: KvLayout
    arena: torch.Tensor


_ZEROS, _LINE = 1 << 16, 32


class Zeros:
    """Zero integers: one fill serves many launches.

    For one stream, and for replays of a graph captured meanwhile.
    """

    def __init__(self) -> None:
        self._left: torch.Tensor | None = None

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """[count] unshared int32 zeros, aligned to a cache line."""
        if self._left is None or self._left.numel() < count:
            self._left = torch.zeros(max(count, _ZEROS), dtype=torch.int32, device=device)
        taken = self._left[:count]
        self._left = self._left[-(-count // _LINE) * _LINE :]
        return taken
