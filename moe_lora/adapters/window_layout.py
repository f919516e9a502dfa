"""A packed adapter in one piece of memory that other processes read, and what stands for it elsewhere.

First the tables of all layers, then their scales, then each layer's data; every part starts at a multiple of
64 bytes.  The facts of the adapter say where everything lies, so the memory itself has no header.

Legend: L layers, X entries of a layer's table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES

from .facts import AdapterFacts
from .packed import PackedAdapter, PackedLayer, content_hash

_TABLE, _SCALE = torch.int64, torch.float32


@dataclass(frozen=True)
class WindowLayout:
    """Byte offsets.  scales: where they start; tables start at 0.  head_bytes: tables and scales.  data: of
    each layer (start, length)."""

    scales: int
    head_bytes: int
    data: tuple[tuple[int, int], ...]
    num_bytes: int


def facts_of(packed: PackedAdapter) -> AdapterFacts:
    """What others have to know of an adapter."""
    first = packed.layers[0]
    return AdapterFacts(
        name=packed.name,
        content_hash=packed.content_hash,
        max_lora_rank=packed.max_lora_rank,
        nbytes=packed.nbytes,
        targets=packed.targets,
        dtype=str(first.data.dtype).removeprefix("torch."),
        num_entries=first.table.shape[0],
        layer_elements=tuple(layer.data.numel() for layer in packed.layers),
    )


def layout_of(facts: AdapterFacts) -> WindowLayout:
    """Where an adapter's parts lie."""
    num_layers, itemsize = len(facts.layer_elements), getattr(torch, facts.dtype).itemsize
    scales = _up(num_layers * facts.num_entries * 3 * _TABLE.itemsize)
    end = head_bytes = scales + _up(num_layers * facts.num_entries * _SCALE.itemsize)
    data = []
    for num_elements in facts.layer_elements:
        data.append((end, num_elements * itemsize))
        end = _up(end + num_elements * itemsize)
    return WindowLayout(scales, head_bytes, tuple(data), end)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // MATRIX_ALIGN_BYTES) * MATRIX_ALIGN_BYTES


def write_adapter(packed: PackedAdapter, memory: torch.Tensor) -> None:
    """Copy an adapter into `memory`, uint8 [layout.num_bytes]."""
    there = adapter_in(facts_of(packed), memory)
    for layer, place in zip(packed.layers, there.layers, strict=True):
        place.data.copy_(layer.data)
        place.table.copy_(layer.table)
        place.scale.copy_(layer.scale)


def adapter_in(facts: AdapterFacts, memory: torch.Tensor) -> PackedAdapter:
    """The adapter that lies in `memory`, uint8 [layout.num_bytes]; no copy."""
    layout = layout_of(facts)
    tables, scales = _head(facts, memory[: layout.head_bytes])
    dtype = getattr(torch, facts.dtype)
    data = [memory[start : start + length].view(dtype) for start, length in layout.data]
    return _adapter(facts, data, tables, scales)


def adapter_without_data(facts: AdapterFacts, head: torch.Tensor | None = None) -> PackedAdapter:
    """What stands for an adapter where its data is not: tensors of the right sizes on the device "meta".

    head: uint8 [layout.head_bytes], tables and scales; None: they are not here either.
    """
    if head is None:
        shape = (len(facts.layer_elements), facts.num_entries)
        tables = torch.empty(*shape, 3, dtype=_TABLE, device="meta")
        scales = torch.empty(shape, dtype=_SCALE, device="meta")
    else:
        tables, scales = _head(facts, head)
    # Layers of one size share a tensor: there may be many adapters, and nothing is behind it.
    dtype = getattr(torch, facts.dtype)
    empty = {size: torch.empty(size, dtype=dtype, device="meta") for size in set(facts.layer_elements)}
    return _adapter(facts, [empty[size] for size in facts.layer_elements], tables, scales)


def has_data(packed: PackedAdapter) -> bool:
    """Whether its bytes are here."""
    return not packed.layers[0].data.is_meta


def without_data(packed: PackedAdapter) -> PackedAdapter:
    """The same adapter without the data; tables and scales are copied."""
    bare = adapter_without_data(facts_of(packed))
    layers = [
        replace(empty, table=layer.table.clone(), scale=layer.scale.clone())
        for empty, layer in zip(bare.layers, packed.layers, strict=True)
    ]
    return replace(bare, layers=tuple(layers))


def is_intact(packed: PackedAdapter) -> bool:
    """Whether the bytes are those that the adapter's hash was made of."""
    return content_hash(packed.layers) == packed.content_hash


def _head(facts: AdapterFacts, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, X, 3] and [L, X] views."""
    num_layers, num_entries = len(facts.layer_elements), facts.num_entries
    scales_start = layout_of(facts).scales
    tables = head[: num_layers * num_entries * 3 * _TABLE.itemsize].view(_TABLE)
    scales = head[scales_start : scales_start + num_layers * num_entries * _SCALE.itemsize].view(_SCALE)
    return tables.view(num_layers, num_entries, 3), scales.view(num_layers, num_entries)


def _adapter(
    facts: AdapterFacts, data: list[torch.Tensor], tables: torch.Tensor, scales: torch.Tensor
) -> PackedAdapter:
    return PackedAdapter(
        name=facts.name,
        layers=tuple(
            PackedLayer(data=one, table=table, scale=scale)
            for one, table, scale in zip(data, tables, scales, strict=True)
        ),
        max_lora_rank=facts.max_lora_rank,
        nbytes=facts.nbytes,
        content_hash=facts.content_hash,
        targets=facts.targets,
    )
