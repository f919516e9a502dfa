# SPDX-License-Identifier: Apache-2.0
"""Plan of bench_lora_kernels: LoRA operations by shape, batch and rank, and their scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moe_lora.core.shape import Site
from moe_lora.workload.popularity.named import LORA_RANKS

PHASES = ("shrink", "expand", "delta")
SCALED_ABOVE_ROWS = 64
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One LoRA site of a model, its usual rank, and experts per token (0: dense)."""

    model: str
    site: Site
    lora_rank: int
    top_k: int = 0


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """One batch at one site.

    lora_ranks: dealt out to the adapters in turn.  popularity: adapters of rows: "zipf" (s = 1.2, drawn),
    "uniform" (in turn) or "blocks" (consecutive rows, as in a prefill).  scale: divisor of rows and adapters.
    phases: measured ones of PHASES.
    """

    group: str
    shape: Shape
    num_rows: int
    num_adapters: int
    popularity: str
    lora_ranks: tuple[int, ...]
    dtype: torch.dtype
    phases: tuple[str, ...] = ("delta",)
    scale: int = 1

    @property
    def equal_ranks(self) -> bool:
        return len(self.lora_ranks) == 1

    @property
    def title(self) -> str:
        ranks = f"rank {self.lora_ranks[0]}" if self.equal_ranks else "mixed ranks"
        adapters = f"{self.num_adapters} adapter{'s' * (self.num_adapters > 1)}"
        rows = f"{self.num_rows} row{'s' * (self.num_rows > 1)}"
        return f"{self.group} {self.shape.model} {self.shape.site.name}, {rows}, {adapters}, {ranks}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of a mode, most telling first, for runs with a time budget.

    cold: cycle through enough copies of a case's operands to exceed any cache; else two.
    """

    specs: tuple[CaseSpec, ...]
    rounds: int = ROUNDS
    cold: bool = True


def scaled(spec: CaseSpec, scale: int) -> CaseSpec:
    """The case with rows and adapters divided by `scale`; widths, ranks and top-k stay.

    Keeps at least 64 rows and 8 adapters (or the case's own, if fewer).
    """
    if scale == 1 or spec.num_rows <= SCALED_ABOVE_ROWS:
        return spec
    return replace(
        spec,
        num_rows=max(SCALED_ABOVE_ROWS, spec.num_rows // scale),
        num_adapters=max(min(8, spec.num_adapters), spec.num_adapters // scale),
        scale=scale,
    )


def plan(mode: str, dtype: torch.dtype, scale: int) -> Plan:
    """mode: "full", "quick" or "tiny".  Raises ValueError for another mode or a scale below 1."""
    if scale < 1:
        raise ValueError(f"scale={scale} must be 1 or more; 1 measures the published sizes")
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(_MODES)}")
    specs = (scaled(spec, scale) for spec in _MODES[mode](dtype))
    tiny = mode == "tiny"
    return Plan(specs=tuple(dict.fromkeys(specs)), rounds=2 if tiny else ROUNDS, cold=not tiny)


def _site(name: str, modules: tuple[str, ...], in_features: int, width: int, num_experts: int = 0) -> Site:
    return Site(
        name=name,
        modules=modules,
        in_features=in_features,
        out_features=(width,) * len(modules),
        num_experts=num_experts,
        entry_base=0,
    )


def _expert_shapes(model: str, hidden: int, inner: int, experts: int, top_k: int, rank: int) -> list[Shape]:
    gate_up = _site("gate_up", ("gate", "up"), hidden, inner, experts)
    down = _site("down", ("down",), inner, hidden, experts)
    return [Shape(model=model, site=site, lora_rank=rank, top_k=top_k) for site in (gate_up, down)]


MIXTRAL = _expert_shapes("mixtral-8x7b", 4096, 14336, 8, 2, 64)
QWEN3 = _expert_shapes("qwen3-30b-a3b", 2048, 768, 128, 8, 32)
DENSE = Shape(model="dense", site=_site("o", ("o",), 4096, 4096), lora_rank=64)
TINY = [
    *_expert_shapes("tiny", 64, 96, 4, 2, 8),
    Shape(model="tiny", site=_site("qkv", ("q", "k", "v"), 64, 32), lora_rank=8),
]
ALL = [*MIXTRAL, *QWEN3, DENSE]


def _figure19(
    shapes: list[Shape], dtype: torch.dtype, rows: int = 1024, adapters: int = 512
) -> list[CaseSpec]:
    """InfiniLoRA's figure 19: 512 adapters, 1024 rows, Zipf 1.2, by phase; equal ranks and mixed."""
    return [
        CaseSpec(
            group="figure19",
            shape=shape,
            num_rows=rows,
            num_adapters=adapters,
            popularity="zipf",
            lora_ranks=ranks,
            dtype=dtype,
            phases=PHASES,
        )
        for ranks_of in (lambda shape: LORA_RANKS, lambda shape: (shape.lora_rank,))
        for shape in shapes
        for ranks in (ranks_of(shape),)
    ]


def _decode(shape: Shape, rows: int, dtype: torch.dtype, equal: bool = False) -> CaseSpec:
    """Up to 32 rows: at most 8 adapters, so 1 to 4 rows each; above: 32.  One row: the shape's own rank."""
    return CaseSpec(
        group="decode",
        shape=shape,
        num_rows=rows,
        num_adapters=min(rows, 8 if rows <= 32 else 32),
        popularity="uniform",
        lora_ranks=(shape.lora_rank,) if equal or rows == 1 else LORA_RANKS,
        dtype=dtype,
    )


def _prefill(shape: Shape, rows: int, dtype: torch.dtype, equal: bool = False) -> CaseSpec:
    return replace(_decode(shape, rows, dtype, equal), group="prefill", num_adapters=8, popularity="blocks")


def _full(dtype: torch.dtype) -> Iterator[CaseSpec]:
    few_rows = [DENSE, MIXTRAL[0]]
    yield from (_decode(shape, rows, dtype) for rows in (8, 16, 32) for shape in few_rows)
    yield from _figure19(ALL, dtype)
    for shape in ALL:
        yield _prefill(shape, 2048, dtype)
    for shape in few_rows:
        yield _prefill(shape, 8192, dtype)
        yield _prefill(shape, 8192, dtype, equal=True)
    # A delta's flops per byte stay near its rank, as y is as wide as the base layer's: below a GPU's ratio.
    # Only the shrink of two modules over one x may be limited by products.
    yield replace(_prefill(MIXTRAL[0], 16384, dtype), lora_ranks=(LORA_RANKS[-1],), phases=PHASES)
    for rows in (1, 8, 64, 512):
        yield from (_decode(shape, rows, dtype) for shape in ALL)
    yield from (_decode(shape, 64, dtype, equal=True) for shape in ALL)


def _quick(dtype: torch.dtype) -> Iterator[CaseSpec]:
    yield from _figure19([MIXTRAL[0], DENSE], dtype)
    yield from (_decode(shape, rows, dtype) for rows in (8, 32) for shape in (DENSE, QWEN3[0]))
    yield _prefill(DENSE, 8192, dtype)


def _tiny(dtype: torch.dtype) -> Iterator[CaseSpec]:
    yield from _figure19(TINY, dtype, rows=12, adapters=6)
    yield _decode(TINY[0], 8, dtype)
    yield _prefill(TINY[2], 40, dtype)


_MODES = {"full": _full, "quick": _quick, "tiny": _tiny}
