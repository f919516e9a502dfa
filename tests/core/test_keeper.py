# SPDX-License-Identifier: Apache-2.0
"""The keeper's part for each child, with real processes: start, first word, end, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_lora.core import processes
from moe_lora.core.host import num_open_files
from moe_lora.core.processes import Child, RestartPolicy, end_children
from tests.dist.cluster_jobs import alive, until
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

SERVING = """
import time
from multiprocessing.connection import Connection
from moe_lora.core.teardown import end_at_hang_up, run_child

def serve(fd):
    connection = Connection(fd)
    end_at_hang_up(fd, lambda: None)
    connection.send("ready")
    while True:
        {what}

run_child(serve)
"""
BUSY = SERVING.format(what="time.sleep(0.01)")
ANSWERING = SERVING.format(what="connection.send(connection.recv())")
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVING.replace(
    "    end_at_hang_up(fd, lambda: None)\n", ""
).format(what="time.sleep(0.01)")


@pytest.fixture
def children() -> Iterator[list[tuple[Child, Connection]]]:
    """Of a test, with the keeper's connections, whose end would be a hang-up."""
    found: list[tuple[Child, Connection]] = []
    yield found
    end_children([child for child, _ in found], 0)


def start(
    children: list[tuple[Child, Connection]], code: str, *, ready: bool = True
) -> tuple[Child, Connection]:
    child = Child("-c", code)
    connection = Connection(child.socket.detach())
    children.append((child, connection))
    if ready:
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == "ready"
    return child, connection


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("pass", "ended with exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
def test_a_child_that_dies_in_its_start_hangs_up_and_says_how(children, code, how):
    child, connection = start(children, code, ready=False)
    with connection, pytest.raises(EOFError):
        connection.recv()
    child.end(PATIENCE_S)
    assert child.how_ended == how


def test_children_that_die_at_once_are_each_reported_once(children):
    ended: list[int] = []
    found = [start(children, BUSY)[0] for _ in range(2)]
    for child in found:
        child.ended.add_done_callback(lambda _, child=child: ended.append(child.pid))
    for child in found:
        os.kill(child.pid, signal.SIGSEGV)
    until(lambda: len(ended) == 2, lambda: f"ended: {ended}")
    assert sorted(ended) == sorted(child.pid for child in found)
    assert [child.how_ended for child in found] == ["was killed by SIGSEGV"] * 2


def test_a_child_ends_at_its_keepers_hang_up_even_in_a_computation(children):
    child, connection = start(children, BUSY)
    connection.close()
    child.end(PATIENCE_S)
    assert child.ended.result() == 0


def test_a_child_that_waits_for_its_keeper_ends_at_the_hang_up(children):
    child, connection = start(children, ANSWERING)
    connection.send("echo")
    assert connection.recv() == "echo"
    connection.close()
    child.end(PATIENCE_S)
    assert child.ended.result() == 0


def test_a_child_that_neither_hang_up_nor_signal_ends_is_killed(children):
    child, connection = start(children, STUBBORN)
    connection.close()
    child.process.terminate()
    child.end(0.2)
    assert child.how_ended == "was killed by SIGKILL"
    assert not alive(child.pid)


def test_a_stopped_child_is_seen_and_can_be_killed(children):
    child, _ = start(children, BUSY)
    assert not child.is_stopped
    stop(child.pid)
    assert child.is_stopped
    child.end(0)
    assert not child.is_stopped
    assert child.how_ended == "was killed by SIGKILL"


def test_the_cpu_time_of_a_child_grows_until_it_is_stopped(children):
    child, _ = start(children, BUSY)
    until(lambda: child.cpu_ticks > 0, lambda: "no CPU time")
    before = child.cpu_ticks
    until(lambda: child.cpu_ticks > before, lambda: "no further CPU time")
    stop(child.pid)
    assert child.cpu_ticks == child.cpu_ticks > before
    child.end(0)
    assert child.cpu_ticks == 0


def test_all_children_share_one_limit_and_the_orderly_are_not_killed(children):
    orderly, connection = start(children, BUSY)
    stubborn = [start(children, STUBBORN)[0] for _ in range(2)]
    connection.close()
    orderly.end(PATIENCE_S)
    end_children([*stubborn, orderly], 0.1)
    assert [child.ended.result() for child in (*stubborn, orderly)] == [-9, -9, 0]
    end_children([*stubborn, orderly], 0.1)


def test_ctrl_c_in_the_terminal_reaches_no_child(children):
    child, connection = start(children, ANSWERING)
    assert os.getsid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGINT)  # nor does one from elsewhere end it
    connection.send("still here")
    assert connection.poll(PATIENCE_S)
    assert connection.recv() == "still here"
    assert not child.ended.done()


KEEPER = f"""
import sys, time
from multiprocessing.connection import Connection
from moe_lora.core.processes import Child
found = [Child("-c", code) for code in ({BUSY!r}, {ANSWERING!r})]
connections = [Connection(child.socket.detach()) for child in found]
if sys.argv[1] == "ready":
    assert [one.recv() for one in connections] == ["ready", "ready"]
print(*(child.pid for child in found), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["ready", "in the start"])
def test_a_killed_keeper_leaves_no_child(when):
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, when], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    found = [int(pid) for pid in keeper.stdout.readline().split()]
    assert len(found) == 2
    keeper.kill()
    keeper.wait()
    until(lambda: not any(map(alive, found)), lambda: "a child outlives its keeper")


@pytest.mark.parametrize("lacks", ["socketpair", "Popen", "start"])
def test_a_start_without_handles_memory_or_threads_leaves_nothing(monkeypatch, lacks):
    places = {"socketpair": processes.socket, "Popen": processes.subprocess, "start": threading.Thread}
    started: list[int] = []

    def fail(*args: object, **_: object) -> None:
        if lacks == "start":
            started.append(int(args[0].name.removeprefix("child-")))
        raise OSError(24, "Too many open files")

    before = num_open_files()
    with monkeypatch.context() as full:
        full.setattr(places[lacks], lacks, fail)
        with pytest.raises(OSError, match="Too many open files"):
            Child("-c", "import time; time.sleep(600)")
    assert num_open_files() == before
    assert len(started) == (lacks == "start")
    assert not any(map(alive, started))


def test_a_child_inherits_the_given_descriptors_and_environment_alone(tmp_path):
    with open(tmp_path / "given", "w") as given, open(tmp_path / "other", "w"):
        code = f"""
import os, sys
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
names = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in fds if os.path.exists(f"/proc/self/fd/{{fd}}")]
os.write({given.fileno()}, "\\n".join([os.environ["ADDED"], *names]).encode())
"""
        child = Child("-c", code, fds=(given.fileno(),), environment={"ADDED": "value"})
        child.end(PATIENCE_S)
        child.socket.close()
        assert child.ended.result() == 0
    added, *names = Path(tmp_path / "given").read_text().splitlines()
    assert added == "value"
    assert str(tmp_path / "given") in names
    assert str(tmp_path / "other") not in names


def test_a_death_after_a_long_life_begins_the_count_anew():
    policy, deaths = RestartPolicy(quick_s=30.0), [0]
    for lived_s in (1.0, 1.0, 29.0, 31.0, 1.0):
        deaths.append(policy.num_deaths(deaths[-1], lived_s))
    assert deaths[1:] == [1, 2, 3, 1, 2]
    assert [policy.pause_s(one) for one in deaths[1:]] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_a_child_that_dies_between_two_looks_is_reaped(children):
    child, _ = start(children, BUSY)
    os.kill(child.pid, signal.SIGKILL)
    until(child.ended.done, lambda: "nobody waits for the child")
    assert not Path(f"/proc/{child.pid}").exists()
    child.process.kill()
    assert child.how_ended == "was killed by SIGKILL"
