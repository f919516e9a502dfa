# SPDX-License-Identifier: Apache-2.0
"""dLoRA's claims, simulated and on the real engine; see README.md.

python -m bench.dlora.bench_dlora --part PART --out FILE.jsonl [--quick]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from bench.harness.records import Record, Recorder
from bench.harness.tables import table

from .dlora_engine import QUICK_PLAN, Plan, engine_points
from .dlora_plan import MACHINES
from .dlora_replicas import replicas_points
from .dlora_simulated import SHARES, batching_points, worth_points

PARTS = ("batching", "worth", "replicas", "engine", "engine-experts")


@click.command()
@click.option("--part", type=click.Choice(PARTS), required=True)
@click.option("--out", default=None, metavar="FILE")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    type=click.Choice(tuple(MACHINES)),
    help="Of batching; default: all.",
)
@click.option("--share", "shares", multiple=True, type=float, help="Of part worth; default: all.")
@click.option("--quick", is_flag=True, help="Does it run?  A few short points.")
def main(
    part: str, out: str | None, machines: tuple[str, ...], shares: tuple[float, ...], quick: bool
) -> None:
    """Record one part and show its results."""
    recorder = Recorder(out, "measured" if part.startswith("engine") else "simulated")
    if part == "batching":
        batching_points(
            recorder,
            duration_s=10.0 if quick else 90.0,
            num_seeds=1 if quick else 3,
            machines=machines or tuple(MACHINES),
        )
    elif part == "worth":
        worth_points(
            recorder,
            duration_s=10.0 if quick else 120.0,
            num_seeds=1 if quick else 3,
            shares=shares or SHARES,
        )
    elif part == "replicas":
        replicas_points(recorder, quick=quick, num_seeds=1)
    else:
        plan = replace(QUICK_PLAN if quick else Plan(), paper=part == "engine")
        engine_points(recorder, plan)
    click.echo(table([_row(record) for record in recorder.records], f"dLoRA, {part}"))


def _row(record: Record) -> dict[str, Any]:
    """A record's columns on the terminal."""
    config, result = record["config"], record["result"]
    work = config.get("work", {})
    shown = {key: config[key] for key in ("part", "system", "batching", "load") if key in config}
    shown |= {key: work[key] for key in ("skewness", "rate_per_s", "scale", "num_adapters") if key in work}
    if "machine" in config:
        shown["machine"] = config["machine"]["name"]
    numbers = {key: value for key, value in result.items() if isinstance(value, (int, float))}
    others = {key: value for key, value in result.items() if key == "num_steps"}
    return {**shown, **{key: f"{value:.4g}" for key, value in numbers.items()}, **others}


if __name__ == "__main__":
    main()
