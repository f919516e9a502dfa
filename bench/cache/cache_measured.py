# SPDX-License-Identifier: Apache-2.0
"""The measured cells of bench_cache: a small model, real swaps between two arenas in memory.

Every policy answers the same requests at the same times; all of a cell in one run, in turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.cache.conversations import DialogueShape, dialogues
from bench.harness.random_model import QUICK, TINY, ModelSize, write_adapters, write_model
from moe_lora.api import LLM
from moe_lora.config import EmulationConfig
from moe_lora.core.request import EngineStats
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import TurnRequest

from .cache_answers import Answered, agreement, figures, replay

# Lengths and pauses of the simulated applications, divided by about 4 and 15: a turn takes as long here.
SHAPES = {
    "chatbots": DialogueShape(
        prefix_tokens=16,
        turns=5,
        question_tokens=48,
        answer_tokens=16,
        think_s=2.0,
        spread=0.8,
        max_tokens=768,
    ),
    "translations": DialogueShape(
        prefix_tokens=64, turns=1, question_tokens=16, answer_tokens=8, think_s=1.0, max_tokens=256
    ),
    "agents": DialogueShape(
        prefix_tokens=192, turns=10, question_tokens=32, answer_tokens=8, think_s=0.7, max_tokens=1024
    ),
}
ZIPF_S = 1.0
WARM_SHARE = 0.25
SHARES_OF_CAPACITY = (0.5, 0.8)
"""Not above 1: there a queue grows as long as requests come, and every disturbance stays in it."""
TIME_UNIT_S = 4.0
"""FastLibra's, since time runs 15 times faster here."""
STATIC_SHARES = (0.2, 0.4)


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """load_gb_per_s: slowed copies, so that an adapter takes a few steps, as over PCIe."""

    size: ModelSize
    num_adapters: int
    arena_mb: float
    host_arena_mb: float
    duration_s: float
    num_rounds: int = 3
    num_calibration: int = 48
    load_gb_per_s: float = 0.2
    eager: bool = False
    applications: tuple[str, ...] = tuple(SHAPES)


FULL_PLAN = MeasuredPlan(size=QUICK, num_adapters=40, arena_mb=14.0, host_arena_mb=64.0, duration_s=6.0)
TINY_PLAN = MeasuredPlan(
    size=TINY,
    num_adapters=6,
    arena_mb=0.8,
    host_arena_mb=2.0,
    duration_s=0.7,
    num_rounds=1,
    num_calibration=8,
    eager=True,
    applications=("translations",),
)


def run_measured(
    plan: MeasuredPlan, policies: Sequence[str], folder: Path
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config, result) of each application, rate and policy.

    Rates are shares of the first policy's throughput with all requests at once.
    """
    model = write_model(folder / "model", plan.size)
    adapters = dict(write_adapters(folder, plan.size, model, plan.num_adapters, experts=False))
    for application in plan.applications:
        shape = SHAPES[application]
        names = zipf(list(adapters), ZIPF_S)
        flood = dialogues(shape, names, rate_per_s=plan.num_calibration / 2, duration_s=30.0)
        at_once = [(0.0, request) for request in flood[: plan.num_calibration]]
        with _engine(plan, model, adapters, {"cache_policy": policies[0]}) as llm:
            capacity = len(at_once) / max(a.stamps_s[-1] for a in replay(llm, at_once))
        for share in SHARES_OF_CAPACITY:
            rate = share * capacity
            requests = dialogues(shape, names, rate_per_s=rate, duration_s=plan.duration_s)
            timed = [(request.arrival_s, request) for request in requests]
            yield from _cell(plan, model, adapters, policies, application, share, rate, timed)


def _cell(
    plan: MeasuredPlan,
    model: Path,
    adapters: dict[str, str],
    policies: Sequence[str],
    application: str,
    share: float,
    rate: float,
    timed: Sequence[tuple[float, TurnRequest]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each policy at its best setting: medians over rounds, with alternating order."""
    contestants = [(policy, name) for policy in policies for name in _settings(policy, plan)]
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {one: [] for one in contestants}
    first: list[Answered] | None = None
    for number in range(plan.num_rounds):
        for policy, name in contestants[:: -1 if number % 2 else 1]:
            result, answers = _measure(plan, model, adapters, _settings(policy, plan)[name], timed)
            first = first or answers
            rounds[policy, name].append(result | {"same_answers": agreement(first, answers)})
    for policy in policies:
        found = {name: _median(rounds[policy, name]) for name in _settings(policy, plan)}
        best = min(found, key=lambda name: found[name]["ttft_ms"])
        result = found[best]
        result["same_answers"] = min(one["same_answers"] for one in rounds[policy, best])
        result["settings"] = {name: one["ttft_ms"] for name, one in found.items()}
        result["rounds"] = {key: [one[key] for one in rounds[policy, best]] for key in ("ttft_ms", "tpot_ms")}
        yield _config(plan, application, share, rate, policy, best), result


def _median(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: float(np.median([result[key] for result in results])) for key in results[0]}


def _settings(policy: str, plan: MeasuredPlan) -> dict[str, dict[str, Any]]:
    """Engine settings by the setting's name."""
    if policy == "static":
        return {
            f"{share:g}": {"cache_policy": policy, "kv_cache_gb": (1 - share) * plan.arena_mb / 1e3}
            for share in STATIC_SHARES
        }
    if policy.startswith("fastlibra"):
        return {f"{TIME_UNIT_S:g}": {"cache_policy": policy, "swap_time_unit_s": TIME_UNIT_S}}
    return {"": {"cache_policy": policy}}


def _config(
    plan: MeasuredPlan, application: str, share: float, rate: float, policy: str, setting: str
) -> dict[str, Any]:
    return {
        "part": "measured",
        "model": plan.size.describe(),
        "num_adapters": plan.num_adapters,
        "arena_mb": plan.arena_mb,
        "host_arena_mb": plan.host_arena_mb,
        "load_gb_per_s": plan.load_gb_per_s,
        "num_rounds": plan.num_rounds,
        "application": application,
        "share_of_capacity": share,
        "rate_per_s": rate,
        "policy": policy,
        "setting": setting,
    }


def _engine(plan: MeasuredPlan, model: Path, adapters: dict[str, str], settings: dict[str, Any]) -> LLM:
    return LLM(
        str(model),
        adapters,
        dtype="float32",
        device="cpu",
        arena_mb=plan.arena_mb,
        host_arena_mb=plan.host_arena_mb,
        emulation=EmulationConfig(load_gb_per_s=plan.load_gb_per_s),
        max_loras=plan.num_adapters,
        max_model_len=max(shape.max_tokens for shape in SHAPES.values()),
        max_num_batched_tokens=512,
        max_num_seqs=32,
        eager=plan.eager,
        **settings,
    )


def _measure(
    plan: MeasuredPlan,
    model: Path,
    adapters: dict[str, str],
    settings: dict[str, Any],
    timed: Sequence[tuple[float, TurnRequest]],
) -> tuple[dict[str, Any], list[Answered]]:
    with _engine(plan, model, adapters, settings) as llm:
        samples: list[EngineStats] = []
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(llm, samples, stop))
        sampler.start()
        try:
            answers = replay(llm, timed)
        finally:
            stop.set()
            sampler.join()
        stats = llm.stats()
    judged = answers[int(WARM_SHARE * len(answers)) :]
    return figures(judged, stats, samples[int(WARM_SHARE * len(samples)) :]), answers


def _sample(llm: LLM, samples: list[EngineStats], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        samples.append(llm.stats())
