# SPDX-License-Identifier: Apache-2.0
"""Rate and memory of reading a trace as a stream, against the bare parser of its file format.

    python -m bench.workload.bench_traces --out bench/results/traces.jsonl

`iter_trace` and `trace_statistics` each read a generated file of each format whole, in separate processes,
for peak resident memory; then `iter_trace` and the bare parser (csv.reader, json.loads) read slices in turn.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.interleave import interleave, ratio
from bench.harness.records import Recorder
from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.traces import iter_trace

GOAL_LINES, GOAL_BYTES = 5_000_000, 1 << 30
NUM_PAIRS = 7
_START = datetime(2024, 5, 10)


def _azure(at_s: float, prompt: int, output: int) -> str:
    moment = (_START + timedelta(seconds=at_s)).isoformat(sep=" ", timespec="microseconds")
    return f"{moment}0+00:00,{prompt},{output}\r\n"  # seven digits, as the real one has


def _burstgpt(at_s: float, prompt: int, output: int) -> str:
    return f"{at_s:.1f},s{prompt % 999},1.5,ChatGPT,{prompt},{output},{prompt + output},Conversation log\n"


def _mooncake(at_s: float, prompt: int, output: int) -> str:
    row = {"timestamp": int(at_s * 1e3), "input_length": prompt, "output_length": output}
    return json.dumps({**row, "hash_ids": list(range(prompt, prompt - (-prompt // 512)))}) + "\n"


def _lmsys(at_s: float, prompt: int, output: int) -> str:
    texts = (("user", "abc " * (prompt // 40 + 1)), ("assistant", "xyz " * (output // 40 + 1)))
    turns = [{"role": role, "content": text} for role, text in texts]
    row = {"conversation_id": f"{at_s}", "model": f"m{prompt % 25}", "conversation": turns}
    return json.dumps(row) + "\n"


FORMATS: dict[str, tuple[str, Callable[[float, int, int], str]]] = {
    "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n", _azure),
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        _burstgpt,
    ),
    "mooncake": ("", _mooncake),
    "lmsys": ("", _lmsys),
}


def write_trace(path: Path, name: str, num_lines: int) -> None:
    """A seeded trace: lengths log-normal, about 8 requests a second."""
    header, line = FORMATS[name]
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(header)
        at_s = 1e-6
        for start in range(0, num_lines, 100_000):
            num = min(100_000, num_lines - start)
            gaps = rng.exponential(0.125, num).tolist()
            prompts = (rng.lognormal(6.5, 1.0, num) + 1).astype(int).tolist()
            outputs = (rng.lognormal(4.5, 1.0, num) + 1).astype(int).tolist()
            for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
                at_s += gap
                file.write(line(at_s, prompt, output))


class Reader:
    """Reads on through the file, from the start after its end; seconds for a number of lines."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start, self._rows = start, start()

    def __call__(self, num_steps: int) -> float:
        begin = time.perf_counter()
        left = num_steps - sum(1 for _ in islice(self._rows, num_steps))
        if left:
            self._rows = self._start()
            sum(1 for _ in islice(self._rows, left))
        return time.perf_counter() - begin


def bare_rows(path: Path) -> Iterator[Any]:
    """The standard library's parse of the file: the ceiling."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            yield from csv.reader(lines)
        else:
            yield from map(json.loads, lines)


def read_whole(path: Path, how: str) -> dict[str, Any]:
    """One pass, in a separate process for its own peak."""
    begin = time.perf_counter()
    if how == "iter_trace":
        num_requests = sum(1 for _ in iter_trace(path))
    else:
        num_requests = trace_statistics(path).num_requests
    wall_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"num_requests": num_requests, "lines_per_s": num_requests / wall_s, "peak_rss_bytes": peak}


def measure(name: str, num_lines: int, folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config, result) of each way of reading one format."""
    path = folder / f"{name}.{'csv' if FORMATS[name][0] else 'jsonl'}"
    write_trace(path, name, num_lines)
    config = {"bench": "traces", "format": name, "num_lines": num_lines, "file_bytes": path.stat().st_size}
    context = multiprocessing.get_context("spawn")
    for how in ("iter_trace", "trace_statistics"):
        with context.Pool(1) as pool:
            yield {**config, "system": how}, pool.apply(read_whole, (path, how))
    slice_lines = max(1, num_lines // (4 * NUM_PAIRS))
    readers = {
        "own": (Reader(lambda: iter_trace(path)), slice_lines, NUM_PAIRS),
        "bare": (Reader(lambda: bare_rows(path)), slice_lines, NUM_PAIRS),
    }
    times = interleave(readers, NUM_PAIRS)
    rates = {f"{who}_lines_per_s": 1 / float(np.median(times[who])) for who in times}
    yield {**config, "system": "pairs"}, {**rates, "share_of_bare": ratio(times["bare"], times["own"])}
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--num-lines", type=int, default=GOAL_LINES)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    record, worst = Recorder(arguments.out), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.formats:
            for config, result in measure(name, arguments.num_lines, Path(folder)):
                record(config, result)
                print(config["format"], config["system"], json.dumps(result))
                worst = max(worst, result.get("peak_rss_bytes", 0))
    met = "met" if worst <= GOAL_BYTES else "missed"
    print(f"goal {GOAL_BYTES >> 20} MiB: {met}; at most {worst / 2**20:.0f} MiB, {arguments.num_lines} lines")


if __name__ == "__main__":
    main()
