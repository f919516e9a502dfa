# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch

from moe_lora.engine.adapters.transfers import Mover
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")


def copied(copy: Callable[[], object], num_bytes: int) -> Iterator[int]:
    """A copy of one step."""
    copy()
    yield num_bytes


def test_copies_are_done_in_turn_on_another_thread_and_told():
    told = threading.Semaphore(0)
    mover = Mover(CPU, told.release)
    seen: list[tuple[int, bool]] = []
    here = threading.current_thread()
    for number in range(5):
        mover.submit(
            number, copied(lambda number=number: seen.append((number, threading.current_thread() is here)), 8)
        )
    for _ in range(5):
        assert told.acquire(timeout=PATIENCE_S)
    assert mover.finished() == [(number, None) for number in range(5)]
    assert mover.finished() == []
    assert seen == [(number, False) for number in range(5)]
    mover.close()
    assert not mover.is_alive()


def test_submitting_and_asking_wait_for_no_copy():
    told, may_end = threading.Semaphore(0), threading.Event()
    mover = Mover(CPU, told.release)
    mover.submit(1, copied(may_end.wait, 8))
    mover.submit(2, copied(lambda: None, 8))
    assert mover.finished() == []
    may_end.set()
    assert told.acquire(timeout=PATIENCE_S)
    assert told.acquire(timeout=PATIENCE_S)
    assert mover.finished() == [(1, None), (2, None)]
    mover.close()


def test_failure_is_told_where_the_copies_are_asked_for_and_ends_no_other():
    told = threading.Semaphore(0)
    mover = Mover(CPU, told.release)

    def fail() -> None:
        raise OSError("the disk is gone")

    mover.submit(1, copied(fail, 8))
    mover.submit(2, copied(lambda: None, 8))
    for _ in range(2):
        assert told.acquire(timeout=PATIENCE_S)
    (first, error), second = mover.finished()
    assert (first, str(error), second) == (1, "the disk is gone", (2, None))
    mover.close()


def test_closing_ends_a_copy_that_is_slowed_down():
    mover = Mover(CPU, lambda: None, bytes_per_s=1.0)
    mover.submit(1, copied(lambda: None, 1_000_000))
    mover.close()
    assert not mover.is_alive()


def test_nothing_of_the_last_copy_is_held_while_there_is_no_other():
    source = torch.zeros(4)
    alive = weakref.ref(source)
    done = threading.Event()
    mover = Mover(CPU, done.set)
    mover.submit(1, copied(source.clone, 4))
    del source
    assert done.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while alive() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    mover.close()


def test_what_a_step_copied_is_there_before_the_next_one_begins():
    told, seen, may_go_on = threading.Semaphore(0), [], threading.Event()

    def steps() -> Iterator[int]:
        yield 8
        seen.append("first is there")
        assert may_go_on.wait(PATIENCE_S)
        yield 8

    mover = Mover(CPU, told.release, bytes_per_s=1000.0)
    mover.submit(1, steps())
    deadline = time.monotonic() + PATIENCE_S
    while not seen:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert mover.finished() == []
    may_go_on.set()
    assert told.acquire(timeout=PATIENCE_S)
    assert mover.finished() == [(1, None)]
    mover.close()
