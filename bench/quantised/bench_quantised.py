# SPDX-License-Identifier: Apache-2.0
"""Decode speed of a base in int8, int4 and fp8, some with inputs in int8, beside the same base in bf16.

    python -m bench.quantised.bench_quantised --model llama --out bench/results/quantised_amx.jsonl [--quick]

One engine per format in one process, decode steps interleaved; 1 to 64 requests of the base, and 8, 16 and 64
over eight adapters of rank 16.  Each round also measures the machine's read bandwidth and its rate of int8
matrix products (torch's, 16 rows).  The ceiling is a step's stored bytes at that rate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.engine.ceiling import ReadBandwidth, StepBytes, step_bytes
from bench.engine.engine_runs import EngineRun, start_engine
from bench.harness.interleave import interleave, ratio
from bench.harness.random_model import FULL, TINY, ModelSize, write_adapter, write_model
from bench.harness.records import Record, Recorder
from bench.harness.tables import table
from moe_lora.families import shape_of

LLAMA = ModelSize(
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=24,
    num_experts=0,
    num_experts_per_token=0,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=32000,
)
MODELS = {"llama": LLAMA, "mixtral": FULL}
"""443 and 440 million weights."""
FORMATS = ("none", "int8", "int4", "fp8", "int8-dynamic", "int4-dynamic")
NUM_STEPS = {1: 16, 4: 10, 8: 8, 16: 6, 64: 3}
WITH_ADAPTERS = (8, 16, 64)
NUM_ADAPTERS, LORA_RANK, PROMPT_LEN, NUM_ROUNDS, NUM_THREADS = 8, 16, 32, 7, 2
GEMM_ROWS = 16

Cell = tuple[str, int, int]
"""Format, requests, adapters."""


class Int8Rate:
    """Integer operations per second of torch's int8 product at few rows: [16, 1024] x [1024, 8192]."""

    def __init__(self) -> None:
        self._x = torch.randint(-127, 127, (GEMM_ROWS, 1024), dtype=torch.int8)
        self._w = torch.randint(-127, 127, (8192, 1024), dtype=torch.int8).t()

    def measure(self, repeats: int = 20) -> float:
        torch._int_mm(self._x, self._w)
        times = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            torch._int_mm(self._x, self._w)
            times.append(time.perf_counter() - start_s)
        return 2 * self._x.numel() * self._w.shape[1] / min(times)


def runs_of(
    folder: Path,
    size: ModelSize,
    requests: dict[int, int],
    formats: Sequence[str] = FORMATS,
    *,
    head: bool = False,
    eager: bool = False,
) -> dict[Cell, EngineRun]:
    """Every cell on an engine of its format; the checkpoint is at folder / "model".

    head: also quantised, except in bf16.
    """
    model = write_model(folder / "model", size)
    adapters = tuple(
        (
            f"a{n}",
            str(
                write_adapter(folder / f"a{n}", size, model, LORA_RANK, experts=size.num_experts > 0, seed=n)
            ),
        )
        for n in range(NUM_ADAPTERS)
    )
    runs: dict[Cell, EngineRun] = {}
    for quantize in formats:
        click.echo(f"{quantize}: the engine starts", err=True)
        core = start_engine(
            *(model, adapters, "bfloat16"),
            max_num_seqs=max(requests),
            max_model_len=PROMPT_LEN + 2 * max(requests.values()) + 2,
            num_threads=torch.get_num_threads(),
            eager=eager,
            quantize=quantize,
            quantize_head=head and quantize != "none",
        )
        for num in requests:
            prompts = [
                tuple((s * 131 + i * 17 + 5) % size.vocab_size for i in range(PROMPT_LEN)) for s in range(num)
            ]
            for count in (0, NUM_ADAPTERS) if num in WITH_ADAPTERS else (0,):
                named = [f"a{s % count}" if count else None for s in range(num)]
                runs[quantize, num, count] = EngineRun(core, prompts, named)
    return runs


def one_reading(measure: Callable[[], float], into: list[float]) -> Callable[[int], float]:
    """A contestant for its reading, not for its time."""

    def run(_num_steps: int) -> float:
        into.append(measure())
        return 1.0

    return run


def measured(
    runs: dict[Cell, EngineRun], requests: dict[int, int], num_rounds: int
) -> tuple[dict[Cell, list[float]], float, float]:
    """Seconds per step of each cell, and medians of bytes and of int8 operations per second."""
    for run in runs.values():
        run(1)  # the prompts are cached from here on
    bandwidths: list[float] = []
    rates: list[float] = []
    readers: dict[Any, Any] = {
        "bandwidth": (one_reading(ReadBandwidth().measure, bandwidths), 1, num_rounds),
        "int8": (one_reading(Int8Rate().measure, rates), 1, num_rounds),
    }
    contestants = {cell: (run, requests[cell[1]], num_rounds) for cell, run in runs.items()}
    times: dict[Any, list[float]] = interleave(readers | contestants, num_rounds)
    return (
        {cell: times[cell] for cell in runs},
        statistics.median(bandwidths),
        statistics.median(rates),
    )


def result_of(
    cell: Cell,
    times: dict[Cell, list[float]],
    read: StepBytes,
    num_weights: float,
    bandwidth: float,
    rate: float,
) -> dict[str, Any]:
    """num_weights: used by one row."""
    _, num_requests, num_adapters = cell
    step_s = statistics.median(times[cell])
    return {
        "step_ms": 1e3 * step_s,
        "step_ms_rounds": [1e3 * one for one in times[cell]],
        "tokens_per_s": num_requests / step_s,
        "over_bf16": ratio(times["none", num_requests, num_adapters], times[cell]),
        "read_bytes": vars(read),
        "ceiling_tokens_per_s": num_requests * bandwidth / read.total,
        "share_of_ceiling": read.total / bandwidth / step_s,
        "read_bytes_per_s": bandwidth,
        "int8_gemm_per_s": rate,
        "share_of_int8_gemm": 2 * num_requests * num_weights / step_s / rate,
    }


def weights_per_row(size: ModelSize) -> float:
    """Multiplied with each row, the head included."""
    hidden, inner = size.hidden_size, size.intermediate_size
    mlps = size.num_experts_per_token or 1
    attention = 2 * hidden * size.head_dim * (size.num_heads + size.num_kv_heads)
    return size.num_layers * (attention + 3 * hidden * inner * mlps) + hidden * size.vocab_size


def lines(records: list[Record]) -> list[dict[str, str]]:
    return [
        {
            "format": r["config"]["quantize"],
            "requests": str(r["config"]["num_requests"]),
            "adapters": str(r["config"]["num_adapters"]),
            "tokens/s": f"{r['result']['tokens_per_s']:.1f}",
            "over bf16": f"{r['result']['over_bf16']['median']:.2f}",
            "of ceiling": f"{r['result']['share_of_ceiling']:.0%}",
            "of int8 GEMM": f"{r['result']['share_of_int8_gemm']:.0%}",
        }
        for r in records
    ]


@click.command(help=__doc__)
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="llama", show_default=True)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--threads", default=NUM_THREADS, show_default=True)
@click.option("--quantize-head", "head", is_flag=True, help="The vocabulary head in the format too.")
@click.option("--quick", is_flag=True, help="A tiny model, not compiled, one round, to see that it runs.")
def main(name: str, out: str | None, threads: int, head: bool, quick: bool) -> None:
    torch.set_num_threads(threads)
    size, requests, num_rounds = MODELS[name], NUM_STEPS, NUM_ROUNDS
    if quick:
        size = replace(TINY, hidden_size=64, intermediate_size=128, num_experts=min(4, size.num_experts))
        requests, num_rounds = {1: 2, 8: 2}, 1
    recorder = Recorder(out)
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(Path(folder), size, requests, head=head, eager=quick)
        shape = shape_of(read_config_of(runs))
        read = {cell: step_bytes(run, shape, 2) for cell, run in runs.items()}
        times, bandwidth, rate = measured(runs, requests, num_rounds)
        for cell in runs:
            quantize, num_requests, num_adapters = cell
            config = {
                "bench": "quantised",
                "model": name,
                "size": size.describe(),
                "quantize": quantize,
                "quantize_head": head and quantize != "none",
                "num_requests": num_requests,
                "num_adapters": num_adapters,
                "threads": threads,
            }
            recorder(config, result_of(cell, times, read[cell], weights_per_row(size), bandwidth, rate))
        for core in {id(run.core): run.core for run in runs.values()}.values():
            core.close()
    click.echo(table(lines(recorder.records), f"\n{name}"))


def read_config_of(runs: dict[Cell, EngineRun]) -> dict[str, Any]:
    """The served model's config.json."""
    from moe_lora.core.wrong_files import read_config

    return read_config(Path(next(iter(runs.values())).core.info.model_dir))


if __name__ == "__main__":
    main()
