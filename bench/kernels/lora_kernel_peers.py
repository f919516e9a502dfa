# SPDX-License-Identifier: Apache-2.0
"""Other ways to compute a batch's deltas, and the protocol for peers from outside the repository.

Legend: as in lora_kernel_cases.

`prepare(case)` of a contestant returns a mapping from phase to `call(copy)`, a run of that phase on copy
number `copy` of the case's operands.  "shrink" may keep its result anywhere; "expand", always after a shrink
of the same copy, adds its delta to `case.y[copy]`; "delta" does both.  A bare function counts as "delta".
Work of once per batch, outside the kernels (grouping rows, padding weights), belongs into `prepare` and is
not timed.  `prepare` raises NotApplicable for an unsupported case.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .lora_kernel_cases import Case

Call = Callable[[int], object]
Phases = Mapping[str, Call]
GATHER_BYTES = {"cpu": 64 << 20, "cuda": 8 << 30}


class NotApplicable(ValueError):
    """A contestant can't run a case; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """role: "ours" (held against the goals), "variant" (ours, algorithm forced), "baseline", "peer" (torch's)
    or "outside" (a --peer-module)."""

    name: str
    role: str
    prepare: Callable[[Case], Phases | Call]

    def phases(self, case: Case) -> Phases:
        """Phase -> call.  Raises NotApplicable."""
        found = self.prepare(case)
        return {"delta": found} if callable(found) else found


def both(shrink: Call, expand: Call) -> Phases:
    """The phases of a contestant with its delta as shrink and expand."""

    def delta(copy: int) -> None:
        shrink(copy)
        expand(copy)

    return {"shrink": shrink, "expand": expand, "delta": delta}


def add_rows(y: torch.Tensor, index: torch.Tensor, delta: torch.Tensor, scale: float) -> None:
    """y[index] += scale * delta for distinct rows, by torch's fastest way."""
    # On CPU index_add_ with alpha 1 may use a scatter, hundreds of times slower.
    if y.is_cpu and scale == 1.0:
        y.index_copy_(0, index, torch.add(y.index_select(0, index), delta, alpha=scale))
    else:
        y.index_add_(0, index, delta, alpha=scale)


def mm_loop(case: Case) -> Phases:
    """PEFT's way: for each adapter (and expert) gather its rows, mm, mm, add; true ranks."""
    rows = [case.order[rows] for rows in case.segments]
    source = [case.source[rows] for rows in case.segments]
    modules, pairs = range(len(case.site.modules)), range(len(case.pairs))
    copies = range(case.num_copies)
    a_t = [[[case.a(copy, pair, m).T for m in modules] for pair in pairs] for copy in copies]
    b = [[[case.b(copy, pair, m) for m in modules] for pair in pairs] for copy in copies]
    y = [case.y[copy].split(case.site.out_features, 1) for copy in copies]
    hidden: list[list[list[torch.Tensor]]] = [[] for _ in copies]

    def shrink(copy: int) -> None:
        segments = (case.x[copy].index_select(0, index) for index in source)
        hidden[copy] = [
            [torch.mm(segment, matrix) for matrix in matrices]
            for segment, matrices in zip(segments, a_t[copy], strict=True)
        ]

    def expand(copy: int) -> None:
        for index, h, matrices, scale in zip(rows, hidden[copy], b[copy], case.scale, strict=True):
            for part, h_m, matrix in zip(y[copy], h, matrices, strict=True):
                add_rows(part, index, torch.mm(h_m, matrix), scale)

    return both(shrink, expand)


def gather_bmm(case: Case) -> Phases:
    """Each row's padded A and B gathered into a batch, then two bmm."""
    widest = max(case.site.in_features, *case.site.out_features)
    gathered = len(case.order) * case.max_lora_rank * widest * case.spec.dtype.itemsize
    if gathered > GATHER_BYTES[case.device.type]:
        raise NotApplicable(f"would gather {gathered / 1e9:.1f} GB of padded matrices")
    pair_scale = torch.tensor(case.scale, dtype=case.spec.dtype, device=case.device)
    scale_M11 = pair_scale[case.pair_of_row][:, None, None]
    source = torch.empty_like(case.source)
    source[case.order] = case.source
    y = [target.split(case.site.out_features, 1) for target in case.y]
    hidden: list[list[torch.Tensor]] = [[] for _ in range(case.num_copies)]
    padded = case.padded

    def shrink(copy: int) -> None:
        x_MH1 = case.x[copy].index_select(0, source)[:, :, None]
        hidden[copy] = [
            torch.bmm(a.index_select(0, case.pair_of_row), x_MH1).transpose(1, 2) * scale_M11
            for a, _ in padded[copy]
        ]

    def expand(copy: int) -> None:
        for part, h, (_, b) in zip(y[copy], hidden[copy], padded[copy], strict=True):
            part += torch.bmm(h, b.index_select(0, case.pair_of_row))[:, 0]

    return both(shrink, expand)


def grouped(case: Case) -> Phases:
    """torch's grouped GEMM over rows sorted by pair, ranks padded to the largest of the batch."""
    if case.spec.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        raise NotApplicable("torch.nn.functional.grouped_mm takes bfloat16 only")
    pair_scale = torch.tensor(case.scale, dtype=case.spec.dtype, device=case.device)
    scale_M1 = pair_scale[case.pair_of_row[case.order]][:, None]
    position = case.order.argsort()
    y = [target.split(case.site.out_features, 1) for target in case.y]
    hidden: list[list[torch.Tensor]] = [[] for _ in range(case.num_copies)]
    padded = case.padded

    def shrink(copy: int) -> None:
        sorted_x = case.x[copy].index_select(0, case.source)
        hidden[copy] = [
            F.grouped_mm(sorted_x, a.transpose(1, 2), offs=case.ends) * scale_M1 for a, _ in padded[copy]
        ]

    def expand(copy: int) -> None:
        for part, h, (_, b) in zip(y[copy], hidden[copy], padded[copy], strict=True):
            part += F.grouped_mm(h, b, offs=case.ends).index_select(0, position)

    return both(shrink, expand)


def torch_peers() -> list[Contestant]:
    """Contestants in torch alone."""
    return [
        Contestant("mm loop", "peer", mm_loop),
        Contestant("gather + bmm", "peer", gather_bmm),
        Contestant("grouped_mm", "peer", grouped),
    ]


def load_peer(path: Path) -> Contestant:
    """The contestant of a Python file's `prepare(case)`; its name is `NAME` or the file's.

    Raises ValueError for a file without a contestant.
    """
    spec = importlib.util.spec_from_file_location(f"lora_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"--peer-module {path} is not a readable Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "prepare", None)):
        raise ValueError(f"--peer-module {path} has no prepare(case); see bench/README.md for the protocol")
    return Contestant(getattr(module, "NAME", path.stem), "outside", module.prepare)
