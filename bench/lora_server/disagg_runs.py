# SPDX-License-Identifier: Apache-2.0
"""Starts a system of `bench_disagg` as processes, replays arrivals, and judges the answers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.processes import engine_processes, lora_server_processes
from bench.harness.random_model import TINY, write_adapter, write_model
from moe_lora.config import EmulationConfig, EngineConfig, LoraServerConfig
from moe_lora.config.plan import ReplayOptions, WorkloadOptions
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.placement.placement import balanced_assignment
from moe_lora.report.latency import RequestRecord, SloTargets
from moe_lora.report.replay import replay
from moe_lora.report.run_file import summarize
from moe_lora.workload.popularity.popularity import Popularity, zipf
from moe_lora.workload.replay_plan import PlannedRequest, make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest

from .disagg_client import completions
from .disagg_device import Device
from .disagg_plan import Plan, Series, System

ZIPF_S = 1.2
PROMPT_SCALE = 256
MAX_OUTPUT_TOKENS = 128
BLOCK_SIZE = 8
LORA_RANK = 4
_SLO = SloTargets()
_MODEL = "base"


@dataclass(frozen=True)
class Files:
    """A tiny model and its expert adapters, most popular first.  adapter_bytes: of one, in memory."""

    model_dir: Path
    adapters: tuple[tuple[str, str], ...]
    adapter_bytes: int

    @property
    def popularity(self) -> Popularity:
        return zipf([name for name, _ in self.adapters], ZIPF_S)


def write_files(folder: Path, plan: Plan) -> Files:
    size = replace(TINY, num_layers=plan.num_layers)
    model_dir = write_model(folder / "model", size)
    adapters = tuple(
        (
            name,
            str(write_adapter(folder / name, size, model_dir, LORA_RANK, experts=True, attention=(), seed=i)),
        )
        for i, name in enumerate(f"adapter-{i:03}" for i in range(plan.num_adapters))
    )
    width = 2 * size.hidden_size + 3 * size.intermediate_size  # gate and up share their A
    num_bytes = 2 * LORA_RANK * width * size.num_experts * size.num_layers
    return Files(model_dir, adapters, num_bytes)


def shortened(trace: Trace) -> Trace:
    """Prompts scaled by PROMPT_SCALE (at least two tokens, unlike a decode row).

    Answers keep their lengths, up to MAX_OUTPUT_TOKENS, as they hold the adapters.  Prompts only hold KV
    (prefill is another device's), budgeted in requests.
    """

    def short(request: TraceRequest) -> TraceRequest:
        return replace(
            request,
            prompt_tokens=max(2, request.prompt_tokens // PROMPT_SCALE),
            output_tokens=min(MAX_OUTPUT_TOKENS, request.output_tokens),
        )

    return replace(trace, requests=tuple(short(request) for request in trace.requests))


def planned(trace: Trace, files: Files, plan: Plan, arrivals: str, rate_per_s: float) -> list[PlannedRequest]:
    """Arrivals in this machine's time: emulated times slowdown.  Equal for every system."""
    real_rate, real_s = rate_per_s / plan.slowdown, plan.duration_s * plan.slowdown
    options = WorkloadOptions(
        arrivals="trace" if arrivals == "trace" else "gamma",
        request_rate_per_s=real_rate,
        duration_s=None if arrivals == "trace" else real_s,
        num_requests=max(2, round(real_rate * real_s)) if arrivals == "trace" else None,
    )
    return make_plan(trace, options, files.popularity)


def engine_config(
    device: Device, plan: Plan, system: System, files: Files, trace: Trace, paced: bool
) -> EngineConfig:
    """One of the system's instances."""
    tokens = [request.prompt_tokens + request.output_tokens for request in trace.requests]
    blocks = system.kv_requests * sum(-(-count // BLOCK_SIZE) for count in tokens) / len(tokens)
    size = replace(TINY, num_layers=plan.num_layers)
    block_bytes = BLOCK_SIZE * 2 * size.num_layers * size.num_kv_heads * size.head_dim * 2
    load_s = device.load_s(device.instance_gpus) * plan.slowdown
    profile = device.step_profile(
        plan.num_layers, plan.slowdown, kernel_ratio=system.kernel_ratio, overlap=system.overlap
    )
    return EngineConfig(
        model_dir=str(files.model_dir),
        adapters=files.adapters,
        device="cpu",
        max_loras=system.slots,
        max_num_seqs=512,
        max_model_len=max(tokens),
        kv_cache_gb=blocks * block_bytes / 1e9,
        block_size=BLOCK_SIZE,
        eager=True,
        prefix_caching=False,
        num_instances=system.num_instances,
        spare_process=False,
        starvation_s=5.0 * plan.slowdown,
        queue=system.queue,
        emulation=EmulationConfig(
            step_profile=profile if paced else None,
            load_gb_per_s=files.adapter_bytes / load_s / 1e9 if paced and not system.server_gpus else None,
        ),
    )


def server_config(
    device: Device, plan: Plan, system: System, files: Files, paced: bool
) -> LoraServerConfig | None:
    """The LoRA Server: one rank stands for all of its GPUs."""
    if not system.server_gpus:
        return None
    load_s = device.load_s(system.server_gpus) * plan.slowdown
    return LoraServerConfig(
        layout="EP1-PP1",
        capacity=system.slots,
        max_rows=2048,
        layer_wise=system.layer_wise,
        load_gb_per_s=files.adapter_bytes / load_s / 1e9 if paced else None,
    )


@contextmanager
def started(
    config: EngineConfig, server: LoraServerConfig | None, popularity: Popularity
) -> Iterator[EngineClient]:
    """The system's processes; each adapter's requests go to one instance, balanced greedily."""
    loads = dict(zip(popularity.adapters, popularity.probabilities, strict=True))
    owners = balanced_assignment(loads, config.num_instances)
    router = PhiRouting({name: [(index, 1.0)] for name, index in owners.items()})
    with lora_server_processes(config, server) as joined, engine_processes(joined, router=router) as client:
        yield client


def measure(
    client: EngineClient, requests: Sequence[PlannedRequest], plan: Plan, series: Series
) -> dict[str, Any]:
    """Replay and summarize, in emulated time; judges arrivals after the warm-up."""
    options = ReplayOptions(url="", model=_MODEL, vocab_size=TINY.vocab_size, timeout_s=600.0)
    busy_s, start_s = cpu_s(), time.monotonic()
    outcome = replay(requests, options, connect=partial(completions, client, _MODEL))
    elapsed_s = time.monotonic() - start_s
    if outcome.interrupted:
        raise KeyboardInterrupt  # half a run is no result
    cpu_share = (cpu_s() - busy_s) / elapsed_s / (os.cpu_count() or 1)
    slowdown = plan.slowdown if series.paced else 1.0
    records = [_in_emulated_time(record, slowdown) for record in outcome.records]
    warm_up_s = plan.warm_up_s * plan.slowdown / slowdown
    judged = [record for record in records if record.arrival_s >= warm_up_s]
    last_s = max(
        (record.timing.end_s for record in judged if record.timing is not None), default=warm_up_s + 1.0
    )
    result = summarize(judged, last_s - warm_up_s, _SLO)
    window = (warm_up_s, plan.duration_s * plan.slowdown / slowdown)
    return result | {
        "window_output_throughput": tokens_per_s(records, *window),
        "cpu_share": cpu_share,
        "elapsed_s": elapsed_s,
        "load_average": os.getloadavg()[0],
    }


def tokens_per_s(records: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Tokens from start_s to end_s, per second, without the drain of a run."""
    times = (t for record in records if record.timing is not None for t in record.timing.token_times_s)
    return sum(start_s <= t < end_s for t in times) / (end_s - start_s)


def _in_emulated_time(record: RequestRecord, slowdown: float) -> RequestRecord:
    def scaled(value: float | None) -> float | None:
        return None if value is None else value / slowdown

    timing = record.timing
    if timing is not None:
        timing = replace(
            timing,
            sent_s=timing.sent_s / slowdown,
            token_times_s=tuple(moment / slowdown for moment in timing.token_times_s),
            end_s=timing.end_s / slowdown,
            decode_ttft_ms=scaled(timing.decode_ttft_ms),
        )
    return replace(
        record,
        arrival_s=record.arrival_s / slowdown,
        sent_s=record.sent_s / slowdown,
        timing=timing,
        queue_ms=scaled(record.queue_ms),
        adapter_load_ms=scaled(record.adapter_load_ms),
    )


def cpu_s() -> float:
    """CPU time of this process and its descendants."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = int(fields[11]) + int(fields[12])
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(used.get(pid, 0) for pid in own) / os.sysconf("SC_CLK_TCK")
