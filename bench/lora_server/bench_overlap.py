# SPDX-License-Identifier: Apache-2.0
"""Share of the LoRA Server's time hidden behind the instance's base computation.

    python -m bench.lora_server.bench_overlap --out bench/results/overlap.jsonl
        --trace bench/results/overlap_trace.json

One engine and one server rank, one thread each, decode in lockstep.  A request's remote time runs from its
put to its answer; the engine's wait is exposed, the rest is hidden behind base GEMMs (InfiniLoRA figure 7b).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.harness.interleave import interleave, ratio
from bench.harness.processes import lora_server_processes
from bench.harness.random_model import FULL, QUICK, RANKS, TINY, ModelSize, write_adapter, write_model
from bench.harness.records import environment
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.deltas.remote_backend import RemoteBackend
from moe_lora.dist.deltas.session import ClientSession, ExchangeTimes
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.row_routing import Source
from moe_lora.report import append_result

PROMPT_TOKENS = 33
NUM_ADAPTERS = 8
GOAL_HIDDEN = 0.9


class Decode:
    """Requests in lockstep on one engine; `adapters` empty: the base model alone."""

    def __init__(self, core: EngineCore, num_requests: int, adapters: list[str]) -> None:
        self.core = core
        self._names = [adapters[i % len(adapters)] if adapters else None for i in range(num_requests)]
        self._runs = 0
        self._timed_ns: list[tuple[int, int]] = []

    def timed(self, exchanges: list[ExchangeTimes]) -> list[ExchangeTimes]:
        """Those of the timed steps."""
        return [e for e in exchanges if any(start <= e.sent_ns <= end for start, end in self._timed_ns)]

    def decode(self, num_steps: int) -> float:
        """Seconds of `num_steps` decode steps; the prefill, and the wait for leases, come before."""
        sampling = SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
        self._runs += 1
        for i, name in enumerate(self._names):
            prompt = tuple(range(5 + i, 5 + i + PROMPT_TOKENS))
            request_id = f"{self._runs}-{i}"
            request = GenerateRequest(
                request_id=request_id, prompt_token_ids=prompt, adapter=name, sampling=sampling
            )
            self.core.add_request(request)
        started = 0
        while started < len(self._names):
            started += len(self.core.step())
        start_ns = time.monotonic_ns()
        for _ in range(num_steps):
            self.core.step()
        end_ns = time.monotonic_ns()
        self._timed_ns.append((start_ns, end_ns))
        while self.core.has_work:
            self.core.step()
        return (end_ns - start_ns) / 1e9


def session_of(core: EngineCore) -> ClientSession:
    """The engine's only session (not part of an engine's interface)."""
    routed = core._runner._context.backend
    assert isinstance(routed, RoutedBackend)
    remote = routed.backends[Source.LEASED]
    assert isinstance(remote, RemoteBackend)
    [link] = remote._links.values()
    assert link.session is not None
    assert remote.num_fallback_rows == 0, "deltas were computed by the instance: nothing was measured"
    return link.session


@contextmanager
def observed(core: EngineCore) -> Iterator[list[ExchangeTimes]]:
    session = session_of(core)
    exchanges: list[ExchangeTimes] = []
    session.observed = exchanges
    yield exchanges
    session.observed = None


def shares(exchanges: list[ExchangeTimes]) -> dict[str, float]:
    """Medians per request in microseconds, and the hidden share of all remote time."""
    remote = [
        max(e.finished_ns, e.taken_ns if e.asked_ns < e.finished_ns else 0) - e.sent_ns for e in exchanges
    ]
    exposed = [e.taken_ns - e.asked_ns if e.asked_ns < e.finished_ns else 0 for e in exchanges]
    computed = [e.finished_ns - e.started_ns for e in exchanges]
    base = [e.asked_ns - e.sent_ns for e in exchanges]
    return {
        "num_requests_to_server": len(exchanges),
        "remote_us": statistics.median(remote) / 1e3,
        "until_started_us": statistics.median(e.started_ns - e.sent_ns for e in exchanges) / 1e3,
        "server_compute_us": statistics.median(computed) / 1e3,
        "base_between_us": statistics.median(base) / 1e3,
        "exposed_us": statistics.mean(exposed) / 1e3,
        "hidden_share": 1 - sum(exposed) / sum(remote),
        # Bound of any implementation: the remote time beyond the simultaneous base work.
        "bound_hidden_share": 1
        - sum(max(0, c - b) for c, b in zip(computed, base, strict=True)) / sum(remote),
    }


def chrome_trace(core: EngineCore, run: Decode, path: Path) -> None:
    """A few steps as a Chrome trace: the engine's operations (torch.profiler) and the server's."""
    with (
        observed(core) as exchanges,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        offset_ns = time.time_ns() - time.monotonic_ns()
        run.decode(3)
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    base_ns = trace.get("baseTimeNanoseconds", 0)

    def event(name: str, thread: str, start_ns: int, end_ns: int, e: ExchangeTimes) -> dict[str, Any]:
        start_us = (start_ns + offset_ns - base_ns) / 1e3
        return {
            "ph": "X",
            "name": f"{name} layer {e.layer}",
            "cat": "lora_server",
            "pid": "LoRA Server",
            "tid": thread,
            "ts": start_us,
            "dur": (end_ns - start_ns) / 1e3,
        }

    kept = [
        e for e in trace["traceEvents"] if e.get("ph") != "X" or str(e.get("name", "")).startswith("moe_lora")
    ]
    for e in exchanges:
        kept.append(event("deltas", "compute", e.started_ns, e.finished_ns, e))
        kept.append(event("under way", "request", e.sent_ns, e.taken_ns, e))
        if e.asked_ns < e.finished_ns:
            kept.append(event("engine waits", "exposed", e.asked_ns, e.taken_ns, e))
    trace["traceEvents"] = kept
    path.write_text(json.dumps(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="JSON lines are appended here")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of 16 requests")
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--tiny", action="store_true", help="does it run?")
    options = parser.parse_args()
    size = TINY if options.tiny else QUICK if options.quick else FULL
    rounds, steps = (2, 2) if options.tiny else (7, 8)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), size, options, rounds, steps)


def measure(folder: Path, size: ModelSize, options: argparse.Namespace, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    env = environment(options.out)
    model = write_model(folder / "model", size)
    adapters = tuple(
        (
            f"a{i}",
            str(write_adapter(folder / f"a{i}", size, model, RANKS[i % len(RANKS)], experts=True, seed=i)),
        )
        for i in range(NUM_ADAPTERS)
    )
    config = EngineConfig(
        model_dir=str(model),
        adapters=adapters,
        num_threads=1,
        max_num_seqs=max(options.num_requests),
        max_model_len=256,
        eager=options.tiny,
    )
    names = [name for name, _ in adapters]
    with lora_server_processes(config, LoraServerConfig(capacity=NUM_ADAPTERS)) as joined:
        local, remote = build_engine(config), build_engine(joined)
        for num_requests in options.num_requests:
            cell(local, remote, num_requests, names, size, options, env, rounds, steps)
        if options.trace:
            chrome_trace(remote, Decode(remote, 16, names), options.trace)
        remote.close()
    gc.collect()


def cell(
    local: EngineCore,
    remote: EngineCore,
    num_requests: int,
    names: list[str],
    size: ModelSize,
    options: argparse.Namespace,
    env: dict[str, Any],
    rounds: int,
    steps: int,
) -> None:
    contestants = {
        "base": Decode(local, num_requests, []),
        "local": Decode(local, num_requests, names),
        "remote": Decode(remote, num_requests, names),
    }
    for contestant in contestants.values():
        contestant.decode(steps)
    with observed(remote) as exchanges:
        times = interleave({name: (c.decode, steps, rounds) for name, c in contestants.items()}, rounds)
    result = {
        **shares(contestants["remote"].timed(exchanges)),
        "step_ms": {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()},
        "local_over_base": ratio(times["local"], times["base"]),
        "remote_over_base": ratio(times["remote"], times["base"]),
        "remote_over_local": ratio(times["remote"], times["local"]),
    }
    config = {
        "bench": "overlap",
        "num_requests": num_requests,
        "num_adapters": len(names),
        "lora_ranks": list(RANKS),
        "sites": "experts",
        "threads": {"engine": 1, "server": 1},
        "model": size.describe(),
    }
    append_result(options.out, config=config, result=result, env=env, kind="measured")
    print(summary(num_requests, result), flush=True)


def summary(num_requests: int, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    remote, begun, computed, base = (
        f"{result[name]:.0f} us"
        for name in ("remote_us", "until_started_us", "server_compute_us", "base_between_us")
    )
    over = {name: result[f"{name}_over_base"]["median"] for name in ("local", "remote")}
    return (
        f"{num_requests:3} requests: remote {remote}, begun after {begun}, computed in {computed}, base "
        f"beside it {base}; hidden {result['hidden_share']:.1%} (bound {result['bound_hidden_share']:.1%}, "
        f"goal {GOAL_HIDDEN:.0%}); step over base: local {over['local']:.2f}, remote {over['remote']:.2f}"
    )


if __name__ == "__main__":
    main()
