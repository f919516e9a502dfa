# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of the transports between two processes, against memcpy and against each other.

    python -m bench.transport.bench_transport --out bench/results/transport.jsonl [--quick]

bench/README.md describes the measurements.  One JSON line per transport, mode and size, one per transport for
the processor time of an idle waiter; the goals are printed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.harness.records import environment
from moe_lora.dist.transport import RemoteWindow, Transport, Window, make_transport, shm_library
from moe_lora.report.results import append_result

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
HEADLINE_BYTES = 4 << 20
MODES = ("push", "pull")
STREAM_PUTS = 8
TIMEOUT_S = 60.0


class End:
    """One process's half of a ping-pong: its window, and the other end's."""

    def __init__(self, kind: str, name: str, largest_bytes: int) -> None:
        self.transport: Transport = make_transport(kind, name=name)
        self.window: Window = self.transport.alloc("bench", largest_bytes, 3)
        self.remote: RemoteWindow
        self.data = torch.ones(largest_bytes, dtype=torch.uint8)
        self.value = self.puts = 0

    def send(self, mode: str, num_bytes: int, value: int) -> None:
        """push: the data with the signal.  pull: the signal for data here."""
        data = self.data[:num_bytes] if mode == "push" else None
        self.transport.put_signal(self.remote, 0, data, 0, value)

    def receive(self, mode: str, num_bytes: int) -> None:
        """Await the next signal; pull: fetch the data."""
        self.value += 1
        self.transport.signal_wait_until(self.window, 0, self.value, TIMEOUT_S)
        if mode == "pull":
            self.transport.get(self.remote, 0, self.data[:num_bytes])

    def ping(self, mode: str, num_bytes: int) -> None:
        """A round trip with the data both ways."""
        self.send(mode, num_bytes, self.value + 1)
        self.receive(mode, num_bytes)
        self.transport.fence(self.remote)

    def pong(self, mode: str, num_bytes: int) -> None:
        """The other half."""
        self.receive(mode, num_bytes)
        self.send(mode, num_bytes, self.value)

    def stream(self, num_bytes: int) -> None:
        """Puts back to back, without waits, until all have arrived."""
        for _ in range(STREAM_PUTS):
            self.puts += 1
            self.transport.put_signal(self.remote, 0, self.data[:num_bytes], 1, self.puts)
        self.transport.quiet(self.remote)

    def idle(self, wall_s: float) -> float:
        """Processor seconds per second of an idle wait."""
        before, start = time.process_time(), time.monotonic()
        self.transport.wait_any([(self.window, 2, 1)], wall_s)
        return (time.process_time() - before) / (time.monotonic() - start)


def serve(pipe: Connection, largest_bytes: int) -> None:
    """The second process: obeys until told to stop."""
    torch.set_num_threads(1)
    ends: dict[str, End] = {}
    while True:
        while not pipe.poll(1e-3):  # a medium may get on only while both ends wait
            for end in ends.values():
                end.transport.wait_any([], 0.0)
        command, *arguments = pipe.recv()
        if command == "stop":
            for end in ends.values():
                end.transport.close()
            return
        if command == "join":
            kind, name = arguments
            ends[kind] = End(kind, name, largest_bytes)
            pipe.send(ends[kind].window.descriptor())
        elif command == "attach":
            kind, descriptor = arguments
            pipe.send("attaching")
            ends[kind].remote = ends[kind].transport.attach(descriptor)
        elif command == "pong":
            kind, mode, num_bytes, count = arguments
            for _ in range(count):
                ends[kind].pong(mode, num_bytes)
            ends[kind].transport.fence(ends[kind].remote)
        elif command == "idle":
            kind, wall_s = arguments
            pipe.send(ends[kind].idle(wall_s))


def connect(kind: str, pipe: Connection, largest_bytes: int) -> End:
    """Both ends of a transport, each attached to the other."""
    here = End(kind, "bench/0", largest_bytes)
    pipe.send(("join", kind, "bench/1"))
    theirs = pipe.recv()
    pipe.send(("attach", kind, here.window.descriptor()))
    pipe.recv()
    here.remote = here.transport.attach(theirs)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        here.transport.wait_any([], 0.0)
    return here


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of count calls."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def copy_stream(source: torch.Tensor, target: torch.Tensor) -> None:
    """As many copies between private buffers as a stream has puts, by the same function."""
    for _ in range(STREAM_PUTS):
        shm_library.free.moe_lora_shm_copy(target.data_ptr(), source.data_ptr(), source.nbytes)


def measure_size(
    ends: dict[str, End], pipe: Connection, num_bytes: int, rounds: int, trips: int
) -> dict[str, Any]:
    """One-way seconds per (transport, mode), put seconds per transport, memcpy seconds: lists over rounds."""
    one_way: dict[tuple[str, str], list[list[float]]] = {(k, m): [] for k in ends for m in MODES}
    put: dict[str, list[float]] = {kind: [] for kind in ends}
    memcpy: list[float] = []
    private = torch.ones(2, num_bytes, dtype=torch.uint8)
    for turn in range(rounds + 1):
        memcpy.append(statistics.median(timed(lambda: copy_stream(*private), trips)) / STREAM_PUTS)
        for kind, end in ends.items():
            for mode in MODES:
                pipe.send(("pong", kind, mode, num_bytes, trips))
                trip = timed(lambda e=end, m=mode: e.ping(m, num_bytes), trips)  # type: ignore[misc]
                one_way[kind, mode].append([seconds / 2 for seconds in trip])
            stream = timed(lambda e=end: e.stream(num_bytes), trips)  # type: ignore[misc]
            put[kind].append(statistics.median(stream) / STREAM_PUTS)
        if turn == 0:  # warm-up
            kept: tuple[list[Any], ...] = (memcpy, *one_way.values(), *put.values())
            for values in kept:
                values.clear()
    return {"one_way": one_way, "put": put, "memcpy": memcpy}


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and number."""
    ordered = sorted(values)
    count = len(ordered)
    return {
        "median": statistics.median(ordered),
        "low": ordered[count // 4],
        "high": ordered[-1 - count // 4],
        "num_pairs": count,
    }


def summarise(found: dict[str, Any], kind: str, mode: str, num_bytes: int) -> dict[str, Any]:
    """The result of one transport, mode and size; ratios are taken round by round."""
    rounds = [statistics.median(trips) for trips in found["one_way"][kind, mode]]
    every = sorted(seconds for trips in found["one_way"][kind, mode] for seconds in trips)
    result: dict[str, Any] = {
        "one_way_us": statistics.median(rounds) * 1e6,
        "one_way_p99_us": every[int(0.99 * (len(every) - 1))] * 1e6,
        "slower_than": {},
    }
    for (other, its_mode), trips in found["one_way"].items():
        pairs = zip(rounds, (statistics.median(t) for t in trips), strict=True)
        result["slower_than"][f"{other} {its_mode}"] = spread([own / peer for own, peer in pairs])
    if mode == "push":
        result["put_gb_per_s"] = num_bytes / statistics.median(found["put"][kind]) / 1e9
        result["memcpy_gb_per_s"] = num_bytes / statistics.median(found["memcpy"]) / 1e9
        shares = zip(found["memcpy"], found["put"][kind], strict=True)
        result["share_of_memcpy"] = spread([copy / put for copy, put in shares])
    return result


def goals(records: dict[tuple[str, str], dict[str, Any]], idle: dict[str, float]) -> list[str]:
    """The goals, met or missed."""
    push = records["shm", "push"]
    share, rests = push["share_of_memcpy"]["median"], idle["shm"] < 0.03
    lines = [
        f"shm put at 4 MB: {share:.0%} of memcpy, goal >= 80 %: {'met' if share >= 0.8 else 'MISSED'}",
        f"idle shm waiter: {idle['shm']:.2%} of a core, goal < 3 %: {'met' if rests else 'MISSED'}",
    ]
    for kind in idle:
        ratio = records[kind, "pull"]["slower_than"][f"{kind} push"]["median"]
        lines.append(
            f"{kind} pull at 4 MB takes {ratio:.2f} x push (InfiniLoRA reports 2.63 x on InfiniBand)"
        )
    ratio = records["gloo", "push"]["slower_than"]["shm push"]["median"]
    lines.append(f"gloo two-sided at 4 MB takes {ratio:.2f} x shm one-sided")
    return lines


def main() -> None:
    """Measure all, write JSON lines, print the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly what is seen")
    args = parser.parse_args()
    rounds, idle_s = (3, 1.0) if args.quick else (9, 5.0)
    torch.set_num_threads(1)
    kinds = ["shm", "gloo"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, max(SIZES)), daemon=True)
    child.start()
    env = environment(args.out)
    ends = {kind: connect(kind, pipe, max(SIZES)) for kind in kinds}
    headline: dict[tuple[str, str], dict[str, Any]] = {}
    for num_bytes in SIZES:
        trips = max(5, min(200, (32 << 20) // num_bytes)) // (4 if args.quick else 1)
        found = measure_size(ends, pipe, num_bytes, rounds, max(3, trips))
        for kind in kinds:
            for mode in MODES:
                result = summarise(found, kind, mode, num_bytes)
                config = {"transport": kind, "mode": mode, "bytes": num_bytes, "quick": args.quick}
                append_result(args.out, config=config, result=result, env=env, kind="measured")
                bandwidth = f"{result['put_gb_per_s']:6.2f} GB/s" if mode == "push" else ""
                print(
                    f"{kind:5} {mode} {num_bytes:9} bytes {result['one_way_us']:9.1f} us {bandwidth}",
                    flush=True,
                )
                if num_bytes == HEADLINE_BYTES:
                    headline[kind, mode] = result
    idle = {}
    for kind in kinds:
        pipe.send(("idle", kind, idle_s))
        idle[kind] = pipe.recv()
        config = {"transport": kind, "mode": "idle wait", "seconds": idle_s, "quick": args.quick}
        append_result(args.out, config=config, result={"share_of_core": idle[kind]}, env=env, kind="measured")
    pipe.send(("stop",))
    print("\n".join(goals(headline, idle)))
    for end in ends.values():
        end.transport.close()
    child.join()


if __name__ == "__main__":
    main()
