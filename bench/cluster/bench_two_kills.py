# SPDX-License-Identifier: Apache-2.0
"""Requests of clients while both instances of a server are killed within seconds, on a busy machine.

    python -m bench.cluster.bench_two_kills [--rounds 3] [--busy 2] [--apart-s 4] [--no-spare] [--out FILE]

Starts `moe-lora serve` on the demo model with the demo adapters and two instances, and some processes of
pure computation.  Requests arrive at a fixed rate, whatever the answers.  Five seconds after the first,
SIGKILL ends one instance, and after --apart-s seconds the other one.  One record a round: answers by status
(0: no answer), the share of 503, and the longest time without a good answer.  A large latest_arrival_s
tells that the machine stood still, and not the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.harness.records import Recorder

from .bench_restart import NO_SPARE, WAITS, Server

MODELS = ("upper", "reverse", "double", "model")
TIMEOUT_S = 30.0
FIRST_KILL_S = 5.0
_DIALLED_IN = r"instance instance-\d .*dialled in"


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that only compute."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class Load:
    """Requests at a fixed rate.  answers: (arrival, end, status) in seconds from the first arrival."""

    def __init__(self, url: str, rate_per_s: float, duration_s: float) -> None:
        self._url, self._rate_per_s, self._duration_s = url, rate_per_s, duration_s
        self.answers: list[tuple[float, float, int]] = []
        self.latest_arrival_s = 0.0

    async def run(self, kills: list[tuple[float, int]]) -> None:
        """Send all requests; kills: (time, process)."""
        num_requests = round(self._rate_per_s * self._duration_s)
        limits = httpx.Limits(max_connections=num_requests)
        begin_s = time.monotonic()
        async with httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT_S, trust_env=False, limits=limits
        ) as http:
            requests = [self._send(http, begin_s, number) for number in range(num_requests)]
            await asyncio.gather(*requests, *(_kill(begin_s + at_s, pid) for at_s, pid in kills))

    async def _send(self, http: httpx.AsyncClient, begin_s: float, number: int) -> None:
        arrival_s = number / self._rate_per_s
        await asyncio.sleep(begin_s + arrival_s - time.monotonic())
        self.latest_arrival_s = max(self.latest_arrival_s, time.monotonic() - begin_s - arrival_s)
        body = {
            "model": MODELS[number % len(MODELS)],
            "prompt": "hello=",
            "max_tokens": 16,
            "min_tokens": 16,
            "temperature": 0,
        }
        try:
            status = (await http.post("/v1/completions", json=body)).status_code
        except httpx.HTTPError:
            status = 0
        self.answers.append((arrival_s, time.monotonic() - begin_s, status))

    def result(self) -> dict[str, Any]:
        statuses = Counter(status for _, _, status in self.answers)
        good_s = sorted(end_s for _, end_s, status in self.answers if status == 200)
        last_s = max(end_s for _, end_s, _ in self.answers)
        gaps = [b - a for a, b in zip([0.0, *good_s], [*good_s, last_s], strict=True)]
        waits = sorted(end_s - arrival_s for arrival_s, end_s, status in self.answers if status == 200)
        return {
            "statuses": {str(status): count for status, count in sorted(statuses.items())},
            "share_503": round(statuses[503] / len(self.answers), 4),
            "longest_gap_s": round(max(gaps), 2),
            "p99_s": round(waits[int(0.99 * (len(waits) - 1))], 2) if waits else None,
            "latest_arrival_s": round(self.latest_arrival_s, 2),
        }


async def _kill(at_s: float, pid: int) -> None:
    await asyncio.sleep(at_s - time.monotonic())
    os.kill(pid, signal.SIGKILL)


def newest(log: str, name: str) -> int:
    """The last started process of an instance."""
    return int(re.findall(rf"{name} started \(process (\d+)\)", log)[-1])


def one_round(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    log = server.log.read_text()
    [url] = re.findall(r"Serving \S+ at (http\S+)", log)
    pids = [newest(log, "instance-0"), newest(log, "instance-1")]
    load, offset = Load(url, given.rate, given.duration_s), server.log.stat().st_size
    kills = [(FIRST_KILL_S, pids[0]), (FIRST_KILL_S + given.apart_s, pids[1])]
    with busy(given.busy):
        asyncio.run(load.run(kills))
        result = load.result() | {"load_1_min": round(os.getloadavg()[0], 1)}
    server.wait(offset, _DIALLED_IN, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes of pure computation")
    parser.add_argument("--apart-s", type=float, default=4.0, help="between the kills")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--no-spare", action="store_true")
    parser.add_argument("--out", help="file of the records  [default: none]")
    given = parser.parse_args()
    options = ["--eager", *(["--set", NO_SPARE] if given.no_spare else [])]
    recorder, shares = Recorder(given.out), []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        try:
            server.wait(0, _DIALLED_IN, 2)
            server.wait(0, r"Serving \S+ at")
            for number in range(1, given.rounds + 1):
                if not given.no_spare:
                    server.wait(0, WAITS, number)
                names = ("busy", "apart_s", "rate", "duration_s")
                config = {"bench": "two_kills", "model": "demo", "instances": 2, "options": options}
                result = one_round(server, given)
                recorder(config | {name: getattr(given, name) for name in names}, result)
                print(result, flush=True)
                shares.append(result["share_503"])
        finally:
            server.stop()
    print(f"share of 503: median {statistics.median(shares):.1%}, worst {max(shares):.1%}")


if __name__ == "__main__":
    main()
