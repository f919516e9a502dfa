"""What a cold adapter costs a request: cached, blocking loads, loads beside steps, host-assisted starts.

    python -m bench.host_assisted.bench_host_assisted --out bench/results/host_assisted.jsonl [--quick]

Every request asks for another adapter, on q, k, v and o as in Toppings (section 7.2), and all systems get the
same requests at the same times, by turns.  The device is emulated: engine and its sleeps on the first core,
one real worker on the last.  A layer's time for prompts is that of the worker for the mean prompt times
`--slack`, so that c of section 4.2 is that prompt, and `--cores 0.25` is a quarter of what c asks for.  Loads
take a stated multiple of a prompt's time.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.harness.interleave import ratio
from bench.harness.random_model import ModelSize, write_adapter, write_model
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora import AsyncLLM, SamplingParams
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.config.engine import EmulationConfig, StageTime, StepProfile
from moe_lora.core.hf_config import read_config
from moe_lora.core.shape import ModelShape
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.dist.lora_server.protocol.session import FrameLayout, lay_out_request
from moe_lora.lora.row_routing import content_number

SIZE = ModelSize(
    hidden_size=256,
    intermediate_size=128,
    num_layers=8,
    num_experts=4,
    num_experts_per_token=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=2048,
)
MEAN_PROMPT = 64
NUM_OUTPUT_TOKENS = 8
DECODE_SHARE = 0.25
"""Of a prompt's time that a decode step takes (Llama2-7B on an A10, figure 4: about 25 of 90 ms)."""
SYSTEMS = ("cached", "on demand", "asynchronous", "host-assisted")


@dataclass(frozen=True)
class Ask:
    """One request: when, for which adapter, how long."""

    arrival_s: float
    adapter: int
    num_prompt_tokens: int


@dataclass(frozen=True)
class Cell:
    """One device and load.  load: adapter's load time over a mean prompt's time; cores: of those c asks for;
    utilisation: share of time that prompts alone take."""

    lora_rank: int
    load: float
    cores: float
    utilisation: float


def host_layer_s(model_dir: Path, adapter: Path, num_tokens: int, core: int) -> float:
    """What a worker needs for a layer's dense sites of a prompt, its messages included; median of 30."""
    shape = ModelShape.from_hf_config(read_config(model_dir))
    packed = read_adapter(adapter, shape, torch.bfloat16)
    layout = FrameLayout(shape, torch.bfloat16, num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        store = HostStore(folder)
        store.put(packed)
        workers = HostWorkers(layout, store, 1, num_tokens, cores=[core])
        session = workers.links[0].session
        assert session is not None
        times = []
        for _ in range(31):
            begin_s = time.perf_counter()
            for number, site in enumerate(shape.sites):
                if set(packed.targets).isdisjoint(site.modules):
                    continue
                request = lay_out_request(session.frame(), layout, 0, number, num_tokens, 0, num_tokens)
                request.slot[:], request.generation[:] = 0, content_number(packed.content_hash)
                request.x.zero_()
                session.take(session.send(request))
            times.append(time.perf_counter() - begin_s)
        workers.close()
    return statistics.median(times[1:])


def requests(cell: Cell, prompt_s: float, num_requests: int, num_adapters: int, seed: int) -> list[Ask]:
    """Poisson arrivals; prompts of 0.25 to 4 times the mean, as skewed as LMSYS's."""
    rng = random.Random(seed)
    now_s, asks = 0.0, []
    for number in range(num_requests):
        now_s += rng.expovariate(cell.utilisation / prompt_s)
        length = min(max(rng.lognormvariate(-0.3, 0.8), 0.25), 4.0) * MEAN_PROMPT
        asks.append(Ask(now_s, number % num_adapters, round(length)))
    return asks


def engine(
    system: str, cell: Cell, model_dir: Path, adapters: list[Path], layer_s: float, core: int
) -> AsyncLLM:
    """One of the systems, on the emulated device."""
    prompt_s = layer_s * SIZE.num_layers
    num_bytes = sum(2 * 2 * SIZE.hidden_size * cell.lora_rank * 2 for _ in range(4)) * SIZE.num_layers
    profile = StepProfile(
        attention=StageTime(fixed_s=DECODE_SHARE * layer_s),
        prefill=StageTime(fixed_s=0.2 * layer_s, per_row_s=0.8 * layer_s / MEAN_PROMPT),
    )
    emulation = EmulationConfig(
        step_profile=profile,
        load_gb_per_s=num_bytes / (cell.load * prompt_s) / 1e9,
        blocking_loads=system == "on demand",
    )
    return AsyncLLM(
        str(model_dir),
        adapters={f"a{number}": str(path) for number, path in enumerate(adapters)},
        eager=True,
        num_threads=1,
        max_loras=len(adapters) if system == "cached" else 16,
        cache_policy="lru",
        prefix_caching=False,
        host_arena_mb=0,
        host_workers=1 if system == "host-assisted" else 0,
        host_cores=(core,),
        host_tokens_per_worker=4 * MEAN_PROMPT,
        emulation=emulation,
    )


async def run(llm: AsyncLLM, asks: list[Ask]) -> dict[str, float]:
    """Seconds: mean and P95 TTFT, mean E2E, mean and P95 gap between tokens."""
    begin_s = time.monotonic()
    ttft: list[float] = []
    e2e: list[float] = []
    gaps: list[float] = []

    async def one(ask: Ask, prompt: list[int]) -> None:
        await asyncio.sleep(begin_s + ask.arrival_s - time.monotonic())
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        answer = llm._answer(prompt, f"a{ask.adapter}", sampling)
        last_s = sent_s = time.monotonic()
        first = True
        async for _ in llm._pieces(answer):
            now_s = time.monotonic()
            (ttft if first else gaps).append(now_s - (sent_s if first else last_s))
            last_s, first = now_s, False
        e2e.append(last_s - sent_s)

    rng = random.Random(0)
    prompts = [[rng.randrange(SIZE.vocab_size) for _ in range(ask.num_prompt_tokens)] for ask in asks]
    await asyncio.gather(*map(one, asks, prompts))
    return {
        "ttft_s": statistics.mean(ttft),
        "ttft_p95_s": float(np.quantile(ttft, 0.95)),
        "e2e_s": statistics.mean(e2e),
        "gap_s": statistics.mean(gaps),
        "gap_p95_s": float(np.quantile(gaps, 0.95)),
    }


async def compare(
    cell: Cell, model_dir: Path, adapters: list[Path], host_s: float, core: int, num_rounds: int, slack: float
) -> dict[str, Any]:
    """All systems by turns on the same requests; per system the figures of each round."""
    layer_s = host_s * slack * cell.cores
    prompt_s = layer_s * SIZE.num_layers
    engines = {name: engine(name, cell, model_dir, adapters, layer_s, core) for name in SYSTEMS}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for number in range(num_rounds):
        asks = requests(cell, prompt_s, len(adapters), len(adapters), number)
        for name in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
            if name == "cached" and not number:
                await run(engines[name], asks)
            rounds[name].append(await run(engines[name], asks))
    stats = engines["host-assisted"].stats()
    for llm in engines.values():
        llm.close()
    rows = {
        "host": stats.lora_rows_host,
        "local": stats.lora_rows_local,
        "fallback": stats.host_fallback_rows,
    }
    return {"rounds": rounds, "layer_s": layer_s, "prompt_s": prompt_s, "lora_rows": rows}


def lines(cell: Cell, result: dict[str, Any]) -> list[dict[str, str]]:
    """A row per system: medians, and TTFT over that of cached, in the same round."""
    found = []
    cached = [one["ttft_s"] for one in result["rounds"]["cached"]]
    for name, rounds in result["rounds"].items():
        median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        over = ratio([one["ttft_s"] for one in rounds], cached)
        found.append(
            {
                "rank": str(cell.lora_rank),
                "load": f"{cell.load:g}",
                "cores": f"{cell.cores:g}",
                "system": name,
            }
            | {key.replace("_s", " ms"): f"{1e3 * value:.1f}" for key, value in median.items()}
            | {"TTFT over cached": f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f})"}
        )
    return found


@click.command(help=__doc__)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--quick", is_flag=True, help="Two rounds of few requests, to see that it runs.")
@click.option("--slack", default=1.3, help="A layer's time over the worker's for a mean prompt.")
def main(out: str | None, quick: bool, slack: float) -> None:
    cores = sorted(os.sched_getaffinity(0))
    recorder = Recorder(out, "emulated")
    cells = [Cell(rank, 1.0, 1.0, 0.35) for rank in (32, 64)]
    cells += [Cell(64, load, 1.0, 0.35) for load in (0.25, 0.5, 2.0, 4.0)] + [Cell(64, 1.0, 0.25, 0.35)]
    if quick:
        cells = cells[:1]
    table_lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = write_model(folder / "model", SIZE)
        for cell in cells:
            adapters = [
                write_adapter(
                    folder / f"r{cell.lora_rank}-{n}", SIZE, model_dir, cell.lora_rank, experts=False, seed=n
                )
                for n in range(8 if quick else 40)
            ]
            host_s = host_layer_s(model_dir, adapters[0], MEAN_PROMPT, cores[-1])
            os.sched_setaffinity(0, {cores[0]})
            rounds = 2 if quick else 7
            done = asyncio.run(compare(cell, model_dir, adapters, host_s, cores[-1], rounds, slack))
            os.sched_setaffinity(0, cores)
            recorder(
                {"bench": "host_assisted", **vars(cell), "slack": slack, "mean_prompt": MEAN_PROMPT}, done
            )
            table_lines += lines(cell, done)
            click.echo(f"{cell}: host {1e3 * host_s:.2f} ms a layer, rows {done['lora_rows']}")
    click.echo(table(table_lines, "Medians of rounds; emulated device"))


if __name__ == "__main__":
    main()
