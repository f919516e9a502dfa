# SPDX-License-Identifier: Apache-2.0
"""Models of this machine for the placements and routers of `bench_cluster`, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.random_model import write_adapter, write_model
from moe_lora.cli.profile_steps import measured_models
from moe_lora.core.processes import usable_cores
from moe_lora.policies.routing.model_routing import CostModel
from moe_lora.provision.operating_points import PointLoad, SloGoal, find_operating_point, simulated_run
from moe_lora.provision.performance_models import read_step_model
from moe_lora.report.results import write_json
from moe_lora.timing.step_model import Row, StepModel
from moe_lora.workload.popularity.named import LORA_RANKS

from .cluster_plan import PADDED, Plan
from .cluster_requests import mean_lengths

TTFT_RATIO = 20.0
"""SLO of P95 TTFT by an unloaded request's TTFT.  LoRAServe asks for 10 s (section III-A4) and shows unloaded
times in figures only; a prompt of 2000 tokens on Llama 7B are 27 TFLOP, 0.15 s at 60 % of an A100's peak,
and rank 128 takes 2.7 times as long as rank 8 (section III-A1): about half a second."""
TPT_RATIO = 1.5
"""SLO of the time per token, relative to no LoRA (Toppings, section 7.4)."""
_SEARCH_TOLERANCE = 0.06
_TPOT_GOAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Files:
    model_dir: Path
    adapters: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """Of one kernel.  points: rank -> tokens/s of an instance on its own core.  router: for routing by a
    model while all instances share the cores; answer_tokens: mean per request.  quality: R² of the fits, by
    form and phase.  ttft_s: of a lone prompt of median length at rank 128.
    """

    points: dict[int, float]
    router: StepModel
    answer_tokens: float
    quality: dict[str, float | None]
    ttft_s: float


def write_files(folder: Path, plan: Plan) -> Files:
    """The model, and adapters on attention and experts."""
    model_dir = write_model(folder / "model", plan.size)
    adapters = []
    for seed, (name, rank) in enumerate(plan.lora_ranks.items()):
        path = write_adapter(folder / name, plan.size, model_dir, rank, experts=True, seed=seed)
        adapters.append((name, str(path)))
    return Files(model_dir=model_dir, adapters=tuple(adapters))


def machine_models(plan: Plan, files: Files, folder: Path) -> dict[str, MachineModel]:
    """Kernel -> model of a short profile of steps (`moe-lora profile-steps`)."""
    content = measured_models(
        str(files.model_dir),
        {
            "kernels": plan.kernels,
            "ranks": LORA_RANKS,
            "batches": (1, 4, 8),
            "num_adapters": 2,
            "num_mixed": 16,
            "rounds": plan.profile_rounds,
            "decode_steps": 4,
            "max_tokens": plan.max_num_batched_tokens,
            "num_threads": 1,
            "quantile": 0.25,
            "processor_time": True,
            "device": "cpu",
            "dtype": "float32",
            "eager": True,
            "seed": 0,
        },
    )
    write_json(folder / "profile.json", content)
    return {kernel: _machine_model(plan, kernel, content, folder / "profile.json") for kernel in plan.kernels}


def _machine_model(plan: Plan, kernel: str, content: dict[str, Any], profile: Path) -> MachineModel:
    model = read_step_model(profile, kernel=kernel)
    prompt, answer = mean_lengths(plan)
    ttft_s = model.prefill_step_s([Row("", LORA_RANKS[-1], plan.median_prompt_tokens)])
    goal = SloGoal(ttft_s=TTFT_RATIO * ttft_s, tpot_s=_TPOT_GOAL_S)
    load = PointLoad(
        prompt_tokens=round(prompt),
        output_tokens=max(2, round(answer)),
        num_adapters=max(1, plan.num_adapters // len(LORA_RANKS)),
        num_requests=200,
        duration_s=20 * goal.ttft_s,
    )
    points = _points(plan, model, load, goal)
    router = read_step_model(profile, kernel=kernel, form="toppings")
    stretch = max(1.0, plan.num_instances / usable_cores())
    router = replace(
        router,
        decode_s=_stretched(router.decode_s, stretch),
        prefill_s=_stretched(router.prefill_s, stretch),
    )
    quality = {
        f"{one['form']} {phase}": found["r2_held_out"]
        for one in content["models"]
        if one["kernel"] == kernel
        for phase, found in one["quality"].items()
    }
    return MachineModel(points=points, router=router, answer_tokens=answer, quality=quality, ttft_s=ttft_s)


def _stretched(seconds: Mapping[str, float], stretch: float) -> dict[str, float]:
    return {name: stretch * value for name, value in seconds.items()}


def _points(plan: Plan, model: StepModel, load: PointLoad, goal: SloGoal) -> dict[int, float]:
    """Rank -> tokens/s at the highest rate within the SLO in the simulator."""

    def run_of(rank: int) -> Callable[[float, int], Any]:
        return lambda rate_per_s, seed: simulated_run(
            model,
            rank,
            load,
            goal,
            rate_per_s,
            seed,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
        )

    points = {}
    rate_per_s = 1.0 / goal.ttft_s
    for rank in LORA_RANKS:
        found = find_operating_point(
            run_of(rank),
            lora_rank=rank,
            tokens_per_request=load.tokens_per_request,
            start_per_s=rate_per_s,
            tolerance=_SEARCH_TOLERANCE,
            repeats=1,
        )
        points[rank], rate_per_s = found.tokens_per_s, found.rate_per_s
    return points


def rate_of(plan: Plan, trace: str, load: float, models: dict[str, MachineModel]) -> float:
    """Requests/s for a `load` of this machine's cores, with each request at its own rank's cost.

    By the padding kernel's points, for equal requests in both kernels' cells.
    """
    points = models[PADDED].points
    choice, ranks = plan.popularity(trace), plan.lora_ranks
    seconds = 0.0
    for time_share in (0.0, 1.0):
        shares = choice.at(time_share)
        pairs = zip(shares.adapters, shares.probabilities, strict=True)
        seconds += sum(share / points[ranks[name]] for name, share in pairs) / 2
    return load * min(usable_cores(), plan.num_instances) / (sum(mean_lengths(plan)) * seconds)


def routing_model(model: MachineModel, load_s_per_rank: float) -> CostModel:
    """With Toppings' SLO: TPT_RATIO times the same model's decode step without LoRA, so that SLO and steps
    have one scale.
    """
    return CostModel(
        steps=model.router,
        slo_tpot_s=TPT_RATIO * model.router.decode_step_s([Row(None, 0)]),
        mean_output_tokens=model.answer_tokens,
        adapter_load_s_per_rank=load_s_per_rank,
    )
