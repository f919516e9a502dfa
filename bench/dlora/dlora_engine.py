# SPDX-License-Identifier: Apache-2.0
"""The real engine on this machine's cores under each merging policy, in turn, in real time.

One engine per policy, of one random model, in one process; first the share of deltas, then a sweep over
skewness at one rate.  Nothing is emulated.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.engine_runs import EngineRun, with_all_resident
from bench.harness.interleave import interleave
from bench.harness.random_model import FULL, QUICK, ModelSize, write_adapter, write_adapters, write_model
from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore

from .dlora_plan import Work, largest_share, requests

SYSTEMS = ("unmerged", "merged", "dlora", "auto")
NUM_ADAPTERS, MAX_NUM_SEQS, LOAD = 8, 16, 0.8
ANSWER, PROMPT = 24.0, 32.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """load: rate over the capacity of full unmerged batches.  paper: adapters of rank 8 on attention, as in
    dLoRA; else ranks 8 to 64 in turn, on experts too.
    """

    size: ModelSize = FULL
    skewness: tuple[float, ...] = (0, 16, float("inf"))
    duration_s: float = 5.0
    num_rounds: int = 3
    num_steps: int = 8
    eager: bool = False
    paper: bool = True


QUICK_PLAN = Plan(size=QUICK, skewness=(16,), duration_s=1.0, num_rounds=1, num_steps=2, eager=True)


def start(model_dir: Path, adapters: tuple[tuple[str, str], ...], system: str, plan: Plan) -> EngineCore:
    """Every adapter on the device.  merge_error_limit is out of the way: the adapters are random."""
    core = build_engine(
        EngineConfig(
            model_dir=str(model_dir),
            adapters=adapters,
            dtype="bfloat16",
            device="cpu",
            max_loras=len(adapters),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=512,
            num_threads=os.cpu_count(),
            lora_memory_gb=1.0,
            eager=plan.eager,
            batching=system,
            merge_error_limit=1e6,
            prefix_caching=False,
        )
    )
    return with_all_resident(core, adapters)


def share_of_deltas(cores: Mapping[str, EngineCore], plan: Plan) -> dict[str, Any]:
    """Decode steps of a full batch in milliseconds: base model, unmerged adapters (all different, or one for
    all), and a merged adapter; and the relative excess of unmerged over base.
    """
    prompts = [tuple(range(7 * i + 1, 7 * i + 8)) for i in range(MAX_NUM_SEQS)]
    mixed = [f"a{i % NUM_ADAPTERS}" for i in range(MAX_NUM_SEQS)]
    kinds: dict[str, tuple[str, Sequence[str | None]]] = {
        "base": ("unmerged", [None] * MAX_NUM_SEQS),
        "unmerged": ("unmerged", mixed),
        "unmerged, one": ("unmerged", ["a0"] * MAX_NUM_SEQS),
        "merged, one": ("merged", ["a0"] * MAX_NUM_SEQS),
    }
    runs = {name: EngineRun(cores[system], prompts, names) for name, (system, names) in kinds.items()}
    for run in runs.values():
        run(2)
    times = interleave(
        {name: (run, plan.num_steps, plan.num_rounds) for name, run in runs.items()}, plan.num_rounds
    )
    step_ms = {name: 1e3 * float(np.median(seconds)) for name, seconds in times.items()}
    base = np.array(times["base"])
    shares = {name: float(np.median(np.array(times[name]) / base)) - 1 for name in kinds if name != "base"}
    return {"step_ms": step_ms, "over_base": shares}


def serve(core: EngineCore, work: Work) -> dict[str, Any]:
    """The requests in real time; latencies from due times."""
    planned = requests(work)
    before = core.stats()
    due = {str(request.index): request.arrival_s for request in planned}
    tokens = {str(request.index): len(request.answer) for request in planned}
    ttft_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    queue, begin_s = list(reversed(planned)), time.perf_counter()
    while queue or core.has_work:
        now_s = time.perf_counter() - begin_s
        while queue and queue[-1].arrival_s <= now_s:
            request = queue.pop()
            prompt = tuple(token % core.info.vocab_size for token in request.prompt)
            sampling = SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True)
            core.add_request(
                GenerateRequest(
                    request_id=str(request.index),
                    prompt_token_ids=prompt,
                    adapter=request.adapter,
                    sampling=sampling,
                )
            )
        if not core.has_work:
            time.sleep(min(0.001, max(0.0, queue[-1].arrival_s - now_s)))
            continue
        outputs = core.step()
        now_s = time.perf_counter() - begin_s
        for output in outputs:
            ttft_s.setdefault(output.request_id, now_s - due[output.request_id])
            if output.finish_reason is not None:
                assert output.error is None, output.error
                end_s[output.request_id] = now_s - due[output.request_id]
    after = core.stats()
    normalised = np.array([end_s[name] / tokens[name] for name in due])
    return {
        "num_requests": len(due),
        "average_s": sum(end_s.values()) / sum(tokens.values()),
        "p90_s": float(np.percentile(normalised, 90)),
        "worst_s": float(normalised.max()),
        "mean_latency_s": float(np.mean(list(end_s.values()))),
        "p90_latency_s": float(np.percentile(list(end_s.values()), 90)),
        "worst_ttft_s": max(ttft_s.values()),
        "num_merges": after.merges - before.merges,
        "steps_merged": after.steps_merged - before.steps_merged,
        "steps_mixed": after.steps_mixed - before.steps_mixed,
        "num_steps": after.num_steps - before.num_steps,
        "swap_s": after.merge_s + after.unmerge_s - before.merge_s - before.unmerge_s,
    }


def engine_points(record: Callable[[dict[str, Any], dict[str, Any]], Any], plan: Plan) -> None:
    """The share of deltas, then each skewness in each round, policies in alternating order."""
    with tempfile.TemporaryDirectory(prefix="moe_lora_bench_") as name:
        folder = Path(name)
        model_dir = write_model(folder / "model", plan.size)
        if plan.paper:
            adapters = tuple(
                (
                    f"a{i}",
                    str(write_adapter(folder / f"a{i}", plan.size, model_dir, 8, experts=False, seed=i)),
                )
                for i in range(NUM_ADAPTERS)
            )
        else:
            made = write_adapters(folder, plan.size, model_dir, NUM_ADAPTERS, experts=True)
            adapters = tuple((f"a{i}", path) for i, (_, path) in enumerate(made))
        cores = {system: start(model_dir, adapters, system, plan) for system in SYSTEMS}
        try:
            _measure(record, plan, cores)
        finally:
            for core in cores.values():
                core.close()


def _measure(
    record: Callable[[dict[str, Any], dict[str, Any]], Any], plan: Plan, cores: Mapping[str, EngineCore]
) -> None:
    common = {"plan": asdict(plan) | {"skewness": [str(one) for one in plan.skewness]}, "load": LOAD}
    shares = share_of_deltas(cores, plan)
    record({"part": "share", **common}, shares)
    rate = LOAD * MAX_NUM_SEQS / (shares["step_ms"]["unmerged"] / 1e3) / ANSWER
    for number in range(plan.num_rounds):
        for skewness in plan.skewness:
            work = replace(_WORK, skewness=skewness, rate_per_s=rate, duration_s=plan.duration_s, seed=number)
            for system in SYSTEMS if number % 2 else reversed(SYSTEMS):
                config = {"part": "skew", "system": system, "round": number, **common}
                config |= {"work": asdict(work) | {"skewness": str(skewness)}}
                config["largest_share"] = largest_share(work)
                record(config, serve(cores[system], work))


_WORK = Work(
    skewness=0,
    rate_per_s=1.0,
    duration_s=1.0,
    num_adapters=NUM_ADAPTERS,
    burstiness=1.0,
    mean_prompt=PROMPT,
    mean_answer=ANSWER,
    spread=0.5,
    max_tokens=256,
)
