# SPDX-License-Identifier: Apache-2.0
"""The measured part of bench_cluster: real engine processes, every system of a cell on the same requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_lora.report.results import write_json
from moe_lora.workload.replay_plan import PlannedRequest

from .cluster_figures import Busy, figures, same_answers
from .cluster_fleet import Fleet, Unloaded, started, unloaded
from .cluster_mixing import run_mixing
from .cluster_models import (
    TPT_RATIO,
    TTFT_RATIO,
    Files,
    MachineModel,
    machine_models,
    rate_of,
    routing_model,
    write_files,
)
from .cluster_plan import NO_LORA, PADDED, Cell, Plan, System
from .cluster_requests import demand_at_start, requests_of
from .cluster_systems import Outcome, run_system

Found = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Shared by all cells.  alone: kernel -> times of single requests."""

    plan: Plan
    models: Mapping[str, MachineModel]
    fleets: Mapping[str, Fleet]
    alone: Mapping[str, Unloaded]

    @property
    def ttft_slo_s(self) -> float:
        """Of both kernels: by an unloaded request of the padding kernel, without padding."""
        return TTFT_RATIO * self.alone[PADDED].ttft_s


def run_measured(plan: Plan, folder: Path, only: str | None = None) -> Iterator[Found]:
    """(config, result) of the machine, of each system of each cell, of figure 1.

    only: part of cells' names.
    """
    files = write_files(folder, plan)
    models = machine_models(plan, files, folder)
    with ExitStack() as stack:
        fleets = {
            kernel: stack.enter_context(
                started(plan, kernel, files, _points_file(folder, kernel, models[kernel]))
            )
            for kernel in plan.kernels
        }
        alone = {kernel: unloaded(fleet) for kernel, fleet in fleets.items()}
        setup = Setup(plan=plan, models=models, fleets=fleets, alone=alone)
        yield from _machine(setup, files)
        known: dict[tuple[str, float], _Known] = defaultdict(_Known)
        for turn, cell in enumerate(plan.chosen_cells(only)):
            yield from _run_cell(setup, cell, turn, known[cell.trace, cell.load])
        if plan.mixes(only):
            yield from run_mixing(plan, fleets, models)


def _points_file(folder: Path, kernel: str, model: MachineModel) -> Path:
    path = folder / f"points-{kernel}.json"
    write_json(path, {str(rank): point for rank, point in model.points.items()})
    return path


def _machine(setup: Setup, files: Files) -> Iterator[Found]:
    """One record per kernel: operating points, fits, times of single requests, sizes."""
    plan = setup.plan
    num_bytes = sum((Path(path) / "adapter_model.safetensors").stat().st_size for _, path in files.adapters)
    for kernel, model in setup.models.items():
        yield (
            {"section": "machine", "kernel": kernel, **_settings(plan)},
            {
                "operating_points": {str(rank): point for rank, point in model.points.items()},
                "r2_held_out": model.quality,
                "prefill_s": model.ttft_s,
                **asdict(setup.alone[kernel]),
                "slo_ttft_s": setup.ttft_slo_s,
                "adapter_mb": 2 * num_bytes / 1e6,  # files are bf16, the engines compute in fp32
            },
        )


def _settings(plan: Plan) -> dict[str, Any]:
    kept = {key: value for key, value in asdict(plan).items() if key not in ("cells", "kernels", "size")}
    return kept | {"model": plan.size.describe(), "ttft_ratio": TTFT_RATIO, "tpt_ratio": TPT_RATIO}


@dataclass
class _Known:
    """Of one trace and rate, for both kernels: times without LoRA, and the first answers."""

    bare: Outcome | None = None
    first: Outcome | None = None


def _run_cell(setup: Setup, cell: Cell, turn: int, known: _Known) -> Iterator[Found]:
    """Without LoRA first, if in the cell, as a reference for time per token.  turn: first of the other
    systems.
    """
    rate_per_s = rate_of(setup.plan, cell.trace, cell.load, dict(setup.models))
    requests = requests_of(setup.plan, cell.trace, rate_per_s, setup.plan.duration_s)
    others = [system for system in cell.systems if system != NO_LORA]
    turn %= len(others)
    for system in [*cell.systems[: len(cell.systems) - len(others)], *others[turn:], *others[:turn]]:
        busy = Busy()
        outcome = _answer(setup, cell, system, requests)
        shares = busy.shares()
        if not system.lora:
            known.bare = outcome
        elif known.first is None:
            known.first = outcome
        same = same_answers(known.first, outcome) if known.first is not None and system.lora else None
        found = figures(setup.plan, setup.ttft_slo_s, outcome, known.bare)
        yield _config(setup.plan, cell, system, rate_per_s), found | shares | {"same_answers": same}


def _answer(setup: Setup, cell: Cell, system: System, requests: Sequence[PlannedRequest]) -> Outcome:
    model = routing_model(setup.models[cell.kernel], setup.alone[cell.kernel].load_s_per_rank)
    if not system.lora:
        requests = [replace(one, adapter=None) for one in requests]
    demand = demand_at_start(setup.plan, cell.trace, requests)
    return run_system(setup.fleets[cell.kernel], system, requests, model, demand)


def _config(plan: Plan, cell: Cell, system: System, rate_per_s: float) -> dict[str, Any]:
    return {
        "section": "cells",
        "trace": cell.trace,
        "kernel": cell.kernel,
        "load": cell.load,
        "rate_per_s": rate_per_s,
        "system": system.name,
        "placement": system.placement,
        "router": system.router,
        **_settings(plan),
    }
