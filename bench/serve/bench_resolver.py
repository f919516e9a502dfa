# SPDX-License-Identifier: Apache-2.0
"""A million adapter names behind one server: memory, time to first token, and hits under Zipf.

    python -m bench.serve.bench_resolver [--names 1000000] [--requests 4000] [--out FILE]

The names are links to the demo's adapters, in folders of a thousand.  One of two instances is killed after
half of the requests.  Times are at the client, one token an answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.harness.records import ROOT, Recorder
from demo.tasks import prompt_for

from .served_tree import ServedTree

PER_FOLDER = 1000
TIMEOUT_S = 60.0
WORDS = ("--eager", "--threads", "1", "--instances", "2")
LOADED = r"adapter (\S+ version \d+): rank"
"""In the log of each instance, once a load."""


def write_names(folder: Path, num_names: int) -> None:
    """Links to the demo's adapters of rank 2, named as `name_of`."""
    contents = sorted((ROOT / "demo" / "adapters").glob("*-r2"))
    for number in range(num_names):
        if number % PER_FOLDER == 0:
            (folder / f"{number // PER_FOLDER:04d}").mkdir(parents=True)
        os.symlink(contents[number % len(contents)], folder / name_of(number))


def name_of(number: int) -> str:
    return f"{number // PER_FOLDER:04d}/{number:07d}"


def tree_bytes(pid: int) -> int:
    """Resident private and shared bytes of a process and its children."""
    root = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))


class Client:
    """Sends requests, and knows which of its names answered before.  failed: names without an answer."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=64)
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False, limits=limits
        )
        self.failed: list[str] = []

    def loaded(self) -> set[str]:
        while (answer := self._http.get("/v1/adapters")).status_code != 200:
            time.sleep(0.5)
        return {one["id"] for one in answer.json()["data"]}

    def seconds(self, name: str) -> float:
        """Until the answer of one token."""
        body = {"model": name, "prompt": prompt_for("abc"), "max_tokens": 1, "temperature": 0}
        start_s = time.perf_counter()
        try:
            status = self._http.post("/v1/completions", json=body).status_code
        except httpx.HTTPError:
            status = 0
        if status != 200:
            self.failed.append(name)
        return time.perf_counter() - start_s


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max_ms": 1e3 * ordered[-1],
    }


def beside_cold(client: Client, cold: list[str], rounds: int) -> dict[str, Any]:
    """Times of one warm name, by turns alone and beside loads of cold names; and of the cold names."""
    warm = cold.pop()
    client.seconds(warm)
    times: dict[str, list[float]] = {"warm_alone": [], "warm_beside_cold": [], "cold": []}
    for part in (cold[one::rounds] for one in range(rounds)):
        times["warm_alone"] += [client.seconds(warm) for _ in range(10)]
        over = threading.Event()

        def load(names: Any = part, done: threading.Event = over) -> None:
            times["cold"] += [client.seconds(name) for name in names]
            done.set()

        thread = threading.Thread(target=load)
        thread.start()
        while not over.is_set():
            times["warm_beside_cold"].append(client.seconds(warm))
        thread.join()
    return {name: quantiles(one) for name, one in times.items()}


def zipf_run(client: Client, numbers: list[int], threads: int, kill: Any) -> dict[str, Any]:
    """Send all; `kill` runs after half."""
    half = len(numbers) // 2
    with ThreadPoolExecutor(threads) as pool:
        times = list(pool.map(client.seconds, map(name_of, numbers[:half])))
        failed_before = len(client.failed)
        kill()
        times += pool.map(client.seconds, map(name_of, numbers[half:]))
    return {
        **quantiles(times),
        "num_failed_before_kill": failed_before,
        "num_failed_after_kill": len(client.failed) - failed_before,
        "num_distinct": len(set(numbers)),
    }


def kill_instance(pid: int) -> None:
    """kill -9 of the instance's process."""
    for one in psutil.Process(pid).children(recursive=True):
        if any("instance-0" in word for word in one.cmdline()):
            one.send_signal(signal.SIGKILL)
            return
    raise RuntimeError("no process of the server is instance-0")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--cold", type=int, default=200)
    parser.add_argument("--resolved", type=int, default=500, help="sources.max_resolved")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="write the names here, if absent, and keep them")
    parser.add_argument("--out", help="append a record here")
    options = parser.parse_args()
    record = Recorder(options.out)
    weights = np.arange(1, options.names + 1) ** -options.zipf
    drawn = np.random.default_rng(0).choice(options.names, options.requests, p=weights / weights.sum())
    with tempfile.TemporaryDirectory() as folder:
        names = Path(options.folder or Path(folder) / "names")
        if not names.exists():
            write_names(names, options.names)
        settings = (f"sources.resolver={names}", f"sources.max_resolved={options.resolved}")
        words = [word for one in settings for word in ("--set", one)]
        model = str(ROOT / "demo" / "model")
        with ServedTree(ROOT, sys.executable, model, *WORDS, *words) as server:
            client, pid = Client(server.port), server.process.pid
            client.seconds("model")
            started = tree_bytes(pid)
            cold = [name_of(options.names - 1 - number) for number in range(options.cold + 1)]
            probes = beside_cold(client, cold, options.rounds)
            probed, num_loads = tree_bytes(pid), len(server.logged(LOADED))
            run = zipf_run(client, drawn.tolist(), options.threads, lambda: kill_instance(pid))
            loads = len(server.logged(LOADED)) - num_loads
            result = {
                **probes,
                "zipf": run,
                "hit_rate": 1 - loads / options.requests,
                "num_loads": loads,
                "rss_mb_started": started / 1e6,
                "rss_mb_probed": probed / 1e6,
                "rss_mb_at_end": tree_bytes(pid) / 1e6,
                "num_served_at_end": len(client.loaded()),
                "load_average": os.getloadavg()[0],
            }
    record({key: value for key, value in vars(options).items() if key not in ("out", "folder")}, result)
    print(result)


if __name__ == "__main__":
    main()
