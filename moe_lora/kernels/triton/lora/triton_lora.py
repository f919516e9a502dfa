# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas on a GPU.  Legend: see `problem`.

Sums are in fp32, in an order by widths, rank and dtype alone, without atomics: a row's delta has the same
bits in any batch and phase.  Ranks 1..512 mix in one launch.  In fp16 the h of `wgmma` overflows for
x_row @ A.T above 65504.  Launches never wait for the device; for a CUDA graph, set `max_lora_rank` to a
bound over all replays.

algorithm, for "sgmv": `wgmma` (SGMV, tensor-core tiles) or `vector` (BGMV, sums by threads).
Source: Punica (arXiv 2310.18547), S-LoRA (arXiv 2311.03285), InfiniLoRA section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_lora.config import LORA_KERNELS
from moe_lora.core.shape import MAX_CUDA_LORA_RANK
from moe_lora.kernels.operands import LoraOperands
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import Choice, ConfigTable, matches

from . import steps
from .problem import Deltas, Problem, check_output, checked_problem
from .segments import Segments, rows_for

if TYPE_CHECKING:
    from moe_lora.core.shape import Site


ALGORITHMS = ("wgmma", "vector")


def choose(site: Site, dtype: str, table: ConfigTable) -> tuple[Choice, ...]:
    """The table's choices for a site.  Raises ValueError for overlaps or missing ranks."""
    wanted = (dtype, site.in_features, sum(site.out_features))
    found = [
        choice
        for choice in table.choices
        if matches((choice.dtype, choice.in_features, choice.out_features), wanted)
    ]
    most_specific = _first_group(found)
    covered = sorted((choice.min_rank, choice.max_rank) for choice in most_specific)
    bounds = [0, *(high for _, high in covered)]
    if bounds[-1] != MAX_CUDA_LORA_RANK or any(low != bounds[i] + 1 for i, (low, _) in enumerate(covered)):
        raise ValueError(
            f"choices of table {table.gpu!r} for site {site.name!r} in {dtype} cover ranks "
            f"{covered}; they must cover 1..{MAX_CUDA_LORA_RANK} without gap or overlap"
        )
    return most_specific


def _first_group(choices: list[Choice]) -> tuple[Choice, ...]:
    if not choices:
        return ()
    keys = [(choice.dtype, choice.in_features, choice.out_features) for choice in choices]
    return tuple(choice for choice, key in zip(choices, keys, strict=True) if key == keys[0])


def forced(algorithm: str) -> tuple[Choice, ...]:
    """All ranks by one algorithm.  Raises ValueError for an unknown name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    return (Choice(algorithm=algorithm),)


@dataclass(frozen=True)
class Shrunk:
    """h of each class of ranks, on the device."""

    problem: Problem
    kernel: str
    parts: tuple[tuple[Choice, torch.Tensor], ...]


def lora_shrink(
    operands: LoraOperands,
    *,
    kernel: str = "sgmv",
    decode: bool,
    segments: Segments | None = None,
    algorithm: str | None = None,
    max_lora_rank: int | None = None,
    batch_rank: int | None = None,
) -> Shrunk:
    """h = x_row @ A.T for each row with an adapter and each module.

    x: bf16, fp16 or fp32, rows contiguous (row stride free).  segments: `rows_for` of the same rows.
    batch_rank: width of workspaces, and the padded rank of "bgmv" (default: read from the device, with a
    wait).  Raises ValueError for bad operands.
    """
    problem = _problem(operands, kernel, decode, segments, max_lora_rank, batch_rank)
    return _shrunk(problem, kernel, _choices(problem, kernel, algorithm))


def lora_expand(shrunk: Shrunk, y: torch.Tensor, *, subtract: bool = False) -> None:
    """y[row, columns of module] = round(y + round(scale * h @ B.T)) for each row with an adapter.

    subtract: y - round(..).  y: [R, C] in x's dtype, rows contiguous (row stride free); may be wider than the
    site.  In fp32 the delta stays unrounded.  Raises ValueError for a bad y.
    """
    check_output(y, shrunk.problem, "y", or_fp32=True)
    _expand(shrunk, y, add=True, subtract=subtract)


def deltas_of(shrunk: Shrunk) -> Deltas | None:
    """The deltas, for `experts.linear` to add with equal bits.

    None in fp32: scale and addition may fuse in one kernel only.
    """
    problem = shrunk.problem
    if problem.x.dtype == torch.float32:
        return None
    values = problem.x.new_empty(problem.num_rows, sum(problem.site.out_features))
    _expand(shrunk, values, add=False)
    return Deltas(values, problem.token_slots, problem.slots.lora_rank, *problem.entry_strides)


def lora_delta(
    operands: LoraOperands,
    out: torch.Tensor,
    *,
    kernel: str = "sgmv",
    decode: bool,
    segments: Segments | None = None,
    algorithm: str | None = None,
    max_lora_rank: int | None = None,
    batch_rank: int | None = None,
) -> None:
    """out = delta of each row, zero without an adapter."""
    problem = _problem(operands, kernel, decode, segments, max_lora_rank, batch_rank)
    check_output(out, problem, "out")
    out.zero_()
    _expand(_shrunk(problem, kernel, _choices(problem, kernel, algorithm)), out, add=False)


def _problem(
    operands: LoraOperands,
    kernel: str,
    decode: bool,
    segments: Segments | None,
    max_lora_rank: int | None,
    batch_rank: int | None,
) -> Problem:
    if kernel not in LORA_KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(LORA_KERNELS)}")
    if segments is None:
        segments = rows_for(operands, kernel)
    elif segments.is_sorted != (kernel == "sgmv"):
        order = "sorted" if segments.is_sorted else "unsorted"
        raise ValueError(f"segments are {order}, kernel={kernel!r} takes others; make them by rows_for")
    problem = checked_problem(
        operands, decode=decode, rows=segments, max_lora_rank=max_lora_rank, batch_rank=batch_rank
    )
    if kernel != "bgmv":
        return problem
    return replace(problem, padded_rank=problem.batch_rank() if batch_rank is None else batch_rank)


def _choices(problem: Problem, kernel: str, algorithm: str | None) -> tuple[Choice, ...]:
    if kernel != "sgmv":
        if algorithm is not None:
            raise ValueError(
                f"kernel={kernel!r} is a baseline and takes no algorithm; {algorithm!r} was given"
            )
        return forced("vector")
    if algorithm is not None:
        choices = forced(algorithm)
    else:
        dtype, table = configs.DTYPE_NAMES[problem.x.dtype], configs.table_of(problem.x.device)
        choices = choose(problem.site, dtype, table)
    possible = tuple(choice for choice in choices if choice.min_rank <= problem.max_lora_rank)
    for choice in possible:
        steps.check_choice(problem, choice)
    return possible


def _shrunk(problem: Problem, kernel: str, choices: tuple[Choice, ...]) -> Shrunk:
    parts: list[tuple[Choice, torch.Tensor]] = []
    has_rows = problem.num_rows > 0 and problem.max_lora_rank > 0
    for choice in choices if has_rows else ():
        if choice.algorithm != "wgmma":
            parts.append((choice, steps.vector_shrink(problem, choice, kernel)))
        else:
            parts.append((choice, steps.wgmma_shrink(problem, choice)))
    return Shrunk(problem, kernel, tuple(parts))


def _expand(shrunk: Shrunk, y: torch.Tensor, add: bool, subtract: bool = False) -> None:
    for choice, h in shrunk.parts:
        if choice.algorithm == "wgmma":
            steps.wgmma_expand(shrunk.problem, choice, h, y, add, subtract)
        else:
            steps.vector_expand(shrunk.problem, choice, shrunk.kernel, h, y, add, subtract)
