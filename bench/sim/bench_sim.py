# SPDX-License-Identifier: Apache-2.0
"""Speed of the simulator, and how near it comes to runs of real processes; see README.md.

python -m bench.sim.bench_sim --out FILE.jsonl
python -m bench.sim.bench_sim --part validate --trace AZURE.csv [--out FILE.jsonl]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.harness.records import Recorder
from bench.harness.tables import table
from bench.lora_server.disagg_device import Device, read_device
from bench.lora_server.disagg_runs import shortened
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    SimLoraServerConfig,
    SystemConfig,
)
from moe_lora.report.results import read_results
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import PlannedRequest
from moe_lora.workload.traces.traces import read_trace

from .sim_validate import COMPARED, comparison, deviations

RECORDED = Path(__file__).parents[1] / "results" / "disagg.jsonl"
MEAN_OUTPUT_TOKENS = 100
ZIPF_S = 1.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system to time.  slots: of each instance, or, with server_stages, of the LoRA Server."""

    name: str
    num_instances: int
    num_adapters: int
    slots: int
    rate_per_s: float
    num_requests: int
    server_stages: int = 0


def cases(num_requests: int) -> list[Case]:
    system: dict[str, Any] = {"num_instances": 12, "num_adapters": 512, "num_requests": num_requests}
    many = system | {"num_instances": 60, "num_adapters": 40_000}
    return [
        Case(name="server", slots=256, rate_per_s=600.0, server_stages=8, **system),
        Case(name="server, too small", slots=80, rate_per_s=600.0, server_stages=8, **system),
        Case(name="server, low load", slots=256, rate_per_s=20.0, server_stages=8, **system),
        Case(name="coupled", slots=25, rate_per_s=150.0, **system),
        Case(name="many", slots=2000, rate_per_s=3000.0, server_stages=40, **many),
    ]


def plan_of(case: Case) -> list[PlannedRequest]:
    """Poisson arrivals, Zipf adapters, answers of geometric length."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / case.rate_per_s, case.num_requests))
    adapters = zipf([f"adapter-{i}" for i in range(case.num_adapters)], ZIPF_S).sample(case.num_requests, rng)
    lengths = rng.geometric(1 / MEAN_OUTPUT_TOKENS, case.num_requests)
    return [
        PlannedRequest(i, float(arrivals[i]), adapters[i], 100, int(lengths[i]))
        for i in range(case.num_requests)
    ]


def system_of(case: Case, device: Device) -> SystemConfig:
    num_layers = device.shape.num_layers
    profile = device.step_profile(num_layers, 1.0, kernel_ratio=1.0, overlap=True)
    rate = device.gpu.needed("load_bytes_per_s", "its profile")
    adapters = (
        SimLoraServerConfig(
            capacity=case.slots, load_bytes_per_s=4 * rate * case.server_stages, num_stages=case.server_stages
        )
        if case.server_stages
        else LocalConfig(capacity=case.slots, load_bytes_per_s=4 * rate)
    )
    return SystemConfig(
        num_instances=case.num_instances,
        instance=InstanceConfig(profile=profile, num_layers=num_layers),
        adapters=adapters,
        adapter_bytes=float(device.adapter_bytes),
    )


def timed(case: Case, device: Device) -> dict[str, Any]:
    """One run, per second of this process's processor time, which other load stretches less."""
    requests, config = plan_of(case), system_of(case, device)
    start_s = time.process_time()
    result = simulate(config, requests)
    busy_s = time.process_time() - start_s
    num_tokens = sum(request.output_tokens for request in requests)
    return {
        "busy_s": busy_s,
        "events_per_s": result.events.num_events / busy_s,
        "requests_per_s": len(requests) / busy_s,
        "tokens_per_s": num_tokens / busy_s,
        "num_events": result.events.num_events,
        "num_steps": result.num_steps,
        "num_loads": result.num_loads,
        "simulated_s": result.end_s,
    } | result.summary()


def speed(device: Device, num_requests: int, out: Path | None) -> None:
    rows, record = [], Recorder(out, kind="simulated")
    for case in cases(num_requests):
        result = timed(case, device)
        rows.append(
            {
                "case": case.name,
                "CPU s": f"{result['busy_s']:.1f}",
                "requests/s": f"{result['requests_per_s']:.0f}",
                "tokens/s": f"{result['tokens_per_s']:.0f}",
                "events/s": f"{result['events_per_s']:.0f}",
                "events a request": f"{result['num_events'] / case.num_requests:.1f}",
                "at once": f"{result['admitted_at_once']:.3f}",
            }
        )
        record({"part": "speed"} | vars(case), result)
    click.echo(table(rows, "Speed"))


def validate(device: Device, trace: str, out: Path | None) -> None:
    record = Recorder(out, kind="simulated")
    rows = comparison(device, shortened(read_trace(trace)), read_results(RECORDED))
    off = deviations(rows)
    click.echo(table([_printed(row) for row in rows], "Recorded of emulated devices / simulated"))
    click.echo(table([{"of": key} | _rounded(value) for key, value in off.items()], "\nOff by"))
    record({"part": "validate", "recorded": RECORDED.name}, {"points": rows, "off": off})


def _printed(row: dict[str, Any]) -> dict[str, str]:
    shown = {key: str(row[key]) for key in ("part", "system", "arrivals", "rate_per_s")}
    return shown | {
        key: " / ".join("-" if value is None else f"{value:.3g}" for value in row[key]) for key in COMPARED
    }


def _rounded(values: dict[str, float]) -> dict[str, str]:
    return {key: f"{value:.3f}" for key, value in values.items()}


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--part", type=click.Choice(("speed", "validate")), default="speed")
@click.option("--trace", type=click.Path(dir_okay=False), help="Azure's code trace, CSV; for validate.")
@click.option("--num-requests", type=click.IntRange(min=1), default=100_000, help="Of each timed case.")
def main(out: Path | None, part: str, trace: str | None, num_requests: int) -> None:
    """Time the simulator, or compare it with bench_disagg's records."""
    device = read_device()
    if part == "speed":
        speed(device, num_requests, out)
    elif trace is None:
        raise click.UsageError("--part validate replays Azure's code trace; give --trace FILE")
    else:
        validate(device, trace, out)


if __name__ == "__main__":
    main()
