# SPDX-License-Identifier: Apache-2.0
"""Placements beside routers in simulated clusters: highest rates within the SLO, and adapters held.

    python -m bench.placement.bench_clusters --out bench/results/placement_clusters.jsonl

Loads, step times and SLO are those of `bench.cluster.simulated`, LoRAServe's sections V-E to V-G, with padded
ranks.  A record is one system on one draw of the requests: its highest rate, and its adapters at 0.9 of that
rate.  Placements with a named forecast show the forecast's effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from bench.cluster.simulated.cluster_sim_loraserve import (
    ADAPTERS_PER_SERVER,
    Made,
    judged,
    loraserve_systems,
    peak_rate,
    routed,
)
from bench.cluster.simulated.cluster_sim_plan import Systems
from bench.harness.records import Record, Recorder
from bench.harness.tables import table
from moe_lora.policies.routing.demand import DemandForecast
from moe_lora.provision.placement.placement import PLACEMENTS
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import SystemConfig

POPULARITIES = ("shifting", "production")
SIZES = (4, 8, 12)
SHARE = 0.9
"""Of its highest rate, for a system's figures."""
GUESS_PER_S = 4.5
"""Of a server, the start of the search."""
FORECASTS: dict[str, Callable[[], DemandForecast]] = {
    "": DemandForecast,
    ", damped trend": partial(DemandForecast, 8, 0.5, 0.5),
    ", mean of 4": partial(DemandForecast, 4, 0.25, 0.0),
}
PLACED = ("loraserve", "optimal")
ROUTED = ("least_outstanding", "rank_aware")


def contestants() -> Iterator[tuple[str, Made]]:
    """(name, maker of the system for a number of servers and a rate)."""
    for name in ROUTED:
        yield f"everywhere, {name}", partial(routed, name)
    for name in PLACED:
        for suffix, forecast in FORECASTS.items():
            yield name + suffix, partial(_placed, name, forecast)


def _placed(
    name: str, forecast: Callable[[], DemandForecast], systems: Systems, num_servers: int, rate: float
) -> SystemConfig:
    return systems.placed(PLACEMENTS[name], num_servers, rate, forecast)


NAMES = tuple(name for name, _ in contestants())
USUAL = (*(f"everywhere, {name}" for name in ROUTED), *PLACED)


def run_cell(systems: Systems, made: Made, num_servers: int) -> dict[str, Any]:
    """The highest rate, and the system at `SHARE` of it."""
    peak = peak_rate(systems, made, num_servers, GUESS_PER_S * num_servers)
    rate = SHARE * peak
    found = simulate(made(systems, num_servers, rate), systems.load.plan(rate))
    return {"peak_per_s": peak, "rate_per_s": rate, **judged(found, systems, num_servers)}


def summary(records: list[Record]) -> str:
    """Per size and system: mean and worst of the draws, and both by least_outstanding's on the same draw."""
    cells: dict[tuple[str, int], dict[str, dict[int, Any]]] = {}
    for record in records:
        config = record["config"]
        cell = cells.setdefault((config["popularity"], config["num_servers"]), {})
        cell.setdefault(config["system"], {})[config["seed"]] = record["result"]
    rows = []
    for (popularity, num_servers), systems in cells.items():
        reference = systems.get(f"everywhere, {ROUTED[0]}", {})
        for name, draws in systems.items():
            peaks = [one["peak_per_s"] / num_servers for one in draws.values()]
            ratios = [
                one["peak_per_s"] / reference[seed]["peak_per_s"]
                for seed, one in draws.items()
                if seed in reference
            ]
            rows.append(
                {
                    "popularity": popularity,
                    "servers": str(num_servers),
                    "system": name,
                    "requests/s a server, mean / worst": f"{fmean(peaks):.2f} / {min(peaks):.2f}",
                    "by least_outstanding, mean / worst": f"{fmean(ratios):.2f} / {min(ratios):.2f}"
                    if ratios
                    else "",
                    "P95 TTFT s": f"{fmean(one['p95_ttft_s'] for one in draws.values()):.2f}",
                    "held, mean / most": f"{fmean(one['mean_held'] for one in draws.values()):.1f} / "
                    f"{max(one['most_held'] for one in draws.values()):.0f}",
                    "draws": str(len(draws)),
                }
            )
    return table(rows, "Simulated; no engine ran.", markdown=True)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Draws of each cell.")
@click.option("--system", "chosen", type=click.Choice(NAMES), multiple=True, default=USUAL, show_default=True)
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Servers.")
@click.option("--popularities", default=",".join(POPULARITIES), show_default=True)
@click.option("--length-s", type=click.FloatRange(10.0), default=200.0, show_default=True)
def main(
    out: Path | None, seeds: int, chosen: tuple[str, ...], sizes: str, popularities: str, length_s: float
) -> None:
    """Run the cells, append a record each, print a table."""
    record = Recorder(out, kind="simulated")
    for num_servers in map(int, sizes.split(",")):
        for popularity in popularities.split(","):
            systems = loraserve_systems("padded", popularity, ADAPTERS_PER_SERVER * num_servers, length_s)
            cell = {"popularity": popularity, "num_servers": num_servers, "length_s": length_s}
            for seed in range(seeds):
                drawn = replace(systems, load=replace(systems.load, seed=seed))
                for name, made in contestants():
                    if name not in chosen:
                        continue
                    config = {"part": "clusters", "model": "padded", **cell, "seed": seed, "system": name}
                    found = record(config, run_cell(drawn, made, num_servers))
                    click.echo(f"{config} {found['result']['peak_per_s'] / num_servers:.2f}")
    click.echo(summary(record.records))


if __name__ == "__main__":
    main()
