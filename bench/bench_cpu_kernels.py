"""Decode speed of the CPU kernels against torch and against the memory's read bandwidth.

    python bench/bench_cpu_kernels.py --out bench/results/cpu_kernels.jsonl [--threads 1 2]

Each case interleaves the kernel, torch, and a read of a large buffer, >= 7 times; ratios are medians of the
per-round ratios, spread is their quartiles. Weights are cycled through so that none is found in a cache.
With one thread the clock is the thread's processor time, which other processes on the machine stretch less;
with more it is wall time. One JSON line per case: {config, result, env}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cpu_kernel_cases import SITES, Case, expert_case, linear_case, lora_case

from moe_lora.kernels import cpu

ROWS = (1, 8, 16, 64)
ROUNDS = 9


def measure(case: Case, buffer: torch.Tensor) -> dict[str, object]:
    """Interleaved rounds of read, own, peer; seconds per call are those of a pass over all copies."""
    error = case.check()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(call: Callable[[int], object]) -> float:
        start = clock()
        for copy in range(case.copies):
            call(copy)
        return (clock() - start) / case.copies

    reads, owns, peers = [], [], []
    for _ in range(ROUNDS + 1):
        start = clock()
        buffer.sum()
        reads.append(buffer.nbytes / (clock() - start))
        owns.append(seconds(case.own))
        peers.append(seconds(case.peer))
    reads, owns, peers = reads[1:], owns[1:], peers[1:]
    of_read = sorted(case.bytes / own / read for own, read in zip(owns, reads, strict=True))
    speedup = sorted(peer / own for own, peer in zip(owns, peers, strict=True))
    own = statistics.median(owns)
    return {
        "relative_error": error,
        "own_us": own * 1e6,
        "own_best_us": min(owns) * 1e6,
        "own_gb_per_s": case.bytes / own / 1e9,
        "own_best_gb_per_s": case.bytes / min(owns) / 1e9,
        "own_gflop_per_s": case.flops / own / 1e9,
        "read_gb_per_s": statistics.median(reads) / 1e9,
        "read_best_gb_per_s": max(reads) / 1e9,
        "of_read_bandwidth": statistics.median(of_read),
        "of_read_bandwidth_quartiles": [of_read[ROUNDS // 4], of_read[-1 - ROUNDS // 4]],
        "times_faster_than_peer": statistics.median(speedup),
        "times_faster_quartiles": [speedup[ROUNDS // 4], speedup[-1 - ROUNDS // 4]],
    }


def environment() -> dict[str, object]:
    """Where this was measured."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "commit": commit.stdout.strip(),
        "measured": True,
        "cpu": models[0] if models else platform.machine(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall",
        "isa": cpu.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "note": "machine shared with other work: noisy; read_gb_per_s is torch's sum over a 256 MiB buffer",
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def report(case: Case, result: dict[str, object]) -> str:
    """One line for the terminal."""
    return (
        f"{case.config['op']:14} {case.config.get('site', ''):8} {case.config['rows']:3} rows "
        f"{case.config['dtype']} {torch.get_num_threads()} threads: {result['own_gb_per_s']:5.1f} GB/s "
        f"(best {result['own_best_gb_per_s']:5.1f}) {result['own_gflop_per_s']:5.0f} GFLOP/s, "
        f"{result['of_read_bandwidth']:4.2f} of reading, {result['times_faster_than_peer']:.2f} x torch"
    )


def main() -> None:
    """Run all cases, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    args = parser.parse_args()
    buffer = torch.ones(64 << 20)
    makers = (
        linear_case,
        expert_case,
        partial(lora_case, SITES["qkv"]),
        partial(lora_case, SITES["gate_up"]),
    )
    cases = itertools.product(args.threads, (torch.bfloat16, torch.float32), ROWS, makers)
    with args.out.open("w") as out:
        for threads, dtype, rows, make in cases:
            torch.set_num_threads(threads)
            case = make(rows, dtype, torch.Generator().manual_seed(rows))
            result = measure(case, buffer)
            out.write(json.dumps({"config": case.config, "result": result, "env": environment()}) + "\n")
            out.flush()
            print(report(case, result), file=sys.stderr)


if __name__ == "__main__":
    main()
