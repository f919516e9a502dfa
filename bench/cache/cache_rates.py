# SPDX-License-Identifier: Apache-2.0
"""TTFT at ten rates, FastLibra's own mean: tenths of its peak, 7B, 100 adapters, simulated; see README.md.

Peaks and best settings come from the records of bench_cache.

python -m bench.cache.cache_rates --trace MOONCAKE.jsonl --out FILE.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.harness.records import RESULTS, Recorder
from moe_lora.report.results import read_results

from .bench_cache import cells
from .cache_plan import settings_of
from .cache_simulated import REFERENCE, simulated

TENTHS = tuple(range(1, 11))
APPLICATIONS = ("agents", "chatbots", "chatbots (Mooncake)", "translations")
POLICIES = (REFERENCE, "static", "slora", "cost-aware", "lru")
NUM_ADAPTERS = 100


def chosen(found: list[dict[str, Any]], application: str) -> tuple[float, dict[str, str]]:
    """FastLibra's peak rate, and the best setting of each policy, of bench_cache's records."""
    settings = {
        one["config"]["policy"]: one
        for one in found
        if one["config"]["model"] == "7B"
        and one["config"]["num_adapters"] == NUM_ADAPTERS
        and one["config"]["application"] == application
    }
    peak = settings[REFERENCE]["config"]["rates_per_s"][-1]
    return peak, {policy: one["config"]["setting"] for policy, one in settings.items()}


def _done(out: Path | None) -> set[tuple[str, str]]:
    found = read_results(out) if out is not None and out.exists() else []
    return {(one["config"]["application"], one["config"]["policy"]) for one in found}


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--trace", required=True, type=click.Path(dir_okay=False), help="Mooncake's, JSON lines.")
@click.option(
    "--settled",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    default=RESULTS / "cache.jsonl",
    show_default=True,
    help="Records of bench_cache with peaks and settings.",
)
@click.option("--application", "applications", multiple=True, default=APPLICATIONS, help="Repeatable.")
def main(out: Path | None, trace: str, settled: Path, applications: tuple[str, ...]) -> None:
    """One record per application and policy; existing records of FILE stay, and do not run again."""
    record, done, found = Recorder(out, kind="simulated"), _done(out), read_results(settled)
    here = {
        str(cell.name["application"]): cell
        for cell in cells(trace, quick=False)
        if cell.name["num_adapters"] == NUM_ADAPTERS
    }
    for application in applications:
        cell = here[application]
        peak, settings = chosen(found, application)
        for policy in POLICIES:
            if (application, policy) in done:
                continue
            make = settings_of(policy)[settings[policy]]
            points = [simulated(cell, make, tenth / 10 * peak) for tenth in TENTHS]
            config = dict(cell.name) | {"part": "rates", "policy": policy, "setting": settings[policy]}
            record(config | {"peak_per_s": peak}, {"points": points})
            shown = " ".join(f"{point['ttft_ms']:.0f}" for point in points)
            click.echo(f"{application:20} {policy:11} TTFT ms {shown}")


if __name__ == "__main__":
    main()
