"""Operands and torch peers of bench_cpu_kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from moe_lora.core.shape import Site
from moe_lora.kernels import reference
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.operands import LoraOperands, SlotTable

HIDDEN, INNER, EXPERTS, TOP_K = 1024, 1792, 8, 2
EIGHT_ADAPTERS = (8, 16, 32, 64, 8, 16, 32, 64)
MIXED_RANKS = (8, 16, 32, 64, 128)
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
    """One measured call: `bytes` that it must move at least, `flops`, and ways to run it on cold weights.

    fp32_flops: those that need fp32 whatever the dtype (expand multiplies what shrink left in fp32).
    contestants: name -> call on the weights of a copy; the first one is ours.
    """

    config: dict[str, object]
    bytes: int
    flops: int
    contestants: dict[str, Callable[[int], object]]
    check: Callable[[], float]
    copies: int
    fp32_flops: int = 0


def linear_case(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """A gate-and-up sized dense layer; peer: F.linear."""
    size = 2 * INNER * HIDDEN * dtype.itemsize
    copies = _copies(size, rows)
    weights = [torch.randn(2 * INNER, HIDDEN, generator=generator).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    exact = x[:64].double() @ weights[0].double().T
    return Case(
        {"op": "linear", "rows": rows, "dtype": str(dtype), "shape": [2 * INNER, HIDDEN]},
        size + rows * (HIDDEN + 2 * INNER) * dtype.itemsize,
        2 * rows * 2 * INNER * HIDDEN,
        {"own": lambda i: cpu.linear(x, weights[i], None), "F.linear": lambda i: F.linear(x, weights[i])},
        lambda: _error(cpu.linear(x, weights[0], None)[:64], exact),
        copies,
    )


def expert_case(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Gate and up of the experts that a batch chose; peer: index_select and F.linear per expert."""
    size = EXPERTS * 2 * INNER * HIDDEN * dtype.itemsize
    copies = _copies(size, rows)
    weights = [torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator).to(dtype) for _ in range(copies)]
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = _choices(rows, generator)
    touched = int(ids.unique().numel())
    exact = reference.expert_linear(x[:16].double(), weights[0].double(), None, ids[:16])
    return Case(
        {"op": "expert_linear", "rows": rows, "dtype": str(dtype), "shape": [EXPERTS, 2 * INNER, HIDDEN],
         "top_k": TOP_K, "experts_touched": touched},
        size * touched // EXPERTS + rows * (HIDDEN + TOP_K * 2 * INNER) * dtype.itemsize,
        2 * rows * TOP_K * 2 * INNER * HIDDEN,
        {"own": lambda i: cpu.expert_linear(x, weights[i], None, ids),
         "F.linear per expert": lambda i: reference.expert_linear(x, weights[i], None, ids)},
        lambda: _error(cpu.expert_linear(x, weights[0], None, ids)[: 16 * TOP_K], exact),
        copies,
    )  # fmt: skip


def lora_case(
    site: Site, rows: int, dtype: torch.dtype, generator: torch.Generator, *, lora_ranks: tuple[int, ...]
) -> Case:
    """Shrink and expand, row i with adapter i mod len(lora_ranks); peers: the baselines, and mm per adapter.

    `bytes` are those of each distinct matrix once, of x, and of y read and written.
    """
    lora_ranks = lora_ranks[:rows]
    per_rank = len(site.modules) * HIDDEN + site.total_out_features
    token_slots = (torch.arange(rows) % len(lora_ranks)).int()
    ids = _choices(rows, generator) if site.num_experts else None
    num_rows = rows * (TOP_K if site.num_experts else 1)
    used = {
        (int(token_slots[t]), e) for t in range(rows) for e in (ids[t].tolist() if ids is not None else [0])
    }
    matrix_bytes = sum(lora_ranks[slot] for slot, _ in used) * per_rank * dtype.itemsize
    copies = _copies(matrix_bytes, rows)
    slots, arena = _adapters(site, copies, dtype, generator, lora_ranks)
    row_ranks = [lora_ranks[i // (num_rows // rows) % len(lora_ranks)] for i in range(num_rows)]
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    y = torch.zeros(num_rows, site.total_out_features, dtype=dtype)

    def run(kernel: str, i: int, target: torch.Tensor = y) -> torch.Tensor:
        shrunk = cpu.lora_shrink(LoraOperands(x, ids, site, i, token_slots, slots, arena), kernel=kernel)
        cpu.lora_expand(shrunk, target)
        return target

    exact = reference.lora_delta(LoraOperands(x, ids, site, 0, token_slots, slots, arena)).double()
    return Case(
        {"op": "lora", "site": site.name, "rows": rows, "dtype": str(dtype), "lora_ranks": lora_ranks,
         "segments": len(used), "sum_of_ranks": sum(row_ranks), "rows_x_max_rank": num_rows * max(row_ranks)},
        matrix_bytes + x.nbytes + 2 * y.nbytes,
        2 * len(site.modules) * HIDDEN * sum(row_ranks),
        {"own": partial(run, "sgmv"), "bgmv": partial(run, "bgmv"), "mbgmv": partial(run, "mbgmv"),
         "mm loop": _mm_loop(x, ids, site, token_slots, slots, arena, y, lora_ranks)},
        lambda: _error(run("sgmv", 0, torch.zeros_like(y)), exact),
        copies,
        fp32_flops=2 * site.total_out_features * sum(row_ranks),
    )  # fmt: skip


def _copies(num_bytes: int, rows: int) -> int:
    """Copies of the weights that no cache holds together; a long prefill displaces them by itself."""
    return 2 if rows >= 512 else max(2, COLD_BYTES // num_bytes)


def _mm_loop(x, ids, site, token_slots, slots, arena, y, lora_ranks):
    """The LoRA of a step by torch: rows of each (adapter, expert) gathered, mm, mm, scattered."""
    flat = torch.zeros(len(token_slots), dtype=torch.int32) if ids is None else ids.flatten()
    slot_of = token_slots if ids is None else token_slots.repeat_interleave(ids.shape[1])
    source = torch.arange(len(token_slots)) if ids is None else reference.input_rows(x, ids)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(slot_of.tolist(), flat.tolist(), strict=True)):
        groups.setdefault(key, []).append(row)
    rows_of = {key: torch.tensor(rows) for key, rows in groups.items()}
    a_offset, b_offset = slots.a_offset.numpy(), slots.b_offset.numpy()

    def run(layer: int) -> None:
        for (slot, expert), rows in rows_of.items():
            segment = x.index_select(0, source[rows])
            for module, (column, width) in enumerate(zip(site.columns, site.out_features, strict=True)):
                entry = site.entry(module, expert)
                lora_rank, at = lora_ranks[slot], (slot, layer, entry)
                a = reference.arena_rows(arena, a_offset[at], lora_rank, HIDDEN, x.dtype)
                b = reference.arena_rows(arena, b_offset[at], lora_rank, width, x.dtype)
                y[:, column : column + width].index_add_(0, rows, torch.mm(torch.mm(segment, a.T), b))

    return run


def _adapters(
    site: Site, layers: int, dtype: torch.dtype, generator: torch.Generator, lora_ranks: tuple[int, ...]
) -> tuple[SlotTable, torch.Tensor]:
    """An adapter of each rank over `layers` layers (each a cold copy), packed."""
    slots = SlotTable(len(lora_ranks), layers, site.num_entries, torch.device("cpu"))
    offset = 0
    for slot, lora_rank in enumerate(lora_ranks):
        for layer in range(layers):
            for expert in range(max(1, site.num_experts)):
                for module, width in enumerate(site.out_features):
                    index = (slot, layer, site.entry(module, expert))
                    slots.a_offset[index] = offset
                    slots.b_offset[index] = offset + lora_rank * HIDDEN * dtype.itemsize
                    offset += lora_rank * (HIDDEN + width) * dtype.itemsize
    slots.lora_rank[:] = torch.tensor(lora_ranks, dtype=torch.int32)[:, None, None]
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
