# SPDX-License-Identifier: Apache-2.0
"""Plan of `bench_cluster`'s measured part: systems, traces, cells; all sizes scaled down to CPU cores.

A cell is a list of requests, answered by each of its systems in sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.harness.random_model import TINY, ModelSize
from moe_lora.workload.popularity.named import parse_popularity
from moe_lora.workload.popularity.popularity import Popularity

PADDED, TRUE_RANK = "bgmv", "sgmv"
SMALL = ModelSize(
    hidden_size=256,
    intermediate_size=256,
    num_layers=4,
    num_experts=4,
    num_experts_per_token=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=512,
)
"""Small base weights: deltas of rank 128 take most of a step."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A placement with its table; or, if None, every adapter everywhere and a router.

    lora: False: the same requests, all to the base model.
    """

    name: str
    placement: str | None = None
    router: str = "phi"
    lora: bool = True


NO_LORA = System(name="no lora", router="least_outstanding", lora=False)
PLACED = (
    System(name="loraserve", placement="loraserve"),
    System(name="optimal", placement="optimal"),
    System(name="s-lora random", placement="random"),
    System(name="s-lora contiguous", placement="contiguous"),
    System(name="toppings", router="rank_aware"),
)
ROUTED = (
    System(name="dlora", router="shortest_pending_time"),
    System(name="first fit", router="first_fit"),
    System(name="random", router="random"),
    System(name="least outstanding", router="least_outstanding"),
)
SYSTEM_NAMES = tuple(one.name for one in (NO_LORA, *PLACED, *ROUTED))

TIMEOUT_S = 5.0
"""A slower request has failed, so that an overloaded system ends."""

EVEN = 1e6
"""Burstiness of LoRAServe's uniform arrivals: gaps vary by a thousandth."""
TRACES = {
    "poisson uniform": ("loraserve:uniform", 1.0),
    "poisson shifting": ("loraserve:shifting", 1.0),
    "poisson exponential": ("loraserve:exponential", 1.0),
    "even uniform": ("loraserve:uniform", EVEN),
    "even shifting": ("loraserve:shifting", EVEN),
    "even exponential": ("loraserve:exponential", EVEN),
    "production": ("loraserve:production", 0.5),
}
"""Name -> popularity, burstiness of the arrivals.  The last replaces the paper's private trace."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """load: requests/s over this machine's capacity with each request at its rank's cost."""

    trace: str
    kernel: str
    load: float
    systems: tuple[System, ...]

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.kernel}, load {self.load:g}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """duration_s: of arrivals; the first warm_up_s are not judged.  placement_s: a placement's time step; the
    demand before the first is known.  arena_mb: of each instance, for KV and adapters; less than all adapters
    take.
    """

    size: ModelSize
    num_adapters: int
    num_instances: int
    arena_mb: float
    median_prompt_tokens: int
    max_prompt_tokens: int
    mean_output_tokens: int
    max_output_tokens: int
    duration_s: float
    warm_up_s: float
    placement_s: float
    profile_rounds: int
    mixing_rounds: int
    mixing_s: float
    cells: tuple[Cell, ...]
    kernels: tuple[str, ...] = (PADDED, TRUE_RANK)
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(f"adapter-{index:02}" for index in range(self.num_adapters))

    @property
    def lora_ranks(self) -> dict[str, int]:
        """As LoRAServe deals them: the adapters in order, evenly over the ranks."""
        return dict(zip(self.adapters, self.popularity("poisson uniform").lora_ranks, strict=True))

    def popularity(self, trace: str) -> Popularity:
        return parse_popularity(TRACES[trace][0], self.adapters)

    def chosen_cells(self, only: str | None) -> list[Cell]:
        """Cells with `only` in their name; None: all."""
        return [cell for cell in self.cells if only is None or only in cell.name]

    def mixes(self, only: str | None) -> bool:
        """True if figure 1 is among the choice."""
        return only is None or only in "figure 1"


def make_cells(low: float, load: float, high: float) -> tuple[Cell, ...]:
    """All traces with the padding kernel, three with true ranks; the last with all routers and loads."""
    last = "production"
    cells = [
        Cell(trace=trace, kernel=PADDED, load=load, systems=(NO_LORA, *PLACED))
        for trace in TRACES
        if trace != last
    ]
    cells += [
        Cell(trace=trace, kernel=TRUE_RANK, load=load, systems=PLACED)
        for trace in ("poisson uniform", "poisson shifting")
    ]
    for rate in (low, load):
        cells.append(Cell(trace=last, kernel=PADDED, load=rate, systems=(NO_LORA, *PLACED, *ROUTED)))
    cells.append(Cell(trace=last, kernel=TRUE_RANK, load=load, systems=(*PLACED, *ROUTED)))
    cells.append(Cell(trace=last, kernel=PADDED, load=high, systems=(NO_LORA, *PLACED)))
    return tuple(cells)


FULL_PLAN = Plan(
    size=SMALL,
    num_adapters=25,
    num_instances=4,
    arena_mb=96.0,
    median_prompt_tokens=128,
    max_prompt_tokens=384,
    mean_output_tokens=10,
    max_output_tokens=40,
    duration_s=7.5,
    warm_up_s=1.5,
    placement_s=2.0,
    profile_rounds=3,
    mixing_rounds=3,
    mixing_s=4.0,
    cells=make_cells(0.3, 0.45, 0.6),
)
QUICK_PLAN = replace(
    FULL_PLAN,
    size=TINY,
    num_adapters=5,
    num_instances=2,
    arena_mb=2.0,
    median_prompt_tokens=12,
    max_prompt_tokens=24,
    mean_output_tokens=4,
    max_output_tokens=8,
    duration_s=0.6,
    warm_up_s=0.1,
    placement_s=1.0,
    profile_rounds=1,
    mixing_rounds=1,
    mixing_s=0.3,
    cells=(
        Cell(trace="production", kernel=PADDED, load=0.05, systems=(NO_LORA, PLACED[0], ROUTED[0])),
        Cell(trace="production", kernel=TRUE_RANK, load=0.05, systems=PLACED[-1:]),
    ),
)
