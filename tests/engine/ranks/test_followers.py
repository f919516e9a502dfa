# SPDX-License-Identifier: Apache-2.0
"""The keeper's part for an instance's ranks, with real followers: start, loss and end."""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.engine.adapters.make_store import make_store
from moe_lora.engine.ranks import followers as module
from moe_lora.engine.ranks.followers import HOST_STORE, Done, Followers, OrderEnded, start_followers
from moe_lora.engine.sleep import Sleep
from tests.dist.cluster_jobs import alive, until
from tests.engine.parts import packed
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop


@dataclass
class Started:
    """Two followers that wait for their set-up."""

    followers: Followers
    pids: list[int]
    directory: Path


@dataclass
class Waking:
    """done: of the verb's thread.  gate: lets rank 0 go on."""

    followers: Followers
    far: Connection
    done: Future[None]
    gate: threading.Event
    steps: Iterator[object]


class SlowedChild:
    """Each look sees a stopped process.  CPU time passes between the first looks."""

    NUM_PROGRESS = 50
    is_stopped = True

    def __init__(self) -> None:
        self.process = self
        self.num_looks = 0
        self.killed = threading.Event()

    @property
    def cpu_ticks(self) -> int:
        self.num_looks += 1
        return min(self.num_looks, self.NUM_PROGRESS)

    def kill(self) -> None:
        if not self.killed.is_set():
            self.looks_at_kill = self.num_looks
            self.killed.set()


@pytest.fixture
def started() -> Iterator[Started]:
    followers = start_followers(EngineConfig(model_dir="none", expert_parallel=3, num_threads=3))
    found = Started(followers, [child.pid for child in followers._children], followers.directory)
    yield found
    followers.close(at_once=True)
    assert not any(map(alive, found.pids))
    assert not found.directory.exists()


def test_two_ranks_that_die_at_once_are_both_told_with_their_cause(started):
    told: queue.Queue[EngineDeadError] = queue.Queue()
    started.followers.watch(told.put)
    for pid, number in zip(started.pids, (signal.SIGKILL, signal.SIGSEGV), strict=True):
        os.kill(pid, number)
    found = sorted(str(told.get(timeout=PATIENCE_S)) for _ in range(2))
    assert found == [
        "rank 1 of this instance was killed by SIGKILL; restart the instance",
        "rank 2 of this instance was killed by SIGSEGV; restart the instance",
    ]


def test_a_rank_killed_by_a_signal_without_a_name_is_told_too(started):
    told: queue.Queue[EngineDeadError] = queue.Queue()
    started.followers.watch(told.put)
    os.kill(started.pids[0], 40)
    assert "rank 1 of this instance was killed by signal 40" in str(told.get(timeout=PATIENCE_S))


def test_a_rank_that_dies_in_its_start_is_named_to_who_waits_for_it(started):
    os.kill(started.pids[0], signal.SIGABRT)
    with pytest.raises(EngineDeadError, match="rank 1 of this instance was killed by SIGABRT"):
        started.followers.settle()
    with pytest.raises(EngineDeadError, match="rank 1 of this instance was killed by SIGABRT"):
        started.followers.tell(None)


def test_the_end_of_a_rank_whose_instance_ends_is_no_loss(started):
    told: queue.Queue[EngineDeadError] = queue.Queue()
    started.followers.watch(told.put)
    started.followers.close()
    started.followers.close()
    assert told.empty()
    assert [child.ended.result() for child in started.followers._children] == [0, 0]


def test_ranks_that_stand_still_are_killed_after_one_limit(started, monkeypatch):
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.2)
    for pid in started.pids:
        stop(pid)
    started.followers.close()
    assert [child.ended.result() for child in started.followers._children] == [-9, -9]


def test_a_rank_that_can_not_be_started_leaves_no_other(monkeypatch, tmp_path):
    start, found = module.start_child, []

    def start_one(*words, **options):
        if found:
            raise OSError(24, "Too many open files")
        found.append(start(*words, **options))
        return found[0]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "start_child", start_one)
    with pytest.raises(OSError, match="Too many open files"):
        start_followers(EngineConfig(model_dir="none", expert_parallel=3, num_threads=3))
    until(lambda: not alive(found[0][0].pid), lambda: "the first rank is left")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_stopped_for_long_is_killed(started, monkeypatch):
    told: queue.Queue[EngineDeadError] = queue.Queue()
    monkeypatch.setattr(module, "STOPPED_S", 0.2)
    started.followers.watch(told.put)
    os.kill(started.pids[1], signal.SIGSTOP)
    assert "rank 2 of this instance was killed by SIGKILL" in str(told.get(timeout=PATIENCE_S))


def test_a_rank_that_progresses_between_stops_is_not_killed(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    monkeypatch.setattr(module, "STOPPED_S", 0.005)
    child = SlowedChild()
    followers = Followers(children=[child])
    followers.end_stopped()
    assert child.killed.wait(PATIENCE_S)
    followers._ending.set()
    assert child.looks_at_kill == SlowedChild.NUM_PROGRESS + 5


def test_an_error_of_rank_0_ends_the_meeting_without_the_followers(started, monkeypatch):
    monkeypatch.setattr(module, "MEET_TIMEOUT_S", PATIENCE_S)

    def join() -> None:
        raise OSError("no network interface")

    with pytest.raises(OSError, match="no network interface"):
        started.followers.meet(join)


class SlowToClose(Connection):
    """A connection with a pause between the hang-up and the end of `close`."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle, readable=False)
        self.num_closes = 0
        self.go_on = threading.Event()

    def _close(self) -> None:
        self.num_closes += 1
        super()._close()
        assert self.go_on.wait(PATIENCE_S)


def test_an_error_of_rank_0_goes_before_the_errors_that_it_causes(monkeypatch):
    (near, far), (silent, other) = Pipe(), Pipe()
    failed, joining = Pipe(duplex=False)
    slow = SlowToClose(os.dup(joining.fileno()))
    joining.close()
    monkeypatch.setattr(module, "Pipe", lambda duplex: (failed, slow))
    followers = Followers([near, silent])
    answers = followers.answers

    def answers_and_go_on(*given):
        found = answers(*given)
        slow.go_on.set()
        return found

    def join() -> None:
        far.send(Done(RuntimeError("the other rank is gone")))
        until(lambda: not near.poll(), lambda: "the answer is not read")
        raise OSError("no network interface")

    monkeypatch.setattr(followers, "answers", answers_and_go_on)
    with far, other, pytest.raises(OSError, match="no network interface"):
        followers.meet(join)
    assert slow.num_closes == 1
    followers.close()


@pytest.fixture
def waking() -> Iterator[Waking]:
    """A wake-up whose rank 0 still reads weights."""
    (near, far), gate = Pipe(), threading.Event()
    followers = Followers([near], OwnFolder())
    rank = SimpleNamespace(read_weights=lambda: gate.wait(PATIENCE_S))
    transfers = SimpleNamespace(followers=followers, held=False)
    sleep = Sleep(SimpleNamespace(rank=rank, transfers=transfers), None, None)
    sleep._has_weights = False
    steps = sleep.stop(["weights"])
    yield Waking(followers, far, next(steps), gate, steps)
    gate.set()
    far.close()
    followers.close()


def test_an_answer_to_a_wake_up_is_no_end_of_a_copy(waking):
    waking.far.recv_bytes()
    waking.far.send(Done())
    assert waking.followers.ended_everywhere([(7, None)]) == []
    waking.gate.set()
    waking.done.result(PATIENCE_S)
    waking.far.send(OrderEnded(7))
    assert waking.followers.ended_everywhere([]) == [(7, None)]


def test_an_unload_beside_a_wake_up_returns_at_once_and_removes_its_file_later(waking):
    followers, far = waking.followers, waking.far
    config = EngineConfig(model_dir="", tensor_parallel=2)
    no_store = SimpleNamespace(store=None)
    store = make_store(
        config, SimpleNamespace(lora_server=None), None, followers, no_store, None, ExitStack()
    )
    unloaded, again, later = (store.keep(packed(name, value=number)) for number, name in enumerate("abc"))
    for one in (unloaded, again):
        unload = threading.Thread(target=store.forget, args=[one], daemon=True)
        unload.start()
        unload.join(PATIENCE_S)
        assert not unload.is_alive()
    store.keep(again)
    assert len(list((followers.directory / HOST_STORE).glob("*.packed.*"))) == 3
    far.recv_bytes()
    assert not far.poll()
    far.send(Done(ConfigError("the checkpoint is gone")))
    waking.gate.set()
    with pytest.raises(ConfigError, match="is gone"):
        waking.done.result(PATIENCE_S)
    far.send(Done())
    far.send(Done())
    store.forget(later)
    (left,) = (followers.directory / HOST_STORE).glob("*.packed.*")
    assert left.name.startswith(again.content_hash)
