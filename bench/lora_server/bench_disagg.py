# SPDX-License-Identifier: Apache-2.0
"""Coupled instances beside fewer instances and a LoRA Server, on emulated devices; see README.md.

python -m bench.lora_server.bench_disagg --trace AZURE.csv --out FILE.jsonl [--plot-dir DIR]
    [--quick | --tiny]
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from bench.harness.records import environment
from bench.harness.tables import table
from moe_lora.report.results import append_result, read_results
from moe_lora.workload.traces.records import Trace
from moe_lora.workload.traces.traces import read_trace

from .disagg_device import Device, read_device
from .disagg_plan import PARTS, Plan, Series, make_plan
from .disagg_report import comparison, expectations, is_hopeless
from .disagg_runs import (
    Files,
    engine_config,
    measure,
    planned,
    server_config,
    shortened,
    started,
    write_files,
)


def run(device: Device, plan: Plan, trace: Trace, size: str, out: Path) -> None:
    """Measure the missing points of `out` and append the records."""
    env = environment(out)
    with tempfile.TemporaryDirectory(prefix="moe_lora_bench_") as folder:
        files = write_files(Path(folder), plan)
        for series in plan.series:
            _run_series(device, plan, series, files, trace, size, out, env)


def _run_series(
    device: Device,
    plan: Plan,
    series: Series,
    files: Files,
    trace: Trace,
    size: str,
    out: Path,
    env: dict[str, Any],
) -> None:
    done = {_key(record["config"]): record for record in (read_results(out) if out.exists() else [])}
    configs = [_config(device, plan, series, rate, size) for rate in series.rates_per_s]
    if all(_key(config) in done for config in configs):
        return
    system = series.system
    config = engine_config(device, plan, system, files, trace, series.paced)
    server = server_config(device, plan, system, files, series.paced)
    with started(config, server, files.popularity) as client:
        for point, rate in zip(configs, series.rates_per_s, strict=True):
            if _key(point) in done:
                result = done[_key(point)]["result"]
            else:
                requests = planned(trace, files, plan, series.arrivals, rate)
                result = measure(client, requests, plan, series)
                kind = "emulated" if series.paced else "measured"
                append_result(out, config=point, result=result, env=env, kind=kind)
                click.echo(_line(point, result))
            if is_hopeless(result):
                return


def _config(device: Device, plan: Plan, series: Series, rate_per_s: float, size: str) -> dict[str, Any]:
    return {
        "size": size,
        "part": series.part,
        "arrivals": series.arrivals,
        "paced": series.paced,
        "rate_per_s": rate_per_s,
        "system": asdict(series.system) | {"num_gpus": series.system.num_gpus},
        "plan": {key: value for key, value in asdict(plan).items() if key != "series"},
        "device": device.profile["model"],
    }


def _key(config: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(config[k] for k in ("size", "part", "arrivals", "paced", "rate_per_s")),
        config["system"]["name"],
    )


def _line(config: dict[str, Any], result: dict[str, Any]) -> str:
    ttft_ms, attained = result["p95_decode_ttft_ms"], result["slo_attainment_adapters_decode_ttft"]
    name, rate_per_s = config["system"]["name"], config["rate_per_s"]
    return (
        f"{config['part']:11} {name:22} {config['arrivals']:7} {rate_per_s:5g} req/s"
        f"  P95 TTFT {ttft_ms or 0:8.1f} ms  TPOT {result['mean_tpot_ms'] or 0:6.1f} ms"
        f"  {result['window_output_throughput']:7.0f} tokens/s  adapters in SLO {attained or 0:6.1%}"
        f"  CPU {result['cpu_share']:.0%}  failed {result['failed']}"
    )


@click.command()
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file."
)
@click.option("--trace", required=True, type=click.Path(dir_okay=False), help="Azure's code trace, CSV.")
@click.option("--plot-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the figure goes.")
@click.option("--quick", "size", flag_value="quick", help="A few points, under two minutes.")
@click.option("--tiny", "size", flag_value="tiny", help="Does it run at all?")
@click.option("--full", "size", flag_value="full", default=True, hidden=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; repeatable.")
@click.option("--slowdown", type=float, help="Stretch all times of the emulated devices by this factor.")
def main(
    out: Path, trace: str, plot_dir: Path | None, size: str, parts: tuple[str, ...], slowdown: float | None
) -> None:
    """Existing points of FILE are not run again."""
    device = read_device()
    plan = make_plan(device, size)
    if parts:
        plan = replace(plan, series=tuple(s for s in plan.series if s.part in parts))
    if slowdown is not None:
        plan = replace(plan, slowdown=slowdown)
    requests = shortened(read_trace(trace))
    if any(s.part == "rates" for s in plan.series):
        click.echo(table(expectations(device, plan, requests), "Expected from capacity alone"))
    run(device, plan, requests, size, out)
    records = [record for record in read_results(out) if record["config"]["size"] == size]
    if found := comparison(records):
        click.echo(table(found, "Found"))
    if plot_dir is not None:
        from .disagg_plot import write_plot

        click.echo(write_plot(records, plot_dir))


if __name__ == "__main__":
    main()
