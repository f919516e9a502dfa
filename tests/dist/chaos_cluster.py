# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve` with several front ends and instances, watched while parts of it are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from moe_lora.core import processes
from tests.shared_memory import names_in_shm

from .chaos_host import ChaosHost
from .chaos_model import MAX_MODEL_LEN, ChaosModel
from .cluster_jobs import ROOT, alive, descendants, free_port, until

HEARTBEAT_TIMEOUT_S, HEARTBEAT_DEAD_S = 2.0, 8.0
MAX_LORAS = 4
"""Fewer than are popular at a time, so that adapters come and go on every device."""
MIGRATION = {
    "migration": "dlora",
    "migration_interval_s": 0.2,
    "migration_queue_s": 0.0,
    "migration_free_share": 1.0,
    "migration_min_gain": 0.0,
}
"""Every instance is always pressed, and every gain is enough, so that requests move all the time."""
LORA_CAPACITY = 6
_SCRAPES = 60

Figures = Mapping[str, Mapping[tuple[str, str], float]]
"""By front end: values of its metrics by (name, label): the instance, the source or the kind, "" for none."""


class ChaosCluster:
    """The running processes; `log` holds what all of them write."""

    def __init__(
        self,
        model: ChaosModel,
        folder: Path,
        *,
        num_instances: int = 3,
        num_front_ends: int = 2,
        pool_replicas: int | None = None,
        lora_server: str | None = None,
        host: ChaosHost | None = None,
    ) -> None:
        self.num_instances, self.num_front_ends = num_instances, num_front_ends
        self.log, self.temporary, self.state = folder / "log", folder / "tmp", folder / "state"
        for place in (self.temporary, self.state):
            place.mkdir(parents=True, exist_ok=True)
        self.model, self.has_server = model, lora_server is not None
        self.num_tables_before = 0
        beats = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "heartbeat_dead_s": HEARTBEAT_DEAD_S}
        self._file, self._front_end = folder / "cluster.yaml", {**MIGRATION, **beats}
        self._write_file({})
        command = ["-m", "moe_lora.cli.main", "serve", "--config", str(folder / "cluster.yaml")]
        command += ["--lora-dir", str(model.adapter_dir), "--eager", "--dtype", "float32"]
        command += ["--port", str(free_port()), "--set", f"engine.state_dir={self.state}"]
        command += ["--instances", str(num_instances), "--front-ends", str(num_front_ends)]
        command += ["--placement", "loraserve", "--set", "front_end.placement_interval_s=0.5"]
        command += ["--threads", "1", "--max-loras", str(MAX_LORAS), "--max-model-len", str(MAX_MODEL_LEN)]
        if pool_replicas is not None:
            command += ["--set", f"pool.replicas={pool_replicas}"]
        if lora_server is not None:
            command += ["--lora-server", lora_server, "--lora-capacity", str(LORA_CAPACITY)]
        self._command = [sys.executable, *command]
        if host is not None:
            self._command = [*host.prefix, *self._command, "--registry", str(host.registry)]
        self._pids: set[int] = set()
        self._start()
        self._shared = names_in_shm()

    def _start(self) -> None:
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as file:
            self.process = processes.subprocess.Popen(  # may fork, see `tests.forked_children`
                self._command, stdout=file, stderr=file, cwd=ROOT, env=environment
            )
        self._pids.add(self.process.pid)

    def _write_file(self, front_end: Mapping[str, object]) -> None:
        names = {"model_dir": str(self.model.model_dir), "served_model_name": "base"}
        self._file.write_text(yaml.safe_dump({**names, "front_end": {**self._front_end, **front_end}}))

    def reload(self, front_end: Mapping[str, object]) -> None:
        """Have these settings read, beside those of the beginning; return when all processes have them."""
        self._write_file(front_end)
        said = "the settings were read again: max_choices"
        before = self.count(said)
        self.process.send_signal(signal.SIGHUP)
        # The controller reads them too, and the process that starts all others.
        self.until(lambda: self.count(said) >= before + self.num_front_ends + 2, said, 60.0)

    def kill_and_start_again(self, limit_s: float) -> None:
        """SIGKILL to the process that started all others; once these have ended, start the whole again."""
        everyone = {*descendants(self.process.pid), *self.pids().values()}
        self._pids |= everyone
        self.num_tables_before += self.table_version()
        self.process.kill()
        self.process.wait()
        until(lambda: not any(map(alive, everyone)), lambda: "what a killed server started goes on", limit_s)
        before = self.count("Serving base at")
        self._start()
        self.until(lambda: self.count("Serving base at") > before, "the server starts again", limit_s)

    def text(self) -> str:
        return self.log.read_text()

    def count(self, pattern: str) -> int:
        """How often the log says it."""
        return len(re.findall(pattern, self.text()))

    def until(self, condition: Callable[[], object], what: str, limit_s: float) -> None:
        """Raises AssertionError, with the end of the log, if the condition does not come true in time."""

        def checked() -> object:
            assert self.process.poll() is None, f"the server ended:\n{self.text()[-4000:]}"
            return condition()

        until(checked, lambda: f"not within {limit_s:.0f} s: {what}\n{self.text()[-4000:]}", limit_s)

    def wait_for_url(self, limit_s: float) -> str:
        self.until(lambda: "Serving base at" in self.text(), "the server starts", limit_s)
        found = re.search(r"Serving base at (http://\S+)", self.text())
        assert found is not None
        self.url = found.group(1)
        return self.url

    def pids(self) -> dict[str, int]:
        """Of each role, the process that was started last."""
        return {name: int(pid) for name, pid in re.findall(r"(\S+) started \(process (\d+)\)", self.text())}

    def figures(self) -> Figures:
        """The metrics of all front ends that answer; they share a port, so they are asked until all did."""
        found: dict[str, dict[tuple[str, str], float]] = {}
        for _ in range(_SCRAPES):
            try:
                answer = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30)
            except httpx.TransportError:  # of a front end that was killed
                continue
            if answer.status_code != 200:
                continue
            families = text_string_to_metric_families(answer.text)
            samples = [sample for family in families for sample in family.samples]
            [name] = [s.labels["front_end"] for s in samples if s.name == "moe_lora:front_end"]
            found[name] = {
                (
                    s.name.removeprefix("moe_lora:"),
                    s.labels.get("instance", s.labels.get("source", s.labels.get("kind", ""))),
                ): s.value
                for s in samples
            }
            if len(found) == self.num_front_ends:
                break
        return found

    def is_whole(self) -> bool:
        """Whether every front end says that the controller and all instances are there, and all ranks of a
        LoRA Server with their links to these.
        """
        figures = self.figures()
        ups = [[v for (name, _), v in one.items() if name == "instance_up"] for one in figures.values()]
        return (
            len(figures) == self.num_front_ends
            and all(one["controller_up", ""] for one in figures.values())
            and all(map(_has_whole_server, figures.values() if self.has_server else ()))
            and all(up == [1.0] * self.num_instances for up in ups)
        )

    def table_version(self) -> int:
        """The highest that a front end routes by; it begins anew where all was killed."""
        return int(max((one["placement_tables_total", ""] for one in self.figures().values()), default=0))

    def num_moves(self) -> int:
        """Adapters times instances that placements moved to, over all controllers."""
        return sum(map(int, re.findall(r"adapters on \d+ instances, (\d+) moves", self.text())))

    def stop(self, limit_s: float = 60.0) -> list[str]:
        """End everything; what is wrong with how it ended, or was left behind."""
        everyone = {*descendants(self.process.pid), *self.pids().values()}
        self._pids |= everyone
        for pid in everyone:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        self.process.terminate()
        try:
            code: int | None = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            self.process.kill()
            self.process.wait()
        deadline_s = time.monotonic() + limit_s / 2
        while (left := [pid for pid in everyone if alive(pid)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return self._left_behind(code, left)

    def _left_behind(self, code: int | None, pids: list[int]) -> list[str]:
        found = [] if code == 0 else [f"the server ended with exit code {code}"]
        found += [f"process {pid} was left" for pid in pids]
        found += ["a traceback was logged"] if "Traceback" in self.text() else []
        found += [f"{path} was left" for place in (self.temporary, self.state) for path in place.rglob("*")]
        roles = {int(pid) for pid in re.findall(r" started \(process (\d+)\)", self.text())}
        return found + [f"/dev/shm/{name} was left" for name in orphans(self._shared, self._pids | roles)]


def _has_whole_server(figures: Mapping[tuple[str, str], float]) -> bool:
    missing = [figures.get((f"lora_server_{what}", ""), 1.0) for what in ("ranks_away", "unlinked")]
    return bool(figures["lora_server_up", ""]) and not any(missing)


def orphans(before: set[str], pids: set[int]) -> list[str]:
    """Names in /dev/shm that were not there before, and that no process has mapped or open.

    pids: of their makers, whose number is in the name: other programs of the machine make names too.
    """
    new = names_in_shm() - before
    names = {name for name in new if pids.intersection(map(int, re.findall(r"\d+", name)))}
    used = "\n".join(_uses() if names else ())
    return sorted(name for name in names if f"/dev/shm/{name}" not in used)


def _uses() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            found.append((place / "maps").read_text())
            found += [os.readlink(fd) for fd in (place / "fd").iterdir()]
        except OSError:
            continue
    return found
