# SPDX-License-Identifier: Apache-2.0
"""vLLM's `fused_moe_lora` as a contestant of bench_lora_kernels: a `--peer-module`.

The file is vLLM's own and no part of this project: vllm/lora/ops/triton_ops/fused_moe_lora_op.py, as of its
commit 861b97765d6cd2587ba74e7787a89d9b8aa1c9d4, at .cache/vllm/fused_moe_lora_op.py of the working directory.
It runs unchanged, with stand-ins for its imports from the package.

vLLM's work of once per batch (sorting rows into blocks of an adapter and expert) or once per adapter (padding
to the largest rank, the scale folded into B) is not timed.  On a GPU the fastest of `WAYS` counts for each
case.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import click
import torch

from bench.gpu.run_log import cuda_us
from bench.kernels.lora_kernel_cases import Case
from bench.kernels.lora_kernel_peers import Call, NotApplicable, Phases
from bench.kernels.lora_kernel_runs import check

NAME = "vLLM fused_moe_lora"
SOURCE = Path(".cache/vllm/fused_moe_lora_op.py")
WAYS = (None, 16, 32, 64)
"""Rows of a block, of one adapter and expert; None: a row each, not sorted."""
MAX_LORA_RANK = 128
MAX_WEIGHT_BYTES = 24 << 30
_PACKAGE = "vllm.lora.ops.triton_ops"
_UNUSED = "called by none of these runs"


@cache
def load_op() -> Any:
    """vLLM's file as a module.  Raises ClickException for a missing file."""
    if not SOURCE.exists():
        raise click.ClickException(f"{SOURCE} is missing; put vLLM's file there, see bench/README.md")
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.fused_moe_lora_op", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, dict(_surroundings())):
        spec.loader.exec_module(module)
    return module


class _Platform:
    @staticmethod
    def num_compute_units(index: int | None) -> int:
        return 4 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _surroundings() -> Iterator[tuple[str, ModuleType]]:
    """Stand-ins for its imports."""
    import triton
    import triton.language as tl

    def register(**given: Any) -> None:
        raise AttributeError("no operators: the functions are called themselves")

    distributed = ("tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce")
    held: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": dict.fromkeys(distributed, _UNUSED),
        "vllm.platforms": {"current_platform": _Platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.triton_utils.allocation": {"set_triton_allocator": _UNUSED},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"direct_register_custom_op": register},
        "vllm.lora": {},
        "vllm.lora.ops": {},
        _PACKAGE: {},
        f"{_PACKAGE}.utils": dict.fromkeys(("supports_pdl", "supports_tma"), _UNUSED),
    }
    for name, attributes in held.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        yield name, module


def prepare(case: Case) -> Phases | Call:
    if not case.spec.shape.top_k:
        raise NotApplicable("fused_moe_lora is for experts")
    if case.max_lora_rank > MAX_LORA_RANK:
        raise NotApplicable(f"it takes ranks up to {MAX_LORA_RANK}")
    op, weights = load_op(), [stacked(case, copy) for copy in range(case.num_copies)]
    calls = [call for block in WAYS if _works(case, call := _call(op, case, weights, block))]
    if not calls:
        raise NotApplicable("none of its ways to group rows works here")
    if case.device.type != "cuda":
        return calls[0]

    def all_copies_us(call: Call) -> float:
        return cuda_us(lambda: [call(copy) for copy in range(case.num_copies)], 7)[0]

    return min(calls, key=all_copies_us)


def _works(case: Case, call: Call) -> bool:
    """True if the call adds the delta, within resources."""
    from triton.runtime.errors import OutOfResources

    try:
        check(case, {"delta": call})
    except (NotApplicable, OutOfResources) as reason:
        click.echo(f"  {NAME}, one of its ways is left out: {reason}")
        return False
    return True


Stacked = tuple[list[torch.Tensor], list[torch.Tensor]]


def stacked(case: Case, copy: int) -> Stacked:
    """By module A [adapters, experts, R, H] and scaled B [adapters, experts, N, R], in vLLM's layout.

    Untouched parts exist but are never read.  Raises NotApplicable without enough room.
    """
    site, size = case.site, (case.spec.num_adapters, case.site.num_experts)
    width = len(site.modules) * site.in_features + site.total_out_features
    num_bytes = size[0] * size[1] * case.max_lora_rank * width * case.spec.dtype.itemsize * case.num_copies
    if num_bytes > MAX_WEIGHT_BYTES:
        raise NotApplicable(f"would hold {num_bytes / 1e9:.0f} GB, all experts of all adapters")
    slot, expert = torch.tensor(case.pairs, device=case.device).T
    scale = torch.tensor(case.scale, device=case.device)[:, None, None]
    found: Stacked = ([], [])
    for a, b in case.padded[copy]:
        for matrices, values in zip(found, (a, (b * scale).to(b.dtype).transpose(1, 2)), strict=True):
            held = torch.empty(*size, *values.shape[1:], dtype=a.dtype, device=a.device)
            held[slot, expert] = values
            matrices.append(held)
    return found


def blocks_of(case: Case, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each adapter's rows by expert, padded to whole blocks with an unused number; the expert of each block,
    or -1; the length of each adapter's rows.
    """
    num_rows, order = len(case.order), case.order.tolist()
    rows: list[list[int]] = [[] for _ in range(case.spec.num_adapters)]
    experts: list[list[int]] = [[] for _ in rows]
    for (slot, expert), where in zip(case.pairs, case.segments, strict=True):
        found = order[where]
        num_blocks = -(-len(found) // block)
        rows[slot] += found + [num_rows] * (num_blocks * block - len(found))
        experts[slot] += [expert] * num_blocks
    lengths = [len(one) for one in rows]
    width = max(lengths)
    filled = [one + [num_rows] * (width - len(one)) for one in rows]
    blocks = [one + [-1] * (width // block - len(one)) for one in experts]
    as_given = (torch.tensor(one, dtype=torch.int32, device=case.device) for one in (filled, blocks, lengths))
    sorted_rows, block_experts, padded_lengths = as_given
    return sorted_rows, block_experts, padded_lengths


def _call(op: Any, case: Case, weights: list[Stacked], block: int | None) -> Call:
    top_k, num_rows, device = case.spec.shape.top_k, len(case.order), case.device
    assert case.ids is not None
    size = (num_rows // top_k, top_k)
    sorted_rows = lengths = None
    experts = case.ids.flatten()
    if block is not None:
        sorted_rows, experts, lengths = blocks_of(case, block)
    active = sorted({slot for slot, _ in case.pairs})
    lora_ids = torch.tensor(active, dtype=torch.int32, device=device)
    enabled = torch.ones(case.spec.num_adapters, dtype=torch.int32, device=device)
    routed = torch.ones(size, device=device)
    sizes = dict.fromkeys(("block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages"), 1)
    unread = {f"{phase}_{name}": value for phase in ("shrink", "expand") for name, value in sizes.items()}
    unread |= {"shrink_split_k": 1, "expand_split_k": 1}

    def delta(copy: int) -> None:
        a, b = weights[copy]
        op._fused_moe_lora(
            case.y[copy].view(*size, -1),
            case.x[copy],
            a,
            b,
            routed,
            sorted_rows,
            experts,
            lengths,
            case.token_slots,
            case.max_lora_rank,
            top_k,
            lora_ids,
            torch.tensor([len(active)]),
            enabled,
            shrink_block_size_m=block or 16,
            expand_block_size_m=block or 16,
            mul_routed_weight=len(case.x[0]) == num_rows,
            **unread,
        )

    return delta
