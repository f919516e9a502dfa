# SPDX-License-Identifier: Apache-2.0
"""A cluster as its operator starts it: torchrun jobs and a front end on several hosts, or on one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from moe_lora.core import processes
from moe_lora.core.request import SamplingParams
from moe_lora.dist.net.keys import make_keys
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo"
ADAPTERS = [name for name in json.loads((DEMO / "adapters" / "index.json").read_text()) if name != "demo"][:8]
MAX_TOKENS = 8
_WORKER = ("-m", "moe_lora.dist.launch.run_role", "--config", "cluster.yaml")


@dataclass(frozen=True)
class Host:
    """Where jobs run.  prefix: what makes a command run there; folder: its own disk, so to say."""

    name: str
    address: str
    folder: Path
    prefix: tuple[str, ...] = ()


class Job:
    """A running command; `log` holds what it wrote."""

    def __init__(
        self,
        host: Host,
        name: str,
        words: Sequence[str],
        *,
        python: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """python: `words` are Python's.  environment: in place of this process's."""
        self.log = host.folder / f"{name}.log"
        if environment is None:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as file:
            self.process = processes.subprocess.Popen(  # may fork, see `tests.forked_children`
                [*host.prefix, *((sys.executable,) if python else ()), *words],
                stdout=file,
                stderr=file,
                cwd=host.folder,
                env=environment,
                start_new_session=True,
            )

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.log.read_text()))

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Until the log says it, that often."""

        def said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.count(pattern) >= times

        until(said, lambda: f"{pattern!r} in {self.log.read_text()}")

    def workers(self) -> list[int]:
        """Processes of ranks that this one started, the oldest first."""
        return sorted(pid for pid in children(self.process.pid) if is_rank(pid))

    def stop(self) -> int:
        """SIGTERM to the job; asserts that it leaves no process behind."""
        if self.process.poll() is not None:
            return self.process.returncode
        everyone = descendants(self.process.pid)
        self.process.terminate()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        until(lambda: not any(map(alive, everyone)), lambda: f"orphans of {self.log.name}")
        return code


class Cluster:
    """The jobs of one cluster file, a copy of which lies on every host."""

    def __init__(
        self, hosts: Mapping[str, Host], *, transport: str, pool: bool = False, **engine: Any
    ) -> None:
        """hosts: by role: front-end, lora-server, and instances by their names.  pool: an adapter pool in the
        LoRA Server's place.  engine: its settings."""
        self.hosts = dict(hosts)
        self.jobs: list[Job] = []
        self.url = f"http://{hosts['front-end'].address}:{free_port()}"
        server = {"layout": "EP2-PP1", "capacity": 4, "transport": transport, "store_dir": "store"}
        part: dict[str, Any] = {"pool": {"transport": transport}}
        if not pool:
            address = f"{hosts['lora-server'].address}:{free_port()}"
            part = {"lora_server": {**server, "address": address}}
        content = {
            "model_dir": str(DEMO / "model"),
            "served_model_name": "demo",
            "adapters": {name: str(DEMO / "adapters" / name) for name in ADAPTERS},
            "certificates": "certificates",
            "engine": {
                "dtype": "float32",
                "eager": True,
                "num_threads": 1,
                "num_instances": 2,
                "state_dir": "state",
                **engine,
            },
            **part,
            "front_end": {
                "host": hosts["front-end"].address,
                "port": int(self.url.rpartition(":")[2]),
                "engines_address": f"{hosts['front-end'].address}:{free_port()}",
                "routing": "round_robin",
            },
        }
        with TemporaryDirectory() as made:
            keys = make_keys(Path(made) / "certificates")
            for host in self.hosts.values():
                host.folder.mkdir(parents=True, exist_ok=True)
                (host.folder / "cluster.yaml").write_text(yaml.safe_dump(content))
                shutil.copytree(keys.folder, host.folder / "certificates", dirs_exist_ok=True)

    def front_end(self) -> Job:
        words = ["-m", "moe_lora.cli.main", "serve", "--config", "cluster.yaml", "--role", "front-end"]
        return self._start("front-end", words)

    def lora_server(self, num_ranks: int = 2) -> Job:
        return self._start("lora-server", _torchrun(num_ranks, "--role", "lora-server"))

    def instance(self, name: str, num_ranks: int = 1) -> Job:
        return self._start(name, _torchrun(num_ranks, "--role", "instance", "--name", name))

    def plain_instance(self, name: str) -> Job:
        """Without torchrun."""
        return self._start(name, [*_WORKER, "--role", "instance", "--name", name])

    def _start(self, name: str, words: Sequence[str]) -> Job:
        self.jobs.append(Job(self.hosts[name], name, words))
        return self.jobs[-1]

    def drive(self, requests: Sequence[tuple[str | None, str]], pause_s: float = 0.0) -> Drive:
        """Send greedy requests from the front end's host, four at a time, each after a pause."""
        bodies = [
            {
                "model": model or "demo",
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            }
            for model, prompt in requests
        ]
        return Drive(self.hosts["front-end"], {"url": self.url, "bodies": bodies, "pause_s": pause_s})

    def answers(self, requests: Sequence[tuple[str | None, str]]) -> list[list[int]]:
        """Token ids of each request; all must be answered."""
        return self.drive(requests).answers()

    def stop(self) -> None:
        errors = []
        for job in reversed(self.jobs):
            try:
                job.stop()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                errors.append(error)
        assert not errors, errors


class Drive:
    """Requests under way (see `drive_requests`)."""

    def __init__(self, host: Host, work: dict[str, Any]) -> None:
        self._process = processes.subprocess.Popen(  # may fork, see `tests.forked_children`
            [*host.prefix, sys.executable, "-m", "tests.dist.drive_requests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(json.dumps(work).encode())

    def done(self) -> list[tuple[int, Any]]:
        """(status, token ids or error message) of each request, in order."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            text = answers.read()
        assert self._process.wait(PATIENCE_S) == 0
        return [(status, answer) for status, answer in json.loads(text)]

    def answers(self) -> list[list[int]]:
        done = self.done()
        assert [status for status, _ in done] == [200] * len(done), [one for one in done if one[0] != 200]
        return [answer for _, answer in done]


def make_requests(count: int) -> list[tuple[str | None, str]]:
    """(adapter or None, prompt) of different requests over all adapters and the base."""
    models = [*ADAPTERS, None]
    return [(models[n * 5 % len(models)], f"{'abcdefgh'[n % 8]}word{n}=") for n in range(count)]


def local_answers(requests: Sequence[tuple[str | None, str]]) -> list[list[int]]:
    """What one engine with the adapters beside its weights answers."""
    return _local_answers(tuple(requests))


@cache
def _local_answers(requests: tuple[tuple[str | None, str], ...]) -> list[list[int]]:
    from moe_lora import LLM

    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    paths = {name: str(DEMO / "adapters" / name) for name in ADAPTERS}
    with LLM(str(DEMO / "model"), adapters=paths, dtype="float32", eager=True, num_threads=1) as llm:
        answers = llm.generate([prompt for _, prompt in requests], [model for model, _ in requests], greedy)
        return [list(answer.token_ids) for answer in answers]


def _torchrun(num_ranks: int, *options: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launch, *_WORKER, *options]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def until(condition: Callable[[], object], what: Callable[[], str], limit_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def is_rank(pid: int) -> bool:
    """False for the process that forks in a forked job's place."""
    try:
        return b"run_role" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def children(pid: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            if f"PPid:\t{pid}\n" in text and "State:\tZ" not in text:
                yield int(status.parent.name)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += children(one)
    return found
