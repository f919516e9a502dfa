# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve` on the demo model, as a user starts it: a process of its own, its engine in another."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from moe_lora.core import processes
from tests.patience import PATIENCE_S

from .live_server import wait_until

DEMO = Path(__file__).parents[2] / "demo"
PATIENT = (
    *("--set", f"front_end.heartbeat_timeout_s={PATIENCE_S}"),
    *("--set", f"front_end.heartbeat_dead_s={2 * PATIENCE_S}"),
)
PATIENT_FILE = f"front_end: {{}}\nfixed: {{front_end: {{check_timeout_s: {PATIENCE_S}}}}}\n"
"""For a setting without an option: a test without a file of its own has this one."""


def few_adapters(*names: str) -> tuple[str, ...]:
    """Options for these adapters of the demo: each process of a server reads an adapter in 20 ms and more."""
    return ("--lora-modules", *(f"{name}={DEMO / 'adapters' / name}" for name in names))


class DemoServer:
    """A running server.  `log` holds what it wrote to stderr."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = re.search(r"Serving \S+ at (https?://\S+)", self.log.read_text())
            if found:
                return found.group(1)
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def wait_for_instances(self, num_links: int = 6) -> None:
        """Until instances have dialled in so often: two, to the controller and to two front ends."""
        said = r"instance instance-\d dialled in"
        wait_until(lambda: len(re.findall(said, self.log.read_text())) >= num_links, "all have dialled in")

    def engine_pids(self) -> list[int]:
        """Process ids of the engines that the server started, the oldest first."""
        return self._named("instance-")

    def lora_server_pids(self) -> list[int]:
        """Process ids of the LoRA Server's ranks, the oldest first."""
        return self._named("lora-server-")

    def front_end_pids(self) -> list[int]:
        """Process ids of several front ends, the oldest first."""
        return self._named("front-end-")

    def _named(self, role: str) -> list[int]:
        """Processes of these roles that live, as the log says."""
        started = re.findall(rf"{role}\d+ started \(process (\d+)\)", self.log.read_text())
        return sorted(pid for pid in map(int, started) if self._lives(pid))

    def _lives(self, pid: int) -> bool:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        return f"PPid:\t{self.process.pid}\n" in text and "State:\tZ" not in text

    def engine_pid(self) -> int:
        """Process id of the one engine that the server started."""
        [pid] = self.engine_pids()
        return pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def demo_server(
    log: Path, *options: str, anew: bool = False, model: Path = DEMO / "model"
) -> Iterator[DemoServer]:
    """Serve the model; options go to `moe-lora serve`.  anew: start its processes as outside of tests.

    Processes of a busy machine are slow, not silent: a test of silence says so in its options.
    """
    command = [sys.executable, "-m", "moe_lora.cli.main", "serve", str(model), "--port", "0"]
    command += ["--served-model-name", "demo", "--threads", "1", *PATIENT, *options]
    if "--config" not in options:
        file = log.with_suffix(".yaml")
        file.write_text(f"model_dir: {model}\n{PATIENT_FILE}")
        command += ["--config", str(file)]
    with log.open("w") as stderr:
        start = subprocess.Popen if anew else processes.subprocess.Popen  # forks, see `tests.forked_children`
        process = start(command, stderr=stderr)
    try:
        yield DemoServer(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
