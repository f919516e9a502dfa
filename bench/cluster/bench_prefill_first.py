# SPDX-License-Identifier: Apache-2.0
"""Gaps in streams while long prompts arrive: prompts on an instance of their own, and on all instances.

    python -m bench.cluster.bench_prefill_first [--rounds 3] [--out FILE] [--quick]

Two instances of a random MoE of 440 M parameters (bf16) with an adapter, a core each.  Short prompts with
long answers are always running; long prompts with short answers arrive by a Poisson process, the same in
each run.  By turns in each round: together with the default step, together with steps of 256 and of 64
tokens (shorter gaps, later first tokens), and apart.

Expected before the first run: apart, a gap is a decode step, and one pause a stream for its move; together,
it is the step of a prompt's chunk.  Apart, one core computes all prompts, and the first token of a long
prompt comes later.  KV that moves: 16 KiB a token, 16 MiB a long prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.harness.random_model import FULL, QUICK, ModelSize, write_adapter, write_model
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.launch.local import local_instances

WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "together, 256": {"max_num_batched_tokens": 256},
    "together, 64": {"max_num_batched_tokens": 64},
    "apart": {"prefill_instances": ("instance-0",)},
}
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 16, 128
LONG_PROMPT, LONG_TOKENS, LONG_RATE = 1024, 16, 0.4
WARM_UP_S = 5.0


@dataclass
class Seen:
    """Seconds.  gaps: between tokens of streams; first: to the first token of long prompts."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


class Clients:
    """The requests of one run."""

    def __init__(self, fleet: FleetClient, size: ModelSize, duration_s: float) -> None:
        self._fleet = fleet
        self._random = np.random.default_rng(7)
        self._vocab_size = size.vocab_size
        self._names = map(str, itertools.count())
        self._duration_s = duration_s
        self.seen = Seen()

    async def run(self) -> None:
        self._begin_s = time.perf_counter()
        arrivals = np.cumsum(self._random.exponential(1 / LONG_RATE, 1000))
        prompts = [self._prompt(LONG_PROMPT) for _ in arrivals]
        streams = [self._stream() for _ in range(STREAMS)]
        ends = self._duration_s + WARM_UP_S
        long = [
            self._long(at_s, prompt) for at_s, prompt in zip(arrivals, prompts, strict=True) if at_s < ends
        ]
        await asyncio.gather(*streams, *long)

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.integers(3, self._vocab_size, num_tokens).tolist())

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._begin_s

    async def _tokens(self, prompt: tuple[int, ...], max_tokens: int) -> AsyncIterator[float]:
        """Times of a request's tokens."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = GenerateRequest(
            request_id=next(self._names), prompt_token_ids=prompt, sampling=sampling, adapter="a"
        )
        async for output in self._fleet.generate(request):
            for _ in output.token_ids:
                yield self._elapsed_s()

    async def _stream(self) -> None:
        while self._elapsed_s() < self._duration_s + WARM_UP_S:
            times = [at_s async for at_s in self._tokens(self._prompt(STREAM_PROMPT), STREAM_TOKENS)]
            self.seen.gaps += [
                after - before for before, after in itertools.pairwise(times) if before > WARM_UP_S
            ]

    async def _long(self, at_s: float, prompt: tuple[int, ...]) -> None:
        await asyncio.sleep(at_s - self._elapsed_s())
        times = [one async for one in self._tokens(prompt, LONG_TOKENS)]
        if at_s > WARM_UP_S:
            self.seen.first.append(times[0] - at_s)


async def measure(folder: Path, size: ModelSize, way: str, duration_s: float) -> dict[str, Any]:
    settings = dict(WAYS[way])
    front_end = FrontEndConfig(prefill_instances=settings.pop("prefill_instances", ()))
    engine = EngineConfig(
        model_dir=str(folder / "model"),
        adapters=(("a", str(folder / "adapter")),),
        eager=True,
        num_instances=2,
        num_threads=1,
        spare_process=False,
        max_model_len=2048,
        **settings,
    )
    cluster = ClusterConfig(engine=engine, served_model_name="model", front_end=front_end)
    async with local_instances(cluster) as controlled:
        clients = Clients(controlled.fleet, size, duration_s)
        await clients.run()
        moves = controlled.fleet.mover.stats()
    seen = clients.seen
    return {
        "gap_p50_s": float(np.percentile(seen.gaps, 50)),
        "gap_p99_s": float(np.percentile(seen.gaps, 99)),
        "gap_p999_s": float(np.percentile(seen.gaps, 99.9)),
        "gap_max_s": max(seen.gaps),
        "tokens_per_s": len(seen.gaps) / duration_s,
        "first_p50_s": float(np.percentile(seen.first, 50)),
        "first_p95_s": float(np.percentile(seen.first, 95)),
        "num_long": len(seen.first),
        "num_moved": moves.num_moved["kv"],
        "num_failed_moves": moves.num_failed,
        "pause_mean_s": moves.pause_s / max(1, sum(moves.num_moved.values())),
        "load_1_min": round(os.getloadavg()[0], 1),
    }


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--duration-s", default=40.0, show_default=True)
@click.option("--out", default=None, metavar="FILE")
@click.option("--quick", is_flag=True, help="Does it run?  A small model, one round of ten seconds.")
def main(rounds: int, duration_s: float, out: str | None, quick: bool) -> None:
    """Record and show each way, by turns."""
    recorder = Recorder(out)
    size, rounds, duration_s = (QUICK, 1, 10.0) if quick else (FULL, rounds, duration_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", size)
        write_adapter(folder / "adapter", size, folder / "model", 16, experts=True, seed=1)
        for number in range(rounds):
            for way in WAYS:
                config = {"way": way, "round": number, "duration_s": duration_s, "long_rate": LONG_RATE}
                config |= {"streams": STREAMS, "long_prompt": LONG_PROMPT, "model": size.describe()}
                recorder(config, asyncio.run(measure(folder, size, way, duration_s)))
                shown = {key: f"{value:.4g}" for key, value in recorder.records[-1]["result"].items()}
                click.echo(table([{"way": way, **shown}], f"round {number}"))


if __name__ == "__main__":
    main()
