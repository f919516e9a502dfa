# SPDX-License-Identifier: Apache-2.0
"""Attacks on a front end, in sequence, beside ordinary streams.

    python -m bench.hostile.bench_hostile [--out FILE] [--only WORDS] [--quick] [--tree DIR --python PY]

Starts `moe-lora serve` on the demo's model, 16 ordinary streams from one address, and for each attack clients
from another.  A row has the attacker's answers, the front end's memory and processor time, and the ordinary
streams' time per token (99th percentile) and longest wait.  The first two rows are no attacks: idle, and
valid requests of four clients at full speed.  Three attacks are much valid work, or cost as much: a row
before each has the same work without harm, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.harness.records import ROOT, Recorder
from bench.harness.tables import table
from moe_lora.core.host import allow_many_files

from .attacker import Attacker, post
from .attacks import ATTACKS, SHORT, VALID, Attack, _for_seconds, drawn_calls

ORDINARY, HOSTILE = "127.0.0.3", "127.0.0.2"
NUM_STREAMS = 16
SERVE = (
    "--set front_end.header_timeout_s=5 --set front_end.body_timeout_s=5 --set front_end.write_timeout_s=5 "
    "--set front_end.max_queued_tokens_per_client=16384 --set front_end.max_choices=16"
)
"""Limits for a model as small and an engine as slow as this (docs/guides/limits.md)."""
SETTLE_S = 1.0
"""After each attack, before the next."""
QUICK = ("wrong-typed prompts, 10^6", "half_open_connections", "two lengths", "unknown_models")
ANSWERED_503_ON_PURPOSE = "503"


class Server:
    """`moe-lora serve` of one tree; its front end is the process itself.  more: of its environment."""

    def __init__(self, tree: Path, python: str, options: list[str], **more: str) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        words = ["serve", "demo/model", "--lora-dir", "demo/adapters", "--threads", "1", "--port", "0"]
        command = [python, "-m", "moe_lora.cli.main", *words, *options]
        environ = {**os.environ, "PYTHONPATH": str(tree), **more}
        self.process = subprocess.Popen(command, cwd=tree, env=environ, stderr=self._log)
        self.port = 0

    def __enter__(self) -> Server:
        while self.process.poll() is None:
            found = re.search(r"Serving \S+ at http://\S+:(\d+)", self.log())
            if found:
                self.port = int(found[1])
                self._wait_until_healthy()
                return self
            time.sleep(0.1)
        raise RuntimeError(f"the server ended:\n{self.log()}")

    def _wait_until_healthy(self) -> None:
        """Wait for enough consecutive 200s that all front ends behind the port gave some."""
        in_a_row = 0
        while in_a_row < 20:
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10).close()
                in_a_row += 1
            except OSError:
                in_a_row = 0
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def front_ends(self) -> list[int]:
        """Process ids: with --front-ends its children, else the server itself."""
        found = re.findall(r"front-end-\d+ started \(process (\d+)\)", self.log())
        return [int(pid) for pid in found] or [self.process.pid]

    def rss_mb(self, of: str = "") -> float:
        """Memory of the largest front end, or of the largest child with this word in its command."""
        return max(
            (_rss_mb(pid) for front_end in self.front_ends() for pid in _with(front_end, of)), default=0
        )

    def cpu_s(self) -> float:
        tasks = [one for pid in self.front_ends() for one in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(one.read_text().split()[0]) for one in tasks) / 1e9

    def refused(self) -> dict[str, float]:
        """The metric of refusals, by reason."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        lines = re.findall(r'moe_lora:http_refused_total{(?:.*,)?reason="(\w+)".*} (\S+)', text)
        return {reason: float(count) for reason, count in lines if float(count)}


def _rss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1000 if found else 0.0
    return 0.0


def _with(pid: int, word: str) -> list[int]:
    """The process itself, or its children with this word in their command."""
    if not word:
        return [pid]
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(one) for one in children.read_text().split()]
    return [one for one in found if word in _command(one)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


class Ordinary:
    """The ordinary streams, and their requests' results so far."""

    def __init__(self, port: int) -> None:
        words = ["-m", "bench.hostile.ordinary", str(port), str(NUM_STREAMS), ORDINARY]
        self._process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.requests: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.requests.append(json.loads(line))

    def __enter__(self) -> Ordinary:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def between(self, began_s: float, ended_s: float) -> dict[str, Any]:
        """Of requests within these times, all ended."""
        while len([one for one in self.requests if one["began_s"] >= ended_s]) < NUM_STREAMS:
            time.sleep(0.05)
        found = [one for one in self.requests if one["ended_s"] > began_s and one["began_s"] < ended_s]
        tpots_s = sorted(one["tpot_s"] for one in found if one["tpot_s"] is not None)
        waits_s = [max(one["ttft_s"] or 0.0, one["longest_s"]) for one in found]
        return {
            "ordinary": len(found),
            "failed": sum(one["status"] != 200 for one in found),
            "tpot_p99_ms": round(1e3 * tpots_s[int(0.99 * (len(tpots_s) - 1))], 2) if tpots_s else None,
            "longest_wait_s": round(max(waits_s, default=0.0), 3),
        }


def measure(server: Server, ordinary: Ordinary, name: str, attack: Attack) -> dict[str, Any]:
    """One row: the attack, and everything else meanwhile."""
    peak, checking, over = [server.rss_mb()], [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.03):
            peak.append(server.rss_mb())
            checking.append(server.rss_mb("anyio.to_process"))

    watcher = threading.Thread(target=watch)
    began_s, cpu_s = time.monotonic(), server.cpu_s()
    watcher.start()
    try:
        with Attacker(server.port, HOSTILE) as attacker:
            attack(attacker)
            attack_s = time.monotonic() - began_s
        time.sleep(SETTLE_S)
    finally:
        over.set()
        watcher.join()
    row = {"attack": name.replace("_", " "), "s": round(attack_s, 1)}
    row |= {"answers": dict(sorted(attacker.statuses.items())), "longest_error": attacker.longest_error}
    row |= {"rss_mb": round(max(peak)), "rss_after_mb": round(server.rss_mb())}
    row |= {"checking_mb": round(max(checking))}
    row |= {"cpu_s": round(server.cpu_s() - cpu_s, 2)}
    row |= ordinary.between(began_s, time.monotonic())
    statuses = [status for status in attacker.statuses if status.startswith("5")]
    return row | {"wrong_5xx": [one for one in statuses if one != ANSWERED_503_ON_PURPOSE]}


def alone(attacker: Attacker) -> None:
    time.sleep(5)


def valid(attacker: Attacker) -> None:
    body = post(json.dumps({**SHORT, "max_tokens": 8}).encode())
    _for_seconds(5, lambda: attacker.ask(body))


def _largest(ratios: dict[str, float], num: int = 5) -> dict[str, float]:
    return dict(sorted(ratios.items(), key=lambda one: -one[1])[:num])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout whose server is attacked")
    parser.add_argument("--python", default=sys.executable, help="the Python that has it installed")
    parser.add_argument("--only", help="attacks whose name has one of these words, divided by |")
    parser.add_argument("--serve", default=SERVE, help="further options of moe-lora serve")
    parser.add_argument("--quick", action="store_true", help="a few attacks: does it run?")
    parser.add_argument("--out", help="append a record here")
    options = parser.parse_args()
    record = Recorder(options.out)
    allow_many_files()
    chosen = {
        name: attack
        for name, attack in ATTACKS.items()
        if (not options.quick or name in QUICK)
        and (not options.only or any(word in name for word in options.only.split("|")))
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        server = stack.enter_context(Server(options.tree.resolve(), options.python, options.serve.split()))
        if "openapi_fuzzing" in chosen:
            drawn_calls(server.port)  # before other load: takes the processor for a while
        ordinary = stack.enter_context(Ordinary(server.port))
        time.sleep(2)

        def add(name: str, attack: Attack) -> dict[str, Any]:
            rows.append(measure(server, ordinary, name, attack))
            print(json.dumps(rows[-1]), flush=True)
            return rows[-1]

        add("alone", alone)
        beside_four = add("valid", valid)
        over_valid, over_four = {}, {}
        for name, attack in chosen.items():
            beside = add(f"valid beside {name}", VALID[name]) if name in VALID else beside_four
            tpot_ms = add(name, attack)["tpot_p99_ms"] or 0.0
            over_valid[name] = tpot_ms / beside["tpot_p99_ms"]
            over_four[name] = tpot_ms / beside_four["tpot_p99_ms"]
        refused = server.refused()
    print(table(rows, "attacks beside 16 ordinary streams"))
    print("refused:", refused)
    result = {
        "rows": rows,
        "refused": refused,
        "num_attacks": len(chosen),
        "wrong_5xx": sum(bool(row["wrong_5xx"]) for row in rows),
        "rss_mb": max(row["rss_mb"] for row in rows),
        "checking_mb": max(row["checking_mb"] for row in rows),
        "longest_wait_s": max(row["longest_wait_s"] for row in rows),
        "tpot_p99_over_valid": max(over_valid.values()),
        "largest_over_valid": _largest(over_valid),
        "largest_over_four_clients": _largest(over_four),
        "failed": sum(row["failed"] for row in rows),
        "tracebacks": server.log().count("Traceback"),
    }
    config = {"streams": NUM_STREAMS, "serve": options.serve, "quick": options.quick, "only": options.only}
    record(config, result)


if __name__ == "__main__":
    main()
