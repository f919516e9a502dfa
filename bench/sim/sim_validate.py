# SPDX-License-Identifier: Apache-2.0
"""The simulator beside `bench_disagg`: the same systems, requests and step profiles, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.lora_server.disagg_device import Device
from bench.lora_server.disagg_plan import Plan, System
from bench.lora_server.disagg_runs import Files, planned, tokens_per_s
from moe_lora.config.optional_parts import StageTime
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.placement.placement import balanced_assignment
from moe_lora.provision.replayed.running import SimRequest
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    SimLoraServerConfig,
    SystemConfig,
)
from moe_lora.report.latency import ClientTiming, RequestRecord, SloTargets
from moe_lora.report.run_file import summarize
from moe_lora.workload.traces.records import Trace

MAX_NUM_SEQS = 512
COMPARED = (
    "p95_ttft_ms",
    "p95_decode_ttft_ms",
    "mean_tpot_ms",
    "slo_attainment_adapters_decode_ttft",
    "window_output_throughput",
)


def simulated(device: Device, trace: Trace, config: dict[str, Any]) -> dict[str, Any]:
    """Simulated record of `bench_disagg` for the point of this config.

    In emulated time; the processes' slowdown only shapes the arrivals.
    """
    plan = Plan(**config["plan"])
    system = System(**{k: v for k, v in config["system"].items() if k != "num_gpus"})
    names = tuple((f"adapter-{i:03}", "") for i in range(plan.num_adapters))
    files = Files(Path(), names, 0)
    requests = [
        replace(request, arrival_s=request.arrival_s / plan.slowdown)
        for request in planned(trace, files, plan, config["arrivals"], config["rate_per_s"])
    ]
    shares = dict(zip(files.popularity.adapters, files.popularity.probabilities, strict=True))
    table = {
        name: [(index, 1.0)] for name, index in balanced_assignment(shares, system.num_instances).items()
    }
    router = partial(PhiRouting, table)
    result = simulate(replace(_system_config(device, plan, system, trace), router=router), requests)
    return _summary(result.requests, plan)


def _system_config(device: Device, plan: Plan, system: System, trace: Trace) -> SystemConfig:
    """Adapters count as one byte; rates of links are adapters per second."""
    tokens = [request.prompt_tokens + request.output_tokens for request in trace.requests]
    instance = InstanceConfig(
        profile=device.step_profile(
            plan.num_layers, 1.0, kernel_ratio=system.kernel_ratio, overlap=system.overlap
        ),
        num_layers=plan.num_layers,
        max_num_seqs=MAX_NUM_SEQS,
        kv_tokens=system.kv_requests * sum(tokens) / len(tokens),
        prefill=StageTime(),
        shortest_first=system.queue != "fcfs",
    )
    gpus = system.server_gpus or device.instance_gpus
    rate = 1.0 / device.load_s(gpus)
    local = LocalConfig(capacity=system.slots, load_bytes_per_s=rate)
    server = SimLoraServerConfig(capacity=system.slots, load_bytes_per_s=rate, layer_wise=system.layer_wise)
    return SystemConfig(
        num_instances=system.num_instances,
        instance=instance,
        adapters=server if system.server_gpus else local,
        adapter_bytes=1.0,
    )


def _summary(requests: Sequence[SimRequest], plan: Plan) -> dict[str, Any]:
    records = [_record(request) for request in requests]
    judged = [record for record in records if record.arrival_s >= plan.warm_up_s]
    last_s = max(request.finish_s for request in requests)
    found = summarize(judged, last_s - plan.warm_up_s, SloTargets())
    return found | {"window_output_throughput": tokens_per_s(records, plan.warm_up_s, plan.duration_s)}


def _record(request: SimRequest) -> RequestRecord:
    times = np.linspace(request.first_token_s, request.finish_s, request.output_tokens).tolist()
    times[-1] = max(times)
    timing = ClientTiming(
        sent_s=request.arrival_s,
        token_times_s=tuple(times),
        end_s=times[-1],
        num_output_tokens=request.output_tokens,
        decode_ttft_ms=1e3 * request.decode_ttft_s,
    )
    return RequestRecord(
        adapter=request.adapter,
        arrival_s=request.arrival_s,
        sent_s=request.arrival_s,
        input_tokens=request.prompt_tokens,
        timing=timing,
    )


def comparison(device: Device, trace: Trace, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every paced point of the full run: {key: (recorded of real processes, simulated)}."""
    rows = []
    for record in records:
        config = record["config"]
        if config["paced"] and config["size"] == "full":
            found = simulated(device, trace, config)
            row: dict[str, Any] = {key: config[key] for key in ("part", "arrivals", "rate_per_s")}
            row["system"] = config["system"]["name"]
            rows.append(row | {key: (record["result"][key], found[key]) for key in COMPARED})
    return rows


def deviations(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per key, simulated against recorded: median and worst |ratio - 1|, or of a share the difference."""
    found = {}
    for key in COMPARED:
        pairs = [row[key] for row in rows if None not in row[key]]
        off = [abs(sim - real) if "attainment" in key else abs(sim / real - 1) for real, sim in pairs]
        if off:
            found[key] = {"median": float(np.median(off)), "worst": max(off)}
    return found
