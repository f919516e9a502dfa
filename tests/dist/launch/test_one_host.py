# SPDX-License-Identifier: Apache-2.0
"""Roles as processes of one host: kept running, ended together, nothing left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.processes import entered
from moe_lora.assemble import serve_host
from moe_lora.config import EngineConfig, FrontEndConfig, ProvisionConfig, RegistryConfig
from moe_lora.config.cluster import ClusterConfig, cluster_text, read_cluster
from moe_lora.core import processes
from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.host import num_open_files
from moe_lora.core.processes import RestartPolicy
from moe_lora.dist.launch import host_roles
from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets, write_cluster
from moe_lora.dist.launch.host_roles import HostRoles, Role, roles_of
from moe_lora.dist.net.thread import LoopThread
from moe_lora.serve.reload import Reload
from tests.dist.cluster_jobs import alive, until
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

QUICK = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.02)
SLEEPING = Role(name="sleeper", kind="one", words=("-c", "import time; time.sleep(600)"))
FAILING = Role(name="failing", kind="other", words=("-c", "raise SystemExit(3)"))
TELLING = """
import sys, time
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.host_roles import say_started
status = int(sys.argv[sys.argv.index("--status-fd") + 1])
if sys.argv[1] == "unfit":
    say_started(status, ConfigError("it can't be"))
    sys.exit(1)
say_started(status)
time.sleep(600)
"""
FIT, UNFIT = (Role(name=name, kind="telling", words=("-c", TELLING, name)) for name in ("fit", "unfit"))
UNFIT = replace(UNFIT, kind="unfit")


@pytest.fixture
def cluster(tmp_path) -> ClusterConfig:
    return ClusterConfig(
        engine=EngineConfig(
            model_dir=str(tmp_path / "base"),
            adapters=(("a", str(tmp_path / "a")),),
            num_instances=2,
            decode_buckets=(1, 2),
            eager=True,
        ),
        served_model_name="served",
        front_end=FrontEndConfig(port=8123, placement="loraserve", operating_points=str(tmp_path / "points")),
        provision=ProvisionConfig(target_iar=0.9),
        registry=RegistryConfig(folder=str(tmp_path / "registry"), adapters=("r",)),
    )


def test_the_file_says_what_the_settings_say(cluster, tmp_path):
    everything = on_sockets(cluster, 2, str(tmp_path))
    (tmp_path / "cluster.yaml").write_text(cluster_text(everything))
    assert read_cluster(tmp_path / "cluster.yaml") == everything
    with cluster_file(everything) as descriptor:
        assert read_cluster(f"/dev/fd/{descriptor}") == everything
        assert os.fstat(descriptor).st_mode & 0o077 == 0


def test_relative_paths_are_those_of_the_folder_where_it_was_started(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = ClusterConfig(
        engine=EngineConfig(model_dir="base", adapters=(("a", "a"),)),
        served_model_name="s",
        certificates="certificates",
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cluster.yaml").write_text(cluster_text(relative))
    engine = read_cluster(tmp_path / "elsewhere" / "cluster.yaml").engine
    assert engine.model_dir == str(tmp_path / "base")
    assert engine.adapters == (("a", str(tmp_path / "a")),)


def test_a_file_for_which_the_disk_has_no_room_says_what_it_said(cluster, tmp_path, monkeypatch):
    longer = replace(cluster, served_model_name="s" * 5000)
    with cluster_file(cluster) as descriptor:
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, text, at: write(file, text[:4096], at))
        with pytest.raises(OSError, match="No space left"):
            write_cluster(descriptor, longer)
        assert read_cluster(f"/dev/fd/{descriptor}") == cluster


def test_each_role_has_a_socket_of_its_own_in_the_folder(cluster, tmp_path):
    once = on_sockets(cluster, 2, str(tmp_path))
    assert sorted(once.dialled_addresses()) == ["controller", "front-end-0", "front-end-1"]
    assert len({*once.dialled_addresses().values(), once.controller.address}) == 4
    assert all(address.path.startswith(str(tmp_path)) for address in once.dialled_addresses().values())
    names = [role.name for role in roles_of(once, 5, [6])]
    assert names == ["controller", "front-end-0", "front-end-1", "instance-0", "instance-1"]


@contextmanager
def keeping(
    *roles: Role, policy: RestartPolicy = QUICK, dead_s: float = 30.0
) -> Iterator[tuple[HostRoles, LoopThread]]:
    """The roles kept running in an event loop of their own."""

    @asynccontextmanager
    async def kept() -> AsyncIterator[HostRoles]:
        found = HostRoles(roles, policy=policy, dead_s=dead_s)
        yield found
        await found.stop()

    with entered(kept) as (found, thread):
        yield found, thread


def pids(caplog, name: str) -> list[int]:
    return [int(pid) for pid in re.findall(rf"{name} started \(process (\d+)\)", caplog.text)]


def test_what_ends_is_started_again_for_ever(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    with keeping(SLEEPING, FAILING) as (kept, _):
        until(lambda: len(pids(caplog, "failing")) > 12, lambda: caplog.text)
        assert len(pids(caplog, "sleeper")) == 1
        assert not kept.failed.done()
    assert "ended with exit code 3" in caplog.text


def test_one_that_stays_stopped_is_started_again_and_one_that_wakes_is_left_alone(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    other = replace(SLEEPING, name="other")
    with keeping(SLEEPING, other, dead_s=5.0):
        until(lambda: pids(caplog, "sleeper") and pids(caplog, "other"), lambda: caplog.text)
        forgotten, woken = pids(caplog, "sleeper")[0], pids(caplog, "other")[0]
        stop(woken)
        stop(forgotten)
        os.kill(woken, signal.SIGCONT)
        until(lambda: len(pids(caplog, "sleeper")) == 2, lambda: caplog.text)
        assert "sleeper is stopped for" in caplog.text
        assert not alive(forgotten)
        assert pids(caplog, "other") == [woken]
        assert alive(woken)


def test_one_that_is_killed_again_and_again_is_there_again(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    with keeping(SLEEPING) as (kept, thread):
        for count in range(1, 11):
            until(lambda count=count: len(pids(caplog, "sleeper")) == count, lambda: caplog.text)
            thread.loop.call_soon_threadsafe(kept.kill, "sleeper")
        until(lambda: len(pids(caplog, "sleeper")) == 11, lambda: caplog.text)
        assert alive(pids(caplog, "sleeper")[-1])


def test_two_that_die_at_once_are_both_there_again(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    with keeping(SLEEPING, replace(SLEEPING, name="other")):
        until(lambda: pids(caplog, "sleeper") and pids(caplog, "other"), lambda: caplog.text)
        first = [*pids(caplog, "sleeper"), *pids(caplog, "other")]
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(pids(caplog, "sleeper")) == len(pids(caplog, "other")) == 2, lambda: caplog.text)
        assert not any(map(alive, first))
        again = [pids(caplog, "sleeper")[1], pids(caplog, "other")[1]]
        assert all(map(alive, again))
    assert not any(map(alive, again))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")])
def test_what_a_signal_ends_in_its_start_is_told_with_the_signal(number, how):
    words = ("-c", f"import os; os.kill(os.getpid(), {int(number)})")
    with (
        keeping(Role(name="dying", kind="one", words=words)) as (kept, thread),
        pytest.raises(EngineDeadError, match=f"was killed by {how} while starting"),
    ):
        thread.run(kept.ready(), PATIENCE_S)


def test_setting_that_keeps_a_role_from_its_part_ends_it(caplog):
    with keeping(SLEEPING, UNFIT) as (kept, _):
        until(kept.failed.done, lambda: caplog.text)
        assert isinstance(kept.failed.result(), ConfigError)
    assert "unfit is not started again, since a setting is the cause: it can't be" in caplog.text


def test_while_others_of_its_kind_stand_in_nothing_has_failed(caplog):
    with keeping(SLEEPING, replace(UNFIT, kind="one")) as (kept, _):
        until(lambda: "unfit is not started again" in caplog.text, lambda: caplog.text)
        assert not kept.failed.done()


def test_what_keeps_one_from_starting_is_raised_where_all_are_awaited():
    with keeping(FIT, UNFIT) as (kept, thread), pytest.raises(ConfigError, match="it can't be"):
        thread.run(kept.ready(), PATIENCE_S)
    with keeping(FIT) as (kept, thread):
        thread.run(kept.ready(), PATIENCE_S)


def test_one_that_yields_has_the_lowest_priority_until_it_is_ready(monkeypatch):
    calls = []
    monkeypatch.setattr(host_roles, "set_priority", lambda pid, added: calls.append((pid, added)))
    with keeping(SLEEPING) as (kept, thread):

        async def add() -> None:
            await kept.add(replace(FIT, yields=True))

        thread.run(add(), PATIENCE_S)
        [(pid, first), (same, last)] = calls
        assert (same, first, last) == (pid, processes.LOWEST, 0)
        thread.run(kept.remove("fit"), PATIENCE_S)
        assert not alive(pid)
        assert list(kept.running) == ["sleeper"]


def test_one_that_dies_without_a_word_is_started_again_before_who_awaits_all_is_told(caplog, tmp_path):
    caplog.set_level("INFO", logger="moe_lora")
    dying = """
import os, sys
if int(sys.argv[sys.argv.index("--starts") + 1]) < 2:
    os.kill(os.getpid(), 9)
"""
    with keeping(Role(name="dying", kind="one", words=("-c", dying + TELLING))) as (kept, thread):
        thread.run(kept.ready(), PATIENCE_S)
    assert len(pids(caplog, "dying")) == 3
    with keeping(FAILING) as (kept, thread), pytest.raises(EngineDeadError, match="exit code 3 while"):
        thread.run(kept.ready(), PATIENCE_S)


def test_death_after_a_long_life_begins_the_count_anew(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    patient = RestartPolicy(quick_s=0.0, first_pause_s=600.0)  # no life is too short
    with keeping(FAILING, policy=patient):
        until(lambda: len(pids(caplog, "failing")) > 3, lambda: caplog.text)


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (socket, "socketpair", OSError(24, "Too many open files")),
        (subprocess, "Popen", OSError(24, "Too many open files")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_lack_of_handles_or_threads_for_a_while_costs_no_role(caplog, monkeypatch, module, name, error):
    caplog.set_level("INFO", logger="moe_lora")
    problems, start = [error] * 8, getattr(module, name)

    def start_if_there_is_room(*args, **keywords):
        if problems:
            raise problems.pop()
        return start(*args, **keywords)

    with keeping() as (_, thread):  # whose loop has its handles

        async def kept() -> HostRoles:
            monkeypatch.setattr(module, name, start_if_there_is_room)
            return HostRoles([SLEEPING], policy=QUICK)

        found = thread.run(kept(), PATIENCE_S)
        until(lambda: pids(caplog, "sleeper"), lambda: caplog.text)
        thread.run(found.stop(), PATIENCE_S)
    assert caplog.text.count(f"it can't be kept running: {error!r}") == 8


def test_what_says_garbage_is_ended_and_started_again_without_a_handle_left(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    garbled = """
import os, sys, time
status = int(sys.argv[sys.argv.index("--status-fd") + 1])
os.write(status, b"garbage")
os.close(status)
time.sleep(600)
"""
    with keeping(Role(name="garbled", kind="one", words=("-c", garbled))):
        until(lambda: len(pids(caplog, "garbled")) >= 2, lambda: caplog.text)
        before = num_open_files()
        until(lambda: len(pids(caplog, "garbled")) > 6, lambda: caplog.text)
        assert num_open_files() < before + 5
        assert not any(alive(pid) for pid in pids(caplog, "garbled")[:-2])
    assert not any(map(alive, pids(caplog, "garbled")))
    assert "garbled ended after" in caplog.text


def test_settings_that_can_not_be_passed_on_are_told_with_the_way_out(cluster, monkeypatch, tmp_path, caplog):
    """By SIGHUP to several front ends, while the disk is full."""
    told: list[object] = []

    async def run(roles, drain_s, reload, *_: object) -> bool:
        kept = SimpleNamespace(hang_up=lambda: told.append("hung up"))
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", no_room)
            await reload(kept)
        assert not told
        await reload(kept)
        return True

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_roles, "run_roles", run)
    plain = replace(cluster, provision=None, registry=None, front_end=FrontEndConfig(port=0))
    plain = replace(plain, engine=replace(plain.engine, num_threads=None, state_dir=str(tmp_path)))
    assert serve_host(plain, 2, Reload(lambda: plain)) == 0
    assert told == ["hung up"]
    assert "No space left on device): make room in TMPDIR, then send SIGHUP again" in caplog.text


def test_settings_that_are_passed_on_leave_the_other_sections_of_the_file(cluster, monkeypatch, tmp_path):
    """A change of the LoRA Server's layout is in the file alone."""
    found: list[ClusterConfig] = []

    async def run(roles, drain_s, reload, *_: object) -> bool:
        file = roles[0].fds[0]
        write_cluster(file, replace(read_cluster(f"/dev/fd/{file}"), served_model_name="later"))
        await reload(SimpleNamespace(hang_up=lambda: found.append(read_cluster(f"/dev/fd/{file}"))))
        return True

    monkeypatch.setattr(host_roles, "run_roles", run)
    plain = replace(cluster, provision=None, registry=None, front_end=FrontEndConfig(port=0))
    plain = replace(plain, engine=replace(plain.engine, num_threads=None, state_dir=str(tmp_path)))
    changed = replace(plain, front_end=FrontEndConfig(port=0, max_connections=7))
    reads = iter((plain, changed))
    assert serve_host(plain, 2, Reload(lambda: next(reads))) == 0
    assert [(one.served_model_name, one.front_end.max_connections) for one in found] == [("later", 7)]


def test_stopping_ends_what_runs(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    with keeping(SLEEPING) as (kept, _):
        until(lambda: pids(caplog, "sleeper"), lambda: caplog.text)
    assert not alive(pids(caplog, "sleeper")[0])
    assert not kept.failed.done()


def test_what_does_not_end_when_told_to_is_killed_when_all_is_to_end_at_once(caplog, monkeypatch):
    caplog.set_level("INFO", logger="moe_lora")
    monkeypatch.setattr(host_roles, "STOP_S", 3600.0)
    stubborn = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import os
os.close(int(sys.argv[sys.argv.index("--status-fd") + 1]))
time.sleep(600)
"""
    at_once = []

    @asynccontextmanager
    async def kept() -> AsyncIterator[None]:
        at_once.append(asyncio.Event())
        found = HostRoles([Role(name="stubborn", kind="one", words=("-c", stubborn))], at_once=at_once[0])
        yield
        stopping = asyncio.create_task(found.stop())
        done, _ = await asyncio.wait([stopping], timeout=0.3)
        assert not done
        at_once[0].set()
        await stopping

    with entered(kept):
        until(lambda: pids(caplog, "stubborn"), lambda: caplog.text)
        [pid] = pids(caplog, "stubborn")
        until(lambda: ignores_sigterm(pid), lambda: "it does not ignore the signal")
    assert not alive(pid)


def ignores_sigterm(pid: int) -> bool:
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_pauses_grow_up_to_a_bound():
    policy = RestartPolicy()
    pauses = [policy.pause_s(num_deaths) for num_deaths in range(1, 9)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert policy.pause_s(5000) == 5.0


CHILD = """
import os, time
from moe_lora.dist.launch.roles import end_with
end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""


def test_a_child_ends_with_its_parent_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child), lambda: "the child outlives its parent")
