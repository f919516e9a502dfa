"""Operands and torch peers of bench_cpu_kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_lora.core.shape import Site
from moe_lora.kernels import cpu, reference
from moe_lora.kernels.step import SlotTable

HIDDEN, INNER, EXPERTS, TOP_K = 1024, 1792, 8, 2
RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
COLD_BYTES = 160 << 20


def _site(name: str, modules: tuple[str, ...], out_features: tuple[int, ...], num_experts: int) -> Site:
    return Site(
        name=name,
        modules=modules,
        in_features=HIDDEN,
        out_features=out_features,
        num_experts=num_experts,
        entry_base=0,
    )


SITES = {
    "qkv": _site("qkv", ("q", "k", "v"), (HIDDEN, 512, 512), 0),
    "gate_up": _site("gate_up", ("gate", "up"), (INNER, INNER), EXPERTS),
}


@dataclass
class Case:
    """One measured call: `bytes` of weights from memory, `flops`, and calls that run it on cold weights."""

    config: dict[str, object]
    bytes: int
    flops: int
    own: Callable[[int], object]
    peer: Callable[[int], object]
    check: Callable[[], float]
    copies: int


def linear_case(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """A gate-and-up sized dense layer; peer: F.linear."""
    size = 2 * INNER * HIDDEN * dtype.itemsize
    copies = max(2, COLD_BYTES // size)
    weights = [torch.randn(2 * INNER, HIDDEN, generator=generator).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    exact = x.double() @ weights[0].double().T
    return Case(
        {"op": "linear", "rows": rows, "dtype": str(dtype), "shape": [2 * INNER, HIDDEN], "peer": "F.linear"},
        size,
        2 * rows * 2 * INNER * HIDDEN,
        lambda i: cpu.linear(x, weights[i], None),
        lambda i: F.linear(x, weights[i]),
        lambda: _error(cpu.linear(x, weights[0], None), exact),
        copies,
    )


def expert_case(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Gate and up of the experts that a batch chose; peer: index_select and F.linear per expert."""
    size = EXPERTS * 2 * INNER * HIDDEN * dtype.itemsize
    copies = max(2, COLD_BYTES // size)
    weights = [torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = _choices(rows, generator)
    touched = int(ids.unique().numel())
    exact = reference.expert_linear(x.double(), weights[0].double(), None, ids)
    return Case(
        {"op": "expert_linear", "rows": rows, "dtype": str(dtype), "shape": [EXPERTS, 2 * INNER, HIDDEN],
         "top_k": TOP_K, "experts_touched": touched, "peer": "F.linear per expert"},
        size * touched // EXPERTS,
        2 * rows * TOP_K * 2 * INNER * HIDDEN,
        lambda i: cpu.expert_linear(x, weights[i], None, ids),
        lambda i: reference.expert_linear(x, weights[i], None, ids),
        lambda: _error(cpu.expert_linear(x, weights[0], None, ids), exact),
        copies,
    )  # fmt: skip


def lora_case(site: Site, rows: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Shrink and expand over 8 adapters of mixed ranks; peer: two mm per adapter, expert and module."""
    experts = max(1, site.num_experts)
    floats = sum(r * experts * (len(site.modules) * HIDDEN + sum(site.out_features)) for r in RANKS)
    copies = max(2, COLD_BYTES // (floats * dtype.itemsize))
    slots, arena = _adapters(site, copies, dtype, generator)
    row_slot = (torch.arange(rows) % len(RANKS)).int()
    ids = _choices(rows, generator) if site.num_experts else None
    num_rows = rows * (TOP_K if site.num_experts else 1)
    used = {(int(row_slot[t]), e) for t in range(rows) for e in (ids[t].tolist() if ids is not None else [0])}
    rank_rows = sum(RANKS[slot] for slot, _ in used)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    y = torch.zeros(num_rows, sum(site.out_features), dtype=dtype)
    workspace = torch.empty(cpu.lora_workspace_floats(num_rows, site, max(RANKS)))

    def own(i: int, target: torch.Tensor = y) -> torch.Tensor:
        args = (ids, site, i, row_slot, slots, arena)
        cpu.lora_shrink(x, *args, workspace)
        cpu.lora_expand(workspace, *args, target)
        return target

    exact = reference.lora_delta(x, ids, site, 0, row_slot, slots, arena).double()
    per_rank = len(site.modules) * HIDDEN + sum(site.out_features)
    return Case(
        {"op": "lora", "site": site.name, "rows": rows, "dtype": str(dtype), "lora_ranks": RANKS,
         "segments": len(used), "peer": "mm per adapter, expert and module"},
        rank_rows * per_rank * dtype.itemsize,
        2 * per_rank * num_rows * sum(RANKS) // len(RANKS),
        own,
        _mm_loop(x, ids, site, row_slot, slots, arena, y),
        lambda: _error(own(0, torch.zeros_like(y)), exact),
        copies,
    )  # fmt: skip


def _mm_loop(x, ids, site, row_slot, slots, arena, y):  # type: ignore[no-untyped-def]
    """The LoRA of a step by torch: rows of each (adapter, expert) gathered, mm, mm, scattered."""
    flat = torch.zeros(len(row_slot), dtype=torch.int32) if ids is None else ids.flatten()
    slot_of = row_slot if ids is None else row_slot.repeat_interleave(ids.shape[1])
    source = torch.arange(len(row_slot)) if ids is None else reference.input_rows(x, ids)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(slot_of.tolist(), flat.tolist(), strict=True)):
        groups.setdefault(key, []).append(row)
    rows_of = {key: torch.tensor(rows) for key, rows in groups.items()}
    a_offset, b_offset = slots.a_offset.tolist(), slots.b_offset.tolist()

    def run(layer: int) -> None:
        for (slot, expert), rows in rows_of.items():
            segment = x.index_select(0, source[rows])
            for module, (column, width) in enumerate(zip(site.columns, site.out_features, strict=True)):
                entry = site.entry(module, expert)
                a = reference.arena_rows(arena, a_offset[slot][layer][entry], RANKS[slot], HIDDEN, x.dtype)
                b = reference.arena_rows(arena, b_offset[slot][layer][entry], RANKS[slot], width, x.dtype)
                y[:, column : column + width].index_add_(0, rows, torch.mm(torch.mm(segment, a.T), b))

    return run


def _adapters(
    site: Site, layers: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[SlotTable, torch.Tensor]:
    """All adapters of RANKS over `layers` layers (each a cold copy), packed."""
    slots = SlotTable(len(RANKS), layers, site.num_entries, torch.device("cpu"))
    offset = 0
    for slot, lora_rank in enumerate(RANKS):
        for layer in range(layers):
            for expert in range(max(1, site.num_experts)):
                for module, width in enumerate(site.out_features):
                    index = (slot, layer, site.entry(module, expert))
                    slots.a_offset[index] = offset
                    slots.b_offset[index] = offset + lora_rank * HIDDEN * dtype.itemsize
                    offset += lora_rank * (HIDDEN + width) * dtype.itemsize
    slots.lora_rank[:] = torch.tensor(RANKS, dtype=torch.int32)[:, None, None]
    slots.scale[:] = 1.0
    values = torch.randn(offset // dtype.itemsize, generator=generator).mul_(0.03).to(dtype)
    return slots, values.view(torch.uint8)


def _choices(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)]).int()


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error relative to the largest value; refuses to measure what is wrong."""
    error = float((actual.double() - exact).abs().max() / exact.abs().max())
    if error > (1e-2 if actual.dtype == torch.bfloat16 else 1e-5):
        raise AssertionError(f"relative error {error}")
    return error
