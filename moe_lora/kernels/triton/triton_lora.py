"""LoRA deltas on a GPU: shrink, expand, and both at once.

Legend: T tokens, K experts per token, R rows (T, or T*K at an expert site), H input width, C output columns.

    lora_shrink  h = x_row @ A.T            for the adapter of each row (and its expert)
    lora_expand  y = round(y + delta)       delta = round(scale * h @ B.T), in the model's dtype
    lora_delta   out = delta                zero where there is none

Sums are in fp32, in an order that depends on widths, rank and dtype alone, without atomics: a row's delta
is the same bits whatever else is in the batch, in decode and in prefill.  Mixed ranks 1..512 go in one
launch; nothing is padded in memory.  In fp16 the h of `wgmma` and `fused`, two numbers of that dtype without
a scale, is infinite where x_row @ A.T exceeds 65504; `vector` keeps h in fp32.
Launches never wait for the device, once the slot table was looked at after it was written.  When they are
captured into a CUDA graph, give `max_lora_rank`: a bound of every adapter that replays may meet, since
replays skip the check against it.

kernel: "sgmv" takes the algorithm that `choose` picks, or the one named by `algorithm`.  Baselines: "bgmv" is
Punica's (each row at the batch's maximum rank, in compute and traffic), "mbgmv" S-LoRA's (each row at its
true rank).
Source: Punica (arXiv 2310.18547), S-LoRA (arXiv 2311.03285), InfiniLoRA section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_lora.config import LORA_KERNELS
from moe_lora.kernels.operands import LoraOperands

from . import launch
from . import steps
from .choose import choose, forced
from .configs import Choice
from .problem import Problem, check_output, checked_problem
from .segments import Segments, rows_for


@dataclass(frozen=True)
class Shrunk:
    """What `lora_shrink` leaves for `lora_expand`: h of each class of ranks, on the device."""

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
    """h = x_row @ A.T for each row that has an adapter and each module of the site.

    x: bf16, fp16 or fp32, rows contiguous (row stride free).  decode: the phase, for tiles and grids.
    segments: `rows_for` of the same kernel, token_slots and ids, to share them between sites.
    batch_rank: the largest rank in this batch, which "bgmv" pads to; without it "bgmv" waits for the device
    to learn it.  Modules that share A (same a_offset and rank) are computed once.
    Raises ValueError for operands that don't fit.
    """
    problem = _problem(operands, kernel, decode, segments, max_lora_rank, batch_rank)
    choices = _choices(problem, kernel, algorithm, whole=False)
    if any(choice.algorithm == "fused" for choice in choices):
        raise ValueError("algorithm='fused' has no separate shrink; use lora_delta")
    return _shrunk(problem, kernel, choices)


def lora_expand(shrunk: Shrunk, y: torch.Tensor) -> None:
    """y[row, columns of module] = round(y + round(scale * h @ B.T)) for each row that has an adapter.

    y: [R, C] in x's dtype, rows contiguous (row stride free); may be wider than the site.
    Raises ValueError if y does not fit.
    """
    check_output(y, shrunk.problem, "y")
    _expand(shrunk, y, add=True)


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
    allow_fused: bool = False,
) -> None:
    """out = delta of each row, zeros where it has no adapter; all of out is overwritten.

    Adding out to y in its dtype gives the bits of `lora_shrink` and `lora_expand`, unless algorithm="fused"
    or allow_fused lets the table choose that.  out: like y of `lora_expand`.  The rest is `lora_shrink`'s.
    """
    problem = _problem(operands, kernel, decode, segments, max_lora_rank, batch_rank)
    check_output(out, problem, "out")
    choices = _choices(problem, kernel, algorithm, whole=allow_fused)
    out.zero_()
    _expand(_shrunk(problem, kernel, tuple(c for c in choices if c.algorithm != "fused")), out, add=False)
    for choice in choices:
        if choice.algorithm == "fused" and _any_rows(problem):
            steps.fused(problem, choice, out)


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
    problem = checked_problem(operands, decode=decode, rows=segments, max_lora_rank=max_lora_rank)
    if kernel != "bgmv":
        return problem
    return replace(problem, padded_rank=problem.batch_rank() if batch_rank is None else batch_rank)


def _choices(problem: Problem, kernel: str, algorithm: str | None, whole: bool) -> tuple[Choice, ...]:
    """Classes of ranks that some adapter may belong to."""
    if kernel != "sgmv":
        if algorithm is not None:
            raise ValueError(
                f"kernel={kernel!r} is a baseline and takes no algorithm; {algorithm!r} was given"
            )
        return forced("vector")
    if algorithm is not None:
        choices = forced(algorithm)
    else:
        dtype, table = launch.DTYPE_NAMES[problem.x.dtype], launch.table_of(problem.x.device)
        choices = choose(problem.site, dtype, table, whole)
    possible = tuple(choice for choice in choices if choice.min_rank <= problem.max_lora_rank)
    for choice in possible:
        steps.check_choice(problem, choice)
    return possible


def _any_rows(problem: Problem) -> bool:
    return problem.num_rows > 0 and problem.max_lora_rank > 0


def _shrunk(problem: Problem, kernel: str, choices: tuple[Choice, ...]) -> Shrunk:
    parts = []
    for choice in choices if _any_rows(problem) else ():
        if choice.algorithm == "wgmma":
            parts.append((choice, steps.wgmma_shrink(problem, choice)))
        else:
            parts.append((choice, steps.vector_shrink(problem, choice, kernel)))
    return Shrunk(problem, kernel, tuple(parts))


def _expand(shrunk: Shrunk, y: torch.Tensor, add: bool) -> None:
    for choice, h in shrunk.parts:
        if choice.algorithm == "wgmma":
            steps.wgmma_expand(shrunk.problem, choice, h, y, add)
        else:
            steps.vector_expand(shrunk.problem, choice, shrunk.kernel, h, y, add)
