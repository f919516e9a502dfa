# SPDX-License-Identifier: Apache-2.0
"""One cache for adapters and history KV under every policy; see README.md.

python -m bench.cache.bench_cache --part simulated --out FILE.jsonl [--trace MOONCAKE.jsonl]
python -m bench.cache.bench_cache --part measured --out FILE.jsonl
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from bench.harness.records import Recorder
from moe_lora.workload.traces.traces import read_trace

from .cache_plan import (
    APPLICATIONS,
    LARGE_POPULARITIES,
    OURS,
    POLICIES,
    Application,
    MooncakeChats,
    config_of,
    popularity_of,
)
from .cache_report import cell_table, comparison, measured_comparison, measured_table
from .cache_simulated import Cell, run_cell

FIRST_RATES = {"chatbots": 4.0, "translations": 100.0, "agents": 8.0, "chatbots (Mooncake)": 3.0}


def cells(trace: str | None, *, quick: bool) -> list[Cell]:
    """7B with 20, 50 and 100 adapters, the larger models with 50, thousands of adapters on 7B."""
    applications: dict[str, Application | MooncakeChats] = dict(APPLICATIONS)
    if trace is not None:
        applications["chatbots (Mooncake)"] = MooncakeChats(trace=read_trace(trace))
    if quick:
        short = replace(APPLICATIONS["agents"], duration_s=40.0, since_s=10.0)
        return [_cell("7B", 20, "agents", short)]
    found = [_cell("7B", number, name, app) for number in (100, 50, 20) for name, app in applications.items()]
    found += [_cell(model, 50, name, app) for model in ("13B", "34B") for name, app in APPLICATIONS.items()]
    return found + [
        _cell("7B", number, "chatbots", APPLICATIONS["chatbots"], popularity)
        for number in (1000, 2000)
        for popularity in LARGE_POPULARITIES
    ]


def _cell(
    model: str, num_adapters: int, name: str, app: Application | MooncakeChats, popularity: str | None = None
) -> Cell:
    chosen = app.popularity(num_adapters) if popularity is None else popularity_of(popularity, num_adapters)
    return Cell(
        name={
            "part": "simulated",
            "model": model,
            "num_adapters": num_adapters,
            "application": name,
            "popularity": popularity or "own",
        },
        config=config_of(model, num_adapters),
        requests=lambda rate: app.requests(chosen, rate),
        since_s=app.judged_from,
        first_rate=FIRST_RATES[name],
    )


def simulate(trace: str | None, out: Path | None, *, quick: bool, only: str | None) -> None:
    record = Recorder(out, kind="simulated")
    for cell in cells(trace, quick=quick):
        if only is None or only in " ".join(map(str, cell.name.values())):
            click.echo(cell_table([record(config, result) for config, result in run_cell(cell)]))
    click.echo(comparison(record.records))


def measure(out: Path | None, *, quick: bool, only: str | None) -> None:
    from .cache_measured import FULL_PLAN, TINY_PLAN, run_measured  # torch, for this part only

    record = Recorder(out)
    plan, policies = (TINY_PLAN, ("lru", OURS)) if quick else (FULL_PLAN, POLICIES)
    plan = replace(plan, applications=tuple(name for name in plan.applications if (only or "") in name))
    with TemporaryDirectory() as folder:
        for config, result in run_measured(plan, policies, Path(folder)):
            record(config, result)
            if config["policy"] == policies[-1]:
                click.echo(measured_table(record.records[-len(policies) :]))
    click.echo(measured_comparison(record.records))


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--part", type=click.Choice(("simulated", "measured")), default="simulated")
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Mooncake's trace, JSON lines; adds a chatbot."
)
@click.option("--quick", is_flag=True, help="One small cell.")
@click.option("--only", help="Cells whose name has this in it; measured ones are named by application.")
def main(out: Path | None, part: str, trace: str | None, quick: bool, only: str | None) -> None:
    """Compare the policies of the cache."""
    if part == "measured":
        measure(out, quick=quick, only=only)
    else:
        simulate(trace, out, quick=quick, only=only)


if __name__ == "__main__":
    main()
