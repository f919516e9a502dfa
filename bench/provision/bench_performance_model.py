# SPDX-License-Identifier: Apache-2.0
"""Accuracy of linear models of step times, and effect of a high rank on low ones beside it; see README.md.

python -m bench.provision.bench_performance_model --out bench/results/performance_model.jsonl
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from bench.harness.interleave import ratio
from bench.harness.random_model import QUICK, TINY, ModelSize, write_model
from bench.harness.records import environment
from moe_lora.cli.operating_points import found_points
from moe_lora.cli.profile_steps import measured_models, summary_lines
from moe_lora.config import LORA_KERNELS, EngineConfig
from moe_lora.core.errors import SloError
from moe_lora.profiling.step_times import StepClock
from moe_lora.report.results import append_result, write_json
from moe_lora.timing.step_model import Row

PARTS = ("models", "mixing", "points")
PAPER_R2 = 0.96
GOAL_R2 = 0.98
LOW, HIGH = 8, 128
NUM_REQUESTS = 16
MIXES = {"all low": 0, "one high": 1, "half high": NUM_REQUESTS // 2, "all high": NUM_REQUESTS}
"""Requests of the high rank among NUM_REQUESTS, each with its own adapter."""
QUANTILE = 0.25
"""Of samples: other work on the machine only ever lengthens a step."""
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "auto", "eager": True, "seed": 0}


def models(model_dir: Path, num_rounds: int, threads: int, *, small: bool) -> dict[str, Any]:
    """The content of a `moe-lora profile-steps` file, of all kernels."""
    return measured_models(
        str(model_dir),
        {
            **COMMON,
            "kernels": LORA_KERNELS,
            "ranks": (LOW, 16) if small else (LOW, 16, 32, 64, HIGH),
            "batches": (1, 2, 4) if small else (1, 2, 4, 8, 16, 32),
            "num_adapters": 2 if small else 8,
            "num_mixed": 8 if small else 48,
            "rounds": num_rounds,
            "decode_steps": 6,
            "max_tokens": 512,
            "num_threads": threads,
            "quantile": QUANTILE,
            "processor_time": threads == 1,
        },
    )


def mixing(model_dir: Path, num_rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """Kernel -> mix -> decode step time, and its ratio to low ranks alone (LoRAServe, figure 1)."""
    names = {f"{rank}-{i}": rank for rank in (LOW, HIGH) for i in range(NUM_REQUESTS)}
    times: dict[str, dict[str, list[float]]] = {kernel: {mix: [] for mix in MIXES} for kernel in LORA_KERNELS}
    with _clocks(model_dir, names, threads) as clocks:
        for number in range(num_rounds + 1):
            for mix in MIXES if number % 2 else reversed(MIXES):
                for kernel, clock in clocks.items():
                    _, decode_s = clock.run(_rows(MIXES[mix]))
                    if number:
                        times[kernel][mix].append(min(decode_s))
    return {
        kernel: {
            mix: {"step_ms_rounds": [1e3 * t for t in found], "of_low_alone": ratio(found, of["all low"])}
            for mix, found in of.items()
        }
        for kernel, of in times.items()
    }


def _rows(num_high: int) -> list[Row]:
    low = [Row(f"{LOW}-{i}", LOW, 8) for i in range(NUM_REQUESTS - num_high)]
    return low + [Row(f"{HIGH}-{i}", HIGH, 8) for i in range(num_high)]


@contextlib.contextmanager
def _clocks(model_dir: Path, names: Mapping[str, int], threads: int) -> Iterator[dict[str, StepClock]]:
    with contextlib.ExitStack() as stack:
        clocks = {}
        for kernel in LORA_KERNELS:
            config = EngineConfig(
                model_dir=str(model_dir),
                lora_kernel=kernel,
                device=COMMON["device"],
                eager=True,
                num_threads=threads,
                max_num_seqs=NUM_REQUESTS,
                max_num_batched_tokens=8 * NUM_REQUESTS,
                max_model_len=32,
                prefix_caching=False,
            )
            clock = StepClock(config, names, 6, processor_time=threads == 1)
            clocks[kernel] = stack.enter_context(contextlib.closing(clock))
        yield clocks


def points(
    model_dir: Path, kernel: str, profile: Path | None, threads: int, *, small: bool
) -> dict[str, Any]:
    """The content of a `moe-lora operating-points` file; profile: simulated from it.

    If no tried rate holds the SLO, or all do: no points, and the reason in `problem`.
    """
    options = {
        **COMMON,
        "performance_file": None if profile is None else str(profile),
        "lora_kernel": kernel,
        "ranks": (LOW, 16) if small else (LOW, 32, HIGH),
        "slo_ttft_s": 0.5,
        "slo_tpot_s": 0.5 if small else 0.1,
        "num_adapters": 2 if small else 8,
        "prompt_tokens": 32,
        "output_tokens": 16,
        "num_requests": 50,
        "duration_s": 0.3 if small else 6.0,
        "repeats": 1,
        "tolerance": 1.0 if small else 0.06,
        "start_per_s": 200.0 if small else 16.0,
        "max_num_seqs": 2 if small else 32,
        "max_num_batched_tokens": 512,
        "num_threads": threads,
    }
    try:
        return found_points(None if profile else str(model_dir), options)
    except SloError as error:
        kind = "measured" if profile is None else "simulated"
        return {"kind": kind, "operating_points": {}, "problem": str(error)}


class Recorder:
    """Appends results, each with the load of the machine before and after."""

    def __init__(self, out: Path, size: ModelSize, num_rounds: int, threads: int) -> None:
        self._out, self._before = out, os.getloadavg()[0]
        self._env = environment(out)
        self._config = {"model": size.describe(), "num_rounds": num_rounds, "threads": threads}

    def add(self, part: str, result: dict[str, Any], kind: str = "measured", **config: Any) -> None:
        after = os.getloadavg()[0]
        loads = {"load_average_before": self._before, "load_average_after": after}
        append_result(
            self._out,
            config={"part": part, **self._config, **config},
            result=result | loads,
            env=self._env,
            kind=kind,
        )
        self._before = after


def record_models(recorder: Recorder, content: dict[str, Any]) -> None:
    """One record per kernel and form; coefficients in seconds."""
    how = {key: content["settings"][key] for key in ("quantile", "processor_time")}
    for line in summary_lines(content):
        click.echo(line)
    for model in content["models"]:
        named = {key: model[key] for key in ("kernel", "form")}
        found = {key: model[key] for key in ("decode_s", "prefill_s", "quality")}
        recorder.add("models", found | {"paper_r2": PAPER_R2, "goal_r2": GOAL_R2}, **how, **named)


def record_mixing(recorder: Recorder, found: Mapping[str, dict[str, Any]], threads: int) -> None:
    """One record per kernel, with twice as many rounds and one more than for the models."""
    ranks: dict[str, Any] = {"low_rank": LOW, "high_rank": HIGH, "num_requests": NUM_REQUESTS}
    for kernel, mixes in found.items():
        recorder.add("mixing", mixes, kernel=kernel, processor_time=threads == 1, **ranks)
        shown = ", ".join(f"{mix} {one['of_low_alone']['median']:.2f}" for mix, one in mixes.items())
        click.echo(f"{kernel:>5} step time by that of rank {LOW} alone: {shown}")


def record_points(recorder: Recorder, model_dir: Path, profile: Path, threads: int, *, small: bool) -> None:
    """Measured and simulated points of the true-rank and the padding kernel; small: of the former."""
    for kernel in ("sgmv",) if small else ("sgmv", "bgmv"):
        measured = points(model_dir, kernel, None, threads, small=small)
        simulated = points(model_dir, kernel, profile, threads, small=small)
        for content in (measured, simulated):
            names = ("operating_points", "slo", "load", "problem")
            kept = {key: content[key] for key in names if key in content}
            recorder.add("points", kept, kind=content["kind"], kernel=kernel)
            shown = ", ".join(f"rank {rank} {rate:.0f}" for rank, rate in kept["operating_points"].items())
            click.echo(f"{kernel:>5} tokens/s {content['kind']}: {shown}")


@click.command()
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file."
)
@click.option("--rounds", "num_rounds", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--part", "parts", multiple=True, default=PARTS, type=click.Choice(PARTS), help="points need models."
)
@click.option("--tiny", is_flag=True, help="Does it run?")
def main(out: Path, num_rounds: int, threads: int, parts: tuple[str, ...], tiny: bool) -> None:
    """Fit performance models, mix ranks, and find operating points, on one small random model."""
    size = TINY if tiny else QUICK
    if "points" in parts and "models" not in parts:
        raise click.UsageError("--part points simulates from the models; give --part models too")
    with tempfile.TemporaryDirectory() as folder:
        model_dir, profile = write_model(Path(folder) / "model", size), Path(folder) / "profile.json"
        recorder = Recorder(out, size, num_rounds, threads)
        if "mixing" in parts:
            record_mixing(
                recorder, mixing(model_dir, num_rounds if tiny else 2 * num_rounds + 1, threads), threads
            )
        if "models" in parts:
            content = models(model_dir, num_rounds, threads, small=tiny)
            write_json(profile, content)
            record_models(recorder, content)
        if "points" in parts:
            record_points(recorder, model_dir, profile, threads, small=tiny)


if __name__ == "__main__":
    main()
