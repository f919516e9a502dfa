# SPDX-License-Identifier: Apache-2.0
"""A thousand streams at once, and ten thousand open connections without a request, on one front end.

    python -m bench.hostile.bench_crowd [--out FILE] [--streams 1000] [--connections 10000] [--quick]

`moe-lora serve` on the demo's model.  A row for each state: idle, the streams, the connections (each after
one request: without any it would be closed) beside 16 streams, and after all have closed.  A row has the
front end's memory, open files, processor time, /live's response time, and the number of streams equal to the
first.  Exit status 1 for a different stream, a refusal, or a file left open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.request import urlopen

from bench.harness.records import ROOT, Recorder
from bench.harness.tables import table
from moe_lora.core.host import allow_many_files

from .attacker import Attacker
from .bench_hostile import NUM_STREAMS, Server
from .mixed import MODELS, Answer, ask

PER_ADDRESS = 1000
"""Connections of one client: the default limit is 1 024."""
PROBE_EVERY_S = 0.05
HOLD_S = 10.0
SETTLE_S = 3.0


class Probe(threading.Thread):
    """Asks /live again and again: waits_s is how long each answer took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.waits_s: list[float] = []
        self._url, self._over = f"http://127.0.0.1:{port}/live", threading.Event()

    def run(self) -> None:
        while not self._over.wait(PROBE_EVERY_S):
            began_s = time.monotonic()
            urlopen(self._url, timeout=120).close()
            self.waits_s.append(time.monotonic() - began_s)

    def stop(self) -> None:
        self._over.set()
        self.join()


def streams_at_once(port: int, num_streams: int, first: dict[str, str]) -> Counter[str]:
    """num_streams streams over the demo's models, and their outcomes.  first: each model's answer, filled
    in.
    """

    async def one(number: int) -> tuple[str, Answer]:
        model = MODELS[number % len(MODELS)]
        body = {"model": model, "prompt": "the quick brown fox:", "max_tokens": 16, "temperature": 0}
        content = json.dumps({**body, "ignore_eos": True, "stream": True}).encode()
        return model, await ask(port, "/v1/completions", content, address="127.0.0.3")

    async def all_of_them() -> list[tuple[str, Answer]]:
        return await asyncio.gather(*map(one, range(num_streams)))

    found: Counter[str] = Counter()
    for model, answer in asyncio.run(all_of_them()):
        right = answer.status == 200 and answer.text == first.setdefault(model, answer.text)
        found["right" if right else f"wrong {answer.status}"] += 1
    return found


def open_connections(attacker: Attacker, num_connections: int) -> int:
    """Open num_connections connections with a request each; returns the number kept by the server."""
    held, start = [], b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
    for number in range(0, num_connections, PER_ADDRESS):
        num = min(PER_ADDRESS, num_connections - number)
        held += attacker.hold(num, start, address=f"127.0.1.{1 + number // PER_ADDRESS}")
        for one in held[-num:]:
            if not one.recv(4096).startswith(b"HTTP/1.1 200"):
                attacker.statuses["refused"] += 1
    time.sleep(HOLD_S)
    for one in held:
        one.setblocking(False)
    return sum(_is_open(one) for one in held)


def _is_open(one: Any) -> bool:
    try:
        return bool(one.recv(4096))  # nothing should come
    except BlockingIOError:
        return True
    except OSError:
        return False


def measure(server: Server, what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One row."""
    probe = Probe(server.port)
    began_s, cpu_s = time.monotonic(), server.cpu_s()
    probe.start()
    try:
        found = work()
        files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.front_ends())
        rss_mb = server.rss_mb()
    finally:
        probe.stop()
    wall_s = time.monotonic() - began_s
    row = {"what": what, "s": round(wall_s, 1), "rss_mb": round(rss_mb, 1), "files": files}
    row |= {"cpu_s": round(server.cpu_s() - cpu_s, 2)}
    return row | {"live_longest_ms": round(1e3 * max(probe.waits_s, default=0.0), 1)} | found


def run(num_streams: int, num_connections: int) -> list[dict[str, Any]]:
    first: dict[str, str] = {}
    with Server(ROOT, sys.executable, []) as server:
        warm = lambda: dict(streams_at_once(server.port, len(MODELS), first))  # noqa: E731

        def crowd() -> dict[str, Any]:
            with Attacker(server.port, "127.0.1.1") as attacker:
                kept = open_connections(attacker, num_connections)
                found = streams_at_once(server.port, NUM_STREAMS, first)
                files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.front_ends())
            return {"kept": kept, "files_at_most": files, **attacker.statuses, **found}

        def settle() -> dict[str, Any]:
            time.sleep(SETTLE_S)
            return warm()

        rows = [measure(server, "nobody", warm)]
        work = lambda: dict(streams_at_once(server.port, num_streams, first))  # noqa: E731
        rows.append(measure(server, f"{num_streams} streams", work))
        rows.append(measure(server, f"{num_connections} connections", crowd))
        rows.append(measure(server, "after", settle))
        rows[-1]["tracebacks"] = server.log().count("Traceback")
        rows[-1]["refused"] = sum(server.refused().values())
    return rows


def problems(rows: Sequence[dict[str, Any]], num_streams: int, num_connections: int) -> list[str]:
    """Faults."""
    nobody, streams, connections, after = rows
    found = []
    if streams.get("right") != num_streams or connections.get("right") != NUM_STREAMS:
        found.append("streams were not answered as the first was")
    if connections["kept"] != num_connections or connections["files_at_most"] < num_connections:
        found.append(f"{connections['kept']} of {num_connections} connections were kept")
    if after["files"] > nobody["files"]:
        found.append(f"{after['files']} files are open, {nobody['files']} were")
    return found + [f"{name}: {after[name]}" for name in ("tracebacks", "refused") if after[name]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of each: does it run?")
    parser.add_argument("--out", help="append a record here")
    options = parser.parse_args(arguments)
    record, share = Recorder(options.out), 10 if options.quick else 1
    num_streams, num_connections = options.streams // share, options.connections // share
    if allow_many_files() < num_connections + 200:
        parser.error(f"{num_connections} connections need as many open files; raise the limit with ulimit -n")
    rows = run(num_streams, num_connections)
    found = problems(rows, num_streams, num_connections)
    print(table(rows, "one front end"))
    for problem in found:
        print("WRONG:", problem)
    record({"streams": num_streams, "connections": num_connections}, {"rows": rows, "problems": found})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
