# SPDX-License-Identifier: Apache-2.0
"""Do memory, handles, threads and files stay as they are while a server is used in every way for long?

    python -m bench.hostile.bench_soak [--out FILE] [--minutes 30] [--serve OPTIONS] [--quick]

`moe-lora serve` on the demo's model under the load of `bench.hostile.mixed`: streams, aborts, mistakes, large
bodies, and adapters loaded, replaced and unloaded, each with content that nobody had before.  Every two
seconds each process's memory, open files and threads are noted, with what lies in /dev/shm, TMPDIR and the
state folder.  From minute 5 on a line is laid through each: its slope, with the error that ten parts of the
time say it has.  The exit status is 1 if anything grew, an answer was wrong, or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.records import ROOT, Recorder
from bench.harness.tables import table

from .bench_hostile import Server
from .mixed import MixedLoad

EVERY_S = 2.0
SETTLE_SHARE = 1 / 6
"""Of the time: what is not looked at; five minutes of thirty."""
NUM_PARTS = 10
NUM_ERRORS = 2.31
"""Standard errors that a slope may have by chance: 97.5 % of Student's t with 8 degrees of freedom."""
NEGLIGIBLE = {"rss_mb": 0.01, "files": 0.0, "threads": 0.0, "entries": 0.0, "mb": 0.01}
"""Growth that is none whatever its error, as a share of the mean; of a count, and in MB, half of one."""
NUM_CLIENTS = 16
Samples = Mapping[str, Sequence[tuple[float, float]]]
"""By "what measure": (seconds, value)."""


class Sampler(threading.Thread):
    """Notes what the server's processes have, until `stop`."""

    def __init__(self, server: Server, folders: Mapping[str, Path]) -> None:
        super().__init__(daemon=True)
        self.samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._server, self._folders, self._over = server, folders, threading.Event()

    def run(self) -> None:
        began_s = time.monotonic()
        while not self._over.wait(EVERY_S):
            now_s = time.monotonic() - began_s
            for name, value in self._values().items():
                self.samples[name].append((now_s, value))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        processes = processes_of(self._server)
        found["processes entries"] = len(processes)
        for role, pid in processes.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                found[f"{role} files"] = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:  # it ended
                continue
            for field, name, unit in (("VmRSS", "rss_mb", 1000), ("Threads", "threads", 1)):
                number = re.search(rf"{field}:\s+(\d+)", status)
                assert number is not None
                found[f"{role} {name}"] = int(number[1]) / unit
        for name, folder in self._folders.items():
            sizes = [_size(path) for path in folder.rglob("*")]
            found |= {f"{name} entries": len(sizes), f"{name} mb": sum(sizes) / 1e6}
        return found


def processes_of(server: Server) -> dict[str, int]:
    """Process ids by role: those that the log names, the server, and what each started (large bodies)."""
    found = {"server": server.process.pid}
    found |= {name: int(pid) for name, pid in re.findall(r"(\S+) started \(process (\d+)\)", server.log())}
    for role, pid in list(found.items()):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                if int(child) not in found.values():
                    found[f"{role}'s child"] = int(child)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def growth(samples: Sequence[tuple[float, float]], from_s: float) -> dict[str, Any]:
    """The line through samples from then on.

    per_hour: its slope.  error: of that, from the residuals of NUM_PARTS means.  grew: over the time.
    """
    found = np.array([one for one in samples if one[0] >= from_s])
    parts = np.array([part.mean(axis=0) for part in np.array_split(found, NUM_PARTS)])
    times, values = parts[:, 0], parts[:, 1]
    slope, start = np.polyfit(times, values, 1)
    left = values - (slope * times + start)
    error = float(np.sqrt((left**2).sum() / (NUM_PARTS - 2) / ((times - times.mean()) ** 2).sum()))
    grew = slope * (found[-1, 0] - found[0, 0])
    facts = {"mean": found[:, 1].mean(), "first": values[0], "last": values[-1], "most": found[:, 1].max()}
    facts |= {"per_hour": slope * 3600, "error_per_hour": error * 3600, "grew": grew}
    return {name: round(float(value), 4) for name, value in facts.items()}


def is_flat(measure: str, found: Mapping[str, float]) -> bool:
    """Whether what grew may be chance, or is next to nothing."""
    small = max(NEGLIGIBLE[measure] * found["mean"], 0.5)
    return found["grew"] <= small or found["per_hour"] <= NUM_ERRORS * found["error_per_hour"]


def soak(server: Server, folder: Path, minutes: float, seed: int) -> tuple[MixedLoad, Samples]:
    """Load the server for so long."""
    load = MixedLoad(server.port, folder, seed)
    named = {"shm": Path("/dev/shm"), "tmp": folder / "tmp", "state": folder / "state"}
    sampler = Sampler(server, named)

    async def run() -> None:
        asyncio.get_running_loop().call_later(minutes * 60, load.stop)
        await load.run(NUM_CLIENTS)

    sampler.start()
    try:
        asyncio.run(run())
    finally:
        sampler.stop()
    return load, sampler.samples


def left_behind(folder: Path, pids: Sequence[int], before: set[str]) -> list[str]:
    """Processes, files and shared memory that outlived the server."""
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    found = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    files = [path for name in ("tmp", "state") for path in (folder / name).rglob("*")]
    found += [str(path) for path in files if "torchinductor" not in str(path)]  # torch's cache stays
    return found + [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--serve", default="--instances 2", help="further options of moe-lora serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="half a minute: does it run?")
    parser.add_argument("--out", help="append a record here")
    options = parser.parse_args(arguments)
    record, minutes = Recorder(options.out), 0.5 if options.quick else options.minutes
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        for below in ("tmp", "state"):
            (folder / below).mkdir()
        words = ["--max-loras", "6", "--set", f"engine.state_dir={folder / 'state'}", *options.serve.split()]
        server = Server(ROOT, sys.executable, words, TMPDIR=str(folder / "tmp"))
        with server:
            load, samples = soak(server, folder, minutes, options.seed)
            pids = list(processes_of(server).values())
        left = left_behind(folder, pids, before)
    rows = []
    for name, found in sorted(samples.items()):
        if len(found) >= NUM_PARTS:
            line = growth(found, minutes * 60 * SETTLE_SHARE)
            flat = is_flat(name.rpartition(" ")[2], line)
            rows.append({"what": name, **line, "flat": flat})
    print(table(rows, f"{minutes:g} minutes of mixed load"))
    print(json.dumps(dict(sorted(load.counts.items()))))
    tracebacks = server.log().count("Traceback")
    for complaint in [*load.complaints[:20], *(f"left: {one}" for one in left)]:
        print("WRONG:", complaint)
    result = {"rows": rows, "counts": dict(load.counts), "complaints": load.complaints[:20], "left": left}
    config = {"minutes": minutes, "serve": options.serve, "seed": options.seed, "clients": NUM_CLIENTS}
    record(config, result | {"num_complaints": len(load.complaints), "tracebacks": tracebacks})
    grew = [row["what"] for row in rows if not row["flat"]]
    print(f"grew: {grew or 'nothing'}; wrong: {len(load.complaints)}; left: {len(left)}; {tracebacks=}")
    return 1 if grew or load.complaints or left or tracebacks else 0


if __name__ == "__main__":
    sys.exit(main())
