# SPDX-License-Identifier: Apache-2.0
"""A spare process takes the place of an instance that died."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from bench.harness.processes import entered
from moe_lora.config import EngineConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.processes import Child, RestartPolicy
from moe_lora.dist.launch import spare as module
from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets, write_cluster
from moe_lora.dist.launch.host_roles import INSTANCE, HostRoles, Role, spare_of
from moe_lora.dist.launch.spare import Spare
from moe_lora.dist.net.thread import LoopThread
from tests.dist.cluster_jobs import alive, until
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

PLAYED = """
import os, sys, time
from moe_lora.dist.launch.host_roles import say_started
option = lambda name: int(sys.argv[sys.argv.index(name) + 1])
told = open({told!r}, "a")
if "--spare" in sys.argv:
    print("spare", os.getpid(), file=told, flush=True)
    line = open(os.dup(option("--status-fd"))).readline()
    if not line:
        sys.exit(0)
    print("is", os.getpid(), line, end="", file=told, flush=True)
else:
    print("new", os.getpid(), "start", option("--starts"), file=told, flush=True)
say_started(option("--status-fd"))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "SPARE_AFTER_S", 0.05)


class Kept:
    """Two played instances with a spare, and what the spare processes said."""

    def __init__(self, roles: HostRoles, thread: LoopThread, told: Path) -> None:
        self._roles, self._thread, self._told = roles, thread, told

    def told(self) -> str:
        return self._told.read_text() if self._told.exists() else ""

    def spares(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"spare (\d+)", self.told())]

    def kill(self, name: str) -> None:
        self._thread.loop.call_soon_threadsafe(self._roles.kill, name)

    def until(self, condition) -> None:
        until(condition, self.told)


@contextmanager
def keeping(folder: Path) -> Iterator[Kept]:
    told = folder / "told"
    words = ("-c", PLAYED.format(told=str(told)))
    roles = [Role(name=f"instance-{i}", kind=INSTANCE, words=words) for i in range(2)]

    @asynccontextmanager
    async def kept() -> AsyncIterator[HostRoles]:
        found = HostRoles(roles, policy=RestartPolicy(first_pause_s=0.01), spare=Spare(words, ()))
        await found.ready()
        yield found
        await found.stop()

    with entered(kept) as (found, thread):
        yield Kept(found, thread, told)


def test_a_spare_becomes_each_instance_that_dies_and_another_takes_its_place(tmp_path):
    with keeping(tmp_path) as kept:
        for number, name in enumerate(("instance-1", "instance-0", "instance-1")):
            kept.until(lambda number=number: len(kept.spares()) == number + 1)
            pid = kept.spares()[number]
            kept.kill(name)
            starts = 2 if number == 2 else 1
            kept.until(lambda pid=pid, name=name, n=starts: f"is {pid} {n} {name}\n" in kept.told())
        kept.until(lambda: len(kept.spares()) == 4)
        last = kept.spares()[-1]
        assert alive(last)
    assert not alive(last)


def test_a_spare_that_dies_is_replaced_and_named_in_the_log(tmp_path, caplog):
    with keeping(tmp_path) as kept:
        kept.until(lambda: len(kept.spares()) == 1)
        os.kill(kept.spares()[0], signal.SIGKILL)
        kept.until(lambda: len(kept.spares()) == 2)
        second = kept.spares()[1]
        kept.kill("instance-0")
        kept.until(lambda: f"is {second} 1 instance-0" in kept.told())
    assert "the spare process ended: exit code -9" in caplog.text


def test_a_real_spare_reads_the_cluster_when_it_is_acquired(tmp_path, capfd):
    """The file then names another model than when the process started."""

    def cluster(model: str) -> ClusterConfig:
        engine = EngineConfig(model_dir=str(tmp_path / model), num_instances=2, eager=True)
        return on_sockets(ClusterConfig(engine=engine, served_model_name="served"), 2, str(tmp_path))

    async def named(file: int) -> bytes:
        spare = spare_of(cluster("first"), file)
        assert spare is not None
        spare.put_off()
        while "a spare process waits" not in (text := capfd.readouterr().err):
            assert "Error" not in text
            await asyncio.sleep(0.05)
        write_cluster(file, cluster("second"))
        taken = spare.acquire("instance-1", 3)
        assert taken is not None
        with taken.socket as status:
            said = await asyncio.to_thread(status.makefile("rb").read)
        await asyncio.wrap_future(taken.ended)
        await spare.stop()
        return said

    thread = LoopThread()
    try:
        with cluster_file(cluster("first")) as file:
            said = thread.run(named(file), PATIENCE_S)
    finally:
        thread.stop()
    assert b"second" in said
    assert b"first" not in said


def test_a_real_spare_ends_with_its_keeper(tmp_path, capfd):
    engine = EngineConfig(model_dir=str(tmp_path / "model"), num_instances=2, eager=True)
    cluster = on_sockets(ClusterConfig(engine=engine, served_model_name="served"), 2, str(tmp_path))
    with cluster_file(cluster) as file:
        spare = spare_of(cluster, file)
        assert spare is not None
        child = Child(*spare._words, "--spare", "--status-fd", fds=(file,))
        until(lambda: "a spare process waits" in capfd.readouterr().err, lambda: "no spare waits")
        child.socket.close()
        child.end(PATIENCE_S)
    assert child.ended.result() == 0


def test_a_spare_that_can_not_start_is_tried_again(monkeypatch, tmp_path, caplog):
    start, tries = subprocess.Popen, []

    def short_of_handles(words, **options):
        if "--spare" in words:
            tries.append(words)
            if len(tries) < 3:
                raise OSError(24, "Too many open files")
        return start(words, **options)

    monkeypatch.setattr(subprocess, "Popen", short_of_handles)
    with keeping(tmp_path) as kept:
        kept.until(lambda: len(kept.spares()) == 1)
    assert caplog.text.count("no spare process can be started: OSError(24, 'Too many open files')") == 2


def test_a_stopped_spare_is_not_taken(tmp_path):
    with keeping(tmp_path) as kept:
        kept.until(lambda: len(kept.spares()) == 1)
        pid = kept.spares()[0]
        stop(pid)
        kept.kill("instance-0")
        kept.until(lambda: "start 1" in kept.told())
        assert f"is {pid}" not in kept.told()


@pytest.mark.parametrize(("wanted", "num_instances"), [(False, 2), (True, 1)])
def test_there_is_no_spare_where_none_is_wanted_or_nothing_stands_in(wanted, num_instances):
    engine = EngineConfig(model_dir="m", num_instances=num_instances, spare_process=wanted)
    assert spare_of(ClusterConfig(engine=engine, served_model_name="served"), 5) is None
