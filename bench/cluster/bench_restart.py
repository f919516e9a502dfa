# SPDX-License-Identifier: Apache-2.0
"""The time from the death of an instance to its return, in parts.

    python -m bench.cluster.bench_restart [--kills 5] [--eager] [--no-spare] [--out FILE]

Starts `moe-lora serve` on the demo model with the demo adapters and two instances, and ends instance-1 by
SIGKILL once a spare process waits, unless --no-spare.  The parts come from the times of the log's lines.  The
first start compiles into the cache on disk; later starts read the cache, as on a host that serves for some
time.  One record a kill, with the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from bench.harness.records import ROOT, Recorder

_NAME = "instance-1"
_LIMIT_S = 900.0
_STARTED = rf"{_NAME} started \(process (\d+)\)"
NO_SPARE = "engine.spare_process=false"
WAITS = "a spare process waits"
_ENDS = {
    "keeper": _STARTED,
    "imports": "loading .*demo/model",
    "weights_and_adapters": "adapter .* version 1",
    "compile": "engine ready",
    "dial_in": f"instance {_NAME} .*dialled in",
}
"""Part of a restart -> the log's first line after the part.  A part starts at the end of the part before."""


class Server:
    """A server under test, and its log."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-m", "moe_lora.cli.main", "serve", str(ROOT / "demo/model"), "--port=0"]
        command += [f"--lora-dir={ROOT / 'demo/adapters'}", "--instances=2", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def lines_after(self, offset: int) -> list[str]:
        return self.log.read_bytes()[offset:].decode().splitlines()

    def wait(self, offset: int, pattern: str, times: int = 1) -> None:
        """Until so many lines of the log after `offset` match the pattern."""
        deadline_s = time.monotonic() + _LIMIT_S
        while sum(bool(re.search(pattern, line)) for line in self.lines_after(offset)) < times:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the log has no line {pattern!r}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def kill(self, number: int, spare: bool) -> dict[str, float]:
        """Kill the instance for the `number`th time and wait for its return; seconds of each part."""
        if spare:
            self.wait(0, WAITS, number)
        [*_, pid] = re.findall(_STARTED, self.log.read_text())
        offset, since_s = self.log.stat().st_size, time.time()
        os.kill(int(pid), signal.SIGKILL)
        self.wait(offset, _ENDS["dial_in"])
        lines, parts, began_s = self.lines_after(offset), {}, since_s
        for part, pattern in _ENDS.items():
            ended_s = next(_time_of(line) for line in lines if re.search(pattern, line))
            parts[part], since_s = ended_s - since_s, ended_s
        return parts | {"whole": since_s - began_s}


def _time_of(line: str) -> float:
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def measure(recorder: Recorder, num_kills: int, options: list[str]) -> list[dict[str, float]]:
    """One record a kill."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        try:
            server.wait(0, r"instance instance-\d .*dialled in", 2)
            for number in range(1, num_kills + 1):
                parts = server.kill(number, spare=NO_SPARE not in options)
                config = {"model": "demo", "instances": 2, "options": options}
                result = {f"{part}_s": round(seconds, 3) for part, seconds in parts.items()}
                recorder(config, result | {"load_1_min": round(os.getloadavg()[0], 1)})
                print(result, flush=True)
                found.append(parts)
        finally:
            server.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-spare", action="store_true")
    parser.add_argument("--out", help="file of the records  [default: none]")
    options = parser.parse_args()
    words = ["--eager"] * options.eager + ["--set", NO_SPARE] * options.no_spare
    found = measure(Recorder(options.out), options.kills, words)
    for part in found[0]:
        print(f"{part:22} median {statistics.median(one[part] for one in found):7.2f} s")


if __name__ == "__main__":
    main()
