# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on this host, with a loopback address each, and commands of a user."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.dist.cluster_jobs import ROOT, alive, descendants, free_port, until
from tests.patience import PATIENCE_S

_HEAD = "127.0.0.2"


class RayNodes:
    """Nodes by their addresses; the first one is the head, without room for roles.

    num_cpus: of each other node.  The folder, short for sockets, holds all files of nodes and roles.
    """

    def __init__(self, num_nodes: int, num_cpus: int, **environment: str) -> None:
        """environment: of nodes and commands."""
        self._num_cpus = num_cpus
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"{_HEAD}:{free_port()}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "OMP_WAIT_POLICY": "passive",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "300",
            **environment,
        }
        (self.folder / "tmp").mkdir()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start(_HEAD, "--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0")
            for number in range(1, num_nodes):
                self.add(f"127.0.0.{number + 2}")
        except BaseException:
            self.stop()
            raise

    def add(self, host: str) -> None:
        """Start a node."""
        self._start(host, "--address", self.address, "--num-cpus", str(self._num_cpus))

    def _start(self, host: str, *options: str) -> None:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", host]
        words += ["--object-store-memory", "80000000", *options]
        if "--head" in options:
            words += ["--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        log = self.folder / f"{host}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(words, env=self.environment, stdout=file, stderr=file)
        self._processes[host] = process

        def started() -> bool:
            assert process.poll() is None, log.read_text()
            return "--block" in log.read_text()

        until(started, lambda: f"a Ray node: {log.read_text()}")

    def kill(self, host: str) -> None:
        """End a host at once, with all of its processes."""
        process = self._processes.pop(host)
        for pid in descendants(process.pid):
            _kill(pid)
        process.wait(PATIENCE_S)
        (self.folder / f"{host}.log").unlink()

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A `moe-lora cluster` command."""
        return subprocess.run(
            self.command(*words),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def command(self, *words: str) -> list[str]:
        """Words of a `moe-lora cluster` command."""
        return [sys.executable, "-m", "moe_lora.cli.main", "cluster", *words, "--ray-address", self.address]

    def status(self) -> dict[str, Sequence[str]]:
        """Fields of each role: state, host, address, restarts, reason."""
        done = self.run("status")
        assert done.returncode == 0, done.stdout + done.stderr
        head, *lines = done.stdout.splitlines()
        starts = [found.start() for found in re.finditer(r"\w+", head)]
        ends = [*starts[1:], None]
        fields = [
            [line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in lines
        ]
        return {role: rest for role, *rest in fields}

    def roles(self) -> Mapping[int, str]:
        """Command lines of roles' processes and of actors, by process."""
        found = {}
        for pid in self._all():
            words = ""
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            if "_role" in words or "RoleActor" in words or "Keeper" in words:
                found[pid] = words
        return found

    def _all(self) -> list[int]:
        """This cluster's processes, orphans as well."""
        mark = f"HOME={self.folder}".encode()
        # Ray's actors overwrite their environment; each is a child of its node.
        found = {pid for one in self._processes.values() for pid in descendants(one.pid)}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
        return [pid for pid in found if alive(pid)]

    def stop(self) -> None:
        """End all processes of this cluster, and delete its files."""
        for pid in self._all():
            _kill(pid)
        for process in self._processes.values():
            process.wait(PATIENCE_S)
        until(lambda: not self._all(), lambda: f"processes of Ray: {self._all()}")
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
