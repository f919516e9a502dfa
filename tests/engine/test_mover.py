from __future__ import annotations

import threading

import pytest
import torch

from moe_lora.engine.mover import Mover

CPU = torch.device("cpu")


def test_copies_are_done_in_turn_on_another_thread_and_told():
    told = threading.Semaphore(0)
    mover = Mover(CPU, told.release)
    seen: list[tuple[int, bool]] = []
    here = threading.current_thread()
    for number in range(5):
        mover.submit(
            number, 8, lambda number=number: seen.append((number, threading.current_thread() is here))
        )
    for _ in range(5):
        assert told.acquire(timeout=20.0)
    assert mover.finished() == [0, 1, 2, 3, 4]
    assert mover.finished() == []
    assert seen == [(number, False) for number in range(5)]
    mover.close()
    assert not mover.is_alive()


def test_submitting_and_asking_wait_for_no_copy():
    told, may_end = threading.Semaphore(0), threading.Event()
    mover = Mover(CPU, told.release)
    mover.submit(1, 8, may_end.wait)
    mover.submit(2, 8, lambda: None)
    assert mover.finished() == []
    may_end.set()
    assert told.acquire(timeout=20.0)
    assert told.acquire(timeout=20.0)
    assert mover.finished() == [1, 2]
    mover.close()


def test_failure_is_raised_where_the_copies_are_asked_for():
    told = threading.Semaphore(0)
    mover = Mover(CPU, told.release)

    def fail() -> None:
        raise OSError("the disk is gone")

    mover.submit(1, 8, fail)
    assert told.acquire(timeout=20.0)
    with pytest.raises(OSError, match="the disk is gone"):
        mover.finished()
    mover.close()


def test_closing_ends_a_copy_that_is_slowed_down():
    mover = Mover(CPU, lambda: None, bytes_per_s=1.0)
    mover.submit(1, 1_000_000, lambda: None)
    mover.close()
    assert not mover.is_alive()
