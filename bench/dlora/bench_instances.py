# SPDX-License-Identifier: Apache-2.0
"""Four engine processes with paced devices: round robin, proactive only, proactive and migration.

    python -m bench.dlora.bench_instances [--out bench/results/dlora_instances.jsonl] [--quick]

Emulated: instances are processes with the real front end, scheduler, cache, moves and a small real model;
only step times are another device's, by sleeping.  Systems and arrivals are those of `bench_dlora --part
replicas`; the systems serve the same requests by turns and must give the same tokens.  Exit status 1 for
different tokens, for no moves, or for real work beyond the emulated times.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from bench.harness.random_model import TINY, write_adapter, write_model
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import EmulationConfig, StageTime, StepProfile
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet
from moe_lora.dist.launch.local import local_instances
from moe_lora.provision.performance_models import FORMAT
from moe_lora.workload.replay_plan import TurnRequest

from .dlora_plan import LORA_RANK, PAPER, Work, names, requests
from .dlora_replicas import SYSTEMS

NUM_INSTANCES, MAX_NUM_SEQS, MAX_LORAS = 4, 8, 8
STEP_S = 0.05
"""Of a decode step without deltas, as in the simulated part; those of a full batch add the paper's share."""
PROMPT_TOKEN_S = 2e-4
LOAD_GB_PER_S = 5e-4
"""An adapter of this model takes some tens of milliseconds."""
WORK = Work(
    skewness=4,
    rate_per_s=9.0,
    duration_s=30.0,
    num_adapters=16,
    mean_prompt=32.0,
    mean_answer=40.0,
    spread=1.0,
    max_tokens=200,
)
MAX_SHARE = 0.7
"""Of a core: real work of its two instances and the front end."""
INTERVAL_S, QUEUE_S = 0.25, 0.1
"""Between plans of moves; wait that marks an overloaded instance."""


@dataclass
class System:
    """A front end with its own instances.  processes: by name."""

    name: str
    controlled: ControlledFleet
    processes: list[psutil.Process]

    def cpu_s(self) -> list[float]:
        return [sum(one.cpu_times()[:2]) for one in self.processes]


@dataclass
class Run:
    """One system's answers to the requests of a round; seconds."""

    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    async def ask(self, system: System, request: TurnRequest, begin_s: float, vocab_size: int) -> None:
        """At its time.  Queueing: until its first step, adapter load included."""
        await asyncio.sleep(begin_s + request.arrival_s - time.monotonic())
        asked = GenerateRequest(
            request_id=f"{system.name}-{request.index}",
            prompt_token_ids=tuple(token * 7 % vocab_size for token in request.prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True),
            adapter=request.adapter,
        )
        due_s, first_s = begin_s + request.arrival_s, 0.0
        tokens: tuple[int, ...] = ()
        async for output in system.controlled.fleet.generate(asked):
            assert output.error is None, output.error
            first_s = first_s or time.monotonic()
            tokens += output.token_ids
            if output.timing is not None:
                self.queue_s.append(output.timing.queue_s + output.timing.adapter_load_s)
        self.ttft_s.append(first_s - due_s)
        self.e2e_s.append(time.monotonic() - due_s)
        self.answers[request.index] = tokens


def engine_config(folder: Path) -> EngineConfig:
    """The instances of every system."""
    model_dir = write_model(folder / "model", TINY)
    adapters = tuple(
        (name, str(write_adapter(folder / name, TINY, model_dir, LORA_RANK, experts=False, seed=seed)))
        for seed, name in enumerate(names(WORK.num_adapters))
    )
    layers = TINY.num_layers
    profile = StepProfile(
        attention=StageTime(fixed_s=STEP_S / layers),
        lora=StageTime(per_row_s=PAPER.delta_share * STEP_S / MAX_NUM_SEQS / layers),
        prefill=StageTime(per_row_s=PROMPT_TOKEN_S / layers),
    )
    return EngineConfig(
        model_dir=str(model_dir),
        adapters=adapters,
        device="cpu",
        dtype="float32",
        eager=True,
        num_threads=1,
        num_instances=NUM_INSTANCES,
        spare_process=False,
        max_num_seqs=MAX_NUM_SEQS,
        max_loras=MAX_LORAS,
        max_model_len=WORK.max_tokens * 2,
        kv_cache_gb=0.01,
        prefix_caching=False,
        emulation=EmulationConfig(step_profile=profile, load_gb_per_s=LOAD_GB_PER_S),
    )


def front_end(system: str, folder: Path) -> FrontEndConfig:
    """All preload adapters by burst tolerance; round robin uses the instances with the adapter."""
    if system == SYSTEMS[0]:
        return FrontEndConfig(placement="burst_tolerance")
    path = folder / "steps.json"
    decode_s = {"step": STEP_S, "ranks": PAPER.delta_share * STEP_S / MAX_NUM_SEQS / LORA_RANK}
    model = {"kernel": "sgmv", "form": "full", "expert_share": 1.0, "decode_s": decode_s}
    model["prefill_s"] = {"tokens": PROMPT_TOKEN_S}
    path.write_text(json.dumps({"format": FORMAT, "models": [model]}))
    proactive = FrontEndConfig(
        placement="burst_tolerance",
        routing="shortest_pending_time",
        performance_model=str(path),
        adapter_load_s_per_rank=0.005,
    )
    if system != SYSTEMS[2]:
        return proactive
    return replace(proactive, migration="dlora", migration_interval_s=INTERVAL_S, migration_queue_s=QUEUE_S)


async def started(stack: AsyncExitStack, name: str, engine: EngineConfig, folder: Path) -> System:
    """The system with preloaded adapters, two instances per core."""
    before = set(psutil.Process().children(recursive=True))
    cluster = ClusterConfig(engine=engine, served_model_name="base", front_end=front_end(name, folder))
    controlled = await stack.enter_async_context(local_instances(cluster))
    running = asyncio.create_task(controlled.controller.run())
    stack.callback(running.cancel)
    found = sorted(set(psutil.Process().children(recursive=True)) - before, key=lambda one: one.pid)
    cores = sorted(os.sched_getaffinity(0))
    for number, process in enumerate(found):
        process.cpu_affinity([cores[number % len(cores)]])
    while (await controlled.fleet.stats()).resident_adapters == ():
        await asyncio.sleep(0.1)
    return System(name, controlled, found)


async def serve(system: System, planned: Sequence[TurnRequest]) -> tuple[Run, dict[str, Any]]:
    """The requests in real time.  core_share: CPU time of the busiest core's
    instances and of the front end.
    """
    run, mover = Run(), system.controlled.fleet.mover
    before, moved, failed = system.cpu_s(), dict(mover.num_moved), mover.num_failed
    own_s, begin_s = time.process_time(), time.monotonic()
    await asyncio.gather(*(run.ask(system, one, begin_s, TINY.vocab_size) for one in planned))
    wall_s, own_s = time.monotonic() - begin_s, time.process_time() - own_s
    used_s = [after - one for one, after in zip(before, system.cpu_s(), strict=True)]
    num_cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {"num_requests": len(run.answers)}
    for name, values in (("queue", run.queue_s), ("ttft", run.ttft_s), ("latency", run.e2e_s)):
        result |= {
            f"mean_{name}_s": float(np.mean(values)),
            f"p90_{name}_s": float(np.percentile(values, 90)),
            f"worst_{name}_s": max(values),
        }
    result["num_moves"] = {kind: mover.num_moved[kind] - moved[kind] for kind in moved}
    result["num_failed_moves"] = mover.num_failed - failed
    result["core_share"] = max(sum(used_s[i::num_cores]) + own_s for i in range(num_cores)) / wall_s
    return run, result


async def measure(recorder: Recorder, work: Work, num_rounds: int) -> list[str]:
    """All systems by turns, in alternating order; and faults."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moe_lora_bench_") as name:
        folder = Path(name)
        engine = engine_config(folder)
        async with AsyncExitStack() as stack:
            systems = [await started(stack, one, engine, folder) for one in SYSTEMS]
            for number in range(num_rounds):
                planned = requests(replace(work, seed=number))
                answers: dict[int, tuple[int, ...]] = {}
                for system in systems if number % 2 == 0 else reversed(systems):
                    run, result = await serve(system, planned)
                    answers = answers or run.answers
                    result["wrong_answers"] = sum(run.answers[i] != answers[i] for i in answers)
                    config = {"system": system.name, "round": number, "work": asdict(work)}
                    config |= {"num_instances": NUM_INSTANCES, "step_s": STEP_S}
                    config |= {"migration_interval_s": INTERVAL_S, "migration_queue_s": QUEUE_S}
                    recorder(config | {"max_num_seqs": MAX_NUM_SEQS, "max_loras": MAX_LORAS}, result)
                    problems += _problems(system.name, number, result)
            if not sum(systems[-1].controlled.fleet.mover.num_moved.values()):
                problems.append("nothing was moved")
    return problems


def _problems(system: str, number: int, result: dict[str, Any]) -> list[str]:
    where, found = f"{system}, round {number}", []
    if result["wrong_answers"]:
        found.append(f"{where}: {result['wrong_answers']} answers are not those of the first system")
    if result["core_share"] > MAX_SHARE:
        found.append(
            f"{where}: real work took {result['core_share']:.0%} of a core, and {MAX_SHARE:.0%} may be"
        )
    return found


@click.command()
@click.option("--out", default=None, metavar="FILE")
@click.option("--quick", is_flag=True, help="Does it run?  One short round.")
def main(out: str | None, quick: bool) -> None:
    """Record queueing of each system and round, and show the results."""
    recorder = Recorder(out, "emulated")
    work = replace(WORK, duration_s=6.0, rate_per_s=14.0) if quick else WORK
    problems = asyncio.run(measure(recorder, work, num_rounds=1 if quick else 3))
    rows = [
        {"system": one["config"]["system"], "round": one["config"]["round"]}
        | {key: value if isinstance(value, dict) else f"{value:.3g}" for key, value in one["result"].items()}
        for one in recorder.records
    ]
    click.echo(table(rows, "four instances, emulated devices"))
    for problem in problems:
        click.echo(f"WRONG: {problem}")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
