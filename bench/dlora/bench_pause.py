# SPDX-License-Identifier: Apache-2.0
"""Pause of a stream during its request's move, by tokens and with KV.

    python -m bench.dlora.bench_pause [--out bench/results/dlora_pause.jsonl] [--quick]

Two instances of the demo model (fp32) on this host, some requests beside the moved one.  By turns in each
round: not moved, moved by tokens, moved with KV.  Expected before the first run: a pause of 1.5 to 3 steps
either way; with KV independent of the context's length.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click
import numpy as np

from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.launch.local import local_instances

DEMO = Path(__file__).parents[2] / "demo"
ADAPTER = "upper"
KINDS: tuple[Literal["tokens", "kv"] | None, ...] = (None, "tokens", "kv")
LENGTH, CUT = 70, 15


@dataclass
class Gaps:
    """Seconds, over all rounds.  steps: between tokens, not moved.  pauses: the
    longest gap after the move.
    """

    steps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    num_wrong: int = 0


def ask(name: str, num_prompt: int, max_tokens: int = LENGTH) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    prompt = tuple(20 + (7 * i) % 80 for i in range(num_prompt))
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, adapter=ADAPTER)


async def stream(
    fleet: FleetClient, request: GenerateRequest, kind: Literal["tokens", "kv"] | None
) -> tuple[list[int], list[float]]:
    """Its tokens and their times; moved at CUT tokens, while read."""
    tokens: list[int] = []
    stamps: list[float] = []
    moving: asyncio.Task[None] | None = None
    async for output in fleet.generate(request):
        for token in output.token_ids:
            tokens.append(token)
            stamps.append(time.perf_counter())
        if kind is not None and moving is None and len(tokens) >= CUT:
            [here] = [
                one.name for one in fleet.instances if request.request_id in fleet.mover.requests_at(one.name)
            ]
            [target] = [one.name for one in fleet.instances if one.name != here]
            moving = asyncio.create_task(fleet.move(request.request_id, target, kind))
    if moving is not None:
        await moving
    return tokens, stamps


async def measure(fleet: FleetClient, num_prompt: int, num_beside: int, num_rounds: int) -> dict[str, Gaps]:
    found = {str(kind): Gaps() for kind in KINDS}
    expected, _ = await stream(fleet, ask("first", num_prompt), None)
    for number in range(num_rounds):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            beside = [
                asyncio.create_task(stream(fleet, ask(f"beside{i}", 20 + i), None)) for i in range(num_beside)
            ]
            tokens, stamps = await stream(fleet, ask("r", num_prompt), kind)
            await asyncio.gather(*beside)
            gaps = np.diff(stamps)
            found[str(kind)].num_wrong += tokens != expected
            found[str(kind)].steps += list(gaps[:CUT])
            found[str(kind)].pauses.append(float(gaps[CUT - 1 :].max()))
    return found


async def run(recorder: Recorder, quick: bool) -> None:
    engine = EngineConfig(
        model_dir=str(DEMO / "model"),
        adapters=((ADAPTER, str(DEMO / "adapters" / ADAPTER)),),
        dtype="float32",
        eager=True,
        num_instances=2,
        spare_process=False,
        num_threads=1,
    )
    cluster = ClusterConfig(engine=engine, served_model_name="demo", front_end=FrontEndConfig())
    num_rounds = 3 if quick else 100
    async with local_instances(cluster) as controlled:
        for num_prompt in (20, 180):
            for num_beside in (0, 4):
                found = await measure(controlled.fleet, num_prompt, num_beside, num_rounds)
                moved = controlled.fleet.mover.num_moved
                assert min(moved.values()) >= num_rounds, moved
                for kind, gaps in found.items():
                    config = {"kind": kind, "num_prompt": num_prompt, "num_beside": num_beside}
                    recorder(config | {"num_rounds": num_rounds}, _result(gaps))


def _result(gaps: Gaps) -> dict[str, float]:
    step_s = float(np.median(gaps.steps))
    return {
        "step_s": step_s,
        "pause_p50_s": float(np.percentile(gaps.pauses, 50)),
        "pause_p99_s": float(np.percentile(gaps.pauses, 99)),
        "pause_p50_steps": float(np.percentile(gaps.pauses, 50)) / step_s,
        "wrong_answers": float(gaps.num_wrong),
    }


@click.command()
@click.option("--out", default=None, metavar="FILE")
@click.option("--quick", is_flag=True, help="Does it run?  Three rounds.")
def main(out: str | None, quick: bool) -> None:
    """Record and show the pauses; exit status 1 for an answer other than without a move."""
    recorder = Recorder(out)
    asyncio.run(run(recorder, quick))
    rows = [
        {**one["config"], **{key: f"{value:.4g}" for key, value in one["result"].items()}}
        for one in recorder.records
    ]
    click.echo(table(rows, "longest gap from the move on (kind None: not moved)"))
    raise SystemExit(any(one["result"]["wrong_answers"] for one in recorder.records))


if __name__ == "__main__":
    main()
