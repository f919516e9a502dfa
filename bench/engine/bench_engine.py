# SPDX-License-Identifier: Apache-2.0
"""Decode speed of the engine beside transformers, peft and the memory bandwidth; see README.md.

python -m bench.engine.bench_engine --out FILE.jsonl [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness.random_model import write_adapters, write_model
from bench.harness.records import Record, Recorder

from .ceiling import ReadBandwidth
from .engine_cells import Contestants, Files
from .engine_goals import goals, goals_table
from .engine_plan import PLANS, Plan


def write_files(folder: Path, plan: Plan) -> Files:
    """The random model and its adapters."""
    count = max(plan.num_adapters)
    model_dir = write_model(folder / "model", plan.size)
    return Files(
        model_dir,
        write_adapters(folder, plan.size, model_dir, count, experts=True),
        write_adapters(folder, plan.size, model_dir, count, experts=False),
    )


def run(plan: Plan, out: Path, num_threads: int) -> list[Record]:
    """Measure everything; the records, also in `out`."""
    torch.set_num_threads(num_threads)
    record = Recorder(out)
    bandwidth = ReadBandwidth()
    with tempfile.TemporaryDirectory(prefix="moe_lora_bench_") as folder:
        files = write_files(Path(folder), plan)
        for dtype in plan.dtypes:
            bench = Contestants(plan, files, dtype, num_threads)
            checks = bench.check()
            click.echo(f"{dtype}: " + ", ".join(f"{k} {v['token_agreement']:.1%}" for k, v in checks.items()))
            for num_requests, num_adapters in plan.cells():
                for config, result in bench.measure(num_requests, num_adapters, bandwidth):
                    record(config, result | {"correctness": checks})
                    click.echo(_line(config, result))
            del bench
            gc.collect()
    return record.records


def _line(config: dict[str, Any], result: dict[str, Any]) -> str:
    share = result.get("share_of_ceiling")
    return (
        f"{config['dtype']:9} {config['num_requests']:3} requests {config['cell_num_adapters']:3} adapters  "
        f"{config['system']:18} {result['tokens_per_s']:9.1f} tokens/s {result['step_ms']:10.2f} ms"
        + ("" if share is None else f"  {share['median']:.0%} of the ceiling")
    )


@click.command()
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Figure of the records in --out."
)
@click.option("--quick", is_flag=True, help="A tiny model, seconds: does it run?")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Only this dtype.")
@click.option("--num-requests", type=int, multiple=True, help="Only this concurrency; repeatable.")
@click.option("--num-threads", type=int, default=os.cpu_count(), show_default="all cores")
def main(
    out: Path,
    plot: Path | None,
    quick: bool,
    dtype: str | None,
    num_requests: tuple[int, ...],
    num_threads: int,
) -> None:
    """Measure decode speed; --out is replaced."""
    out.unlink(missing_ok=True)
    chosen = PLANS["quick" if quick else "full"]
    if dtype is not None:
        chosen = replace(chosen, dtypes=(dtype,))
    if num_requests:
        chosen = replace(chosen, num_requests=num_requests)
    records = run(chosen, out, num_threads)
    click.echo(goals_table(goals(records, chosen.headline)))
    if plot is not None:
        from .engine_plot import write_plot

        write_plot(records, plot)


if __name__ == "__main__":
    main()
