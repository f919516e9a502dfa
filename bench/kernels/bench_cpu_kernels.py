"""Speed of the CPU kernels against torch, the papers' kernels, and what the machine can do.

    python -m bench.kernels.bench_cpu_kernels --out FILE.jsonl [--threads 1 2] [--ops lora linear]

Each case interleaves its contestants with a read and a copy of a large buffer and a GEMM (1024 cubed, the
faster of torch's and ours), 8 times; ratios are medians of the per-round ratios, spread is their quartiles.
Weights are cycled through so that none is found in a cache. The bound of a call is the longer of its bytes at
the read bandwidth and its flops at the GEMM rate of the same round; those of expand, which multiplies fp32,
at the rate in fp32. With one thread the clock is the thread's processor time, which other processes on the
machine stretch less; with more it is wall time. One JSON line per case: {config, result, env}. Takes less
than 5 minutes per thread count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness.records import environment
from moe_lora.kernels.cpu import cpu

from .cpu_kernel_cases import EIGHT_ADAPTERS, MIXED_RANKS, SITES, Case, expert_case, linear_case, lora_case

GEMM_ROWS = (1, 8, 16, 64, 2048)
LORA_ROWS = (1, 8, 16, 32, 64, 2048)
ROUNDS = 8


class Limits(NamedTuple):
    """Bytes read and copied (both ways) per second, flop per second in the case's dtype and in fp32."""

    read: float
    copy: float
    gemm: float
    gemm_fp32: float

    def memory_s(self, case: Case) -> float:
        return case.bytes / self.read

    def arithmetic_s(self, case: Case) -> float:
        return case.flops / self.gemm + case.fp32_flops / self.gemm_fp32


class Ceilings:
    """What this machine reads, copies and multiplies, measured anew in each round."""

    def __init__(self) -> None:
        self._source = torch.ones(32 << 20, dtype=torch.int64)
        self._target = torch.empty_like(self._source)
        self._square = torch.randn(1024, 1024)

    def measure(self, clock: Callable[[], float], dtype: torch.dtype) -> Limits:
        """All of them, once."""
        read_s = _seconds(clock, self._source.sum)
        copy_s = _seconds(clock, lambda: self._target.copy_(self._source))
        flop_per_s = []
        for square in (self._square.to(dtype), self._square):
            torch_s = _seconds(clock, partial(torch.mm, square, square.T))
            own_s = _seconds(clock, partial(cpu.linear, square, square, None))
            flop_per_s.append(2 * 1024**3 / min(torch_s, own_s))
        size = self._source.nbytes
        return Limits(size / read_s, 2 * size / copy_s, *flop_per_s)


def _seconds(clock: Callable[[], float], call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def measure(case: Case, ceilings: Ceilings, dtype: torch.dtype) -> dict[str, object]:
    """Interleaved rounds; seconds per call are those of a pass over all copies."""
    error = case.check()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def pass_over(call: Callable[[int], object]) -> None:
        for copy in range(case.copies):
            call(copy)

    limits: list[Limits] = []
    times: dict[str, list[float]] = {name: [] for name in case.contestants}
    for round_number in range(ROUNDS + 1):
        limit = ceilings.measure(clock, dtype)
        for name, call in case.contestants.items():
            seconds = _seconds(clock, partial(pass_over, call)) / case.copies
            if round_number:
                times[name].append(seconds)
        if round_number:
            limits.append(limit)
    own = times["own"]
    typical = Limits(*(statistics.median(values) for values in zip(*limits, strict=True)))
    bounds = [max(limit.memory_s(case), limit.arithmetic_s(case)) for limit in limits]
    flops = case.flops + case.fp32_flops
    peers = {name: _spread(peer, own) for name, peer in times.items() if name != "own"}
    return {
        "relative_error": error,
        "own_us": statistics.median(own) * 1e6,
        "own_best_us": min(own) * 1e6,
        "own_gb_per_s": case.bytes / statistics.median(own) / 1e9,
        "own_gflop_per_s": flops / statistics.median(own) / 1e9,
        "read_gb_per_s": typical.read / 1e9,
        "copy_gb_per_s": typical.copy / 1e9,
        "gemm_gflop_per_s": typical.gemm / 1e9,
        "gemm_fp32_gflop_per_s": typical.gemm_fp32 / 1e9,
        "bound_by": "memory" if typical.memory_s(case) > typical.arithmetic_s(case) else "arithmetic",
        "of_bound": _spread(bounds, own),
        "times_faster_than": peers,
    }


def _spread(numerators: list[float], denominators: list[float]) -> list[float]:
    """Quartiles of the ratio, round by round."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def machine() -> dict[str, object]:
    """Where this was measured, and how busy it was."""
    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "measured": True,
        "cpu": models[0] if models else platform.machine(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall",
        "isa": cpu.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "note": "read_gb_per_s is torch's sum over a 256 MiB buffer; triples are quartiles",
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def report(case: Case, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    peers = ", ".join(f"{ratios[1]:.2f} x {name}" for name, ratios in result["times_faster_than"].items())
    mixed = " mixed" if case.config.get("lora_ranks") == MIXED_RANKS else ""
    return (
        f"{case.config['op']:13} {case.config.get('site', ''):7}{mixed:6} {case.config['rows']:4} rows "
        f"{str(case.config['dtype'])[6:]:8} {torch.get_num_threads()} threads {result['own_us']:7.0f} us: "
        f"{result['own_gb_per_s']:5.1f} GB/s, {result['own_gflop_per_s']:4.0f} GFLOP/s, "
        f"{result['of_bound'][1]:4.2f} of the {result['bound_by']} bound; {peers}"
    )


def cases(ops: list[str]) -> Iterator[tuple[torch.dtype, Case]]:
    """Every case, made when its turn comes."""
    for dtype in (torch.bfloat16, torch.float32):
        makers: list[Callable[..., Case]] = []
        if "linear" in ops:
            makers += [partial(make, rows) for make in (linear_case, expert_case) for rows in GEMM_ROWS]
        if "lora" in ops:
            makers += [
                partial(lora_case, site, rows, lora_ranks=EIGHT_ADAPTERS)
                for site in SITES.values()
                for rows in LORA_ROWS
            ]
            makers += [partial(lora_case, site, 20, lora_ranks=MIXED_RANKS) for site in SITES.values()]
        for make in makers:
            yield dtype, make(dtype=dtype, generator=torch.Generator().manual_seed(0))


def main() -> None:
    """Run all cases, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--ops", nargs="+", choices=("linear", "lora"), default=["linear", "lora"])
    args = parser.parse_args()
    env = environment(args.out)
    ceilings = Ceilings()
    with args.out.open("w") as out:
        for threads in args.threads:
            torch.set_num_threads(threads)
            for dtype, case in cases(args.ops):
                result = measure(case, ceilings, dtype)
                record = {"config": case.config, "result": result, "env": env | machine()}
                out.write(json.dumps(record) + "\n")
                out.flush()
                print(report(case, result), file=sys.stderr)


if __name__ == "__main__":
    main()
