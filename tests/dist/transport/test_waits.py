# SPDX-License-Identifier: Apache-2.0
"""Waits ask for >=, end in time, and one sleeper can wait for any of many signals."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from moe_lora.core.errors import SignalTimeoutError

from .conftest import Pair
from .peers import TIMEOUT_S


def test_a_skipped_value_does_not_hang_a_waiter(pair: Pair) -> None:
    window = pair.here.alloc("skipped", 64, 2)
    pair.peer.call("attach", window.descriptor())
    pair.peer.call("put", "skipped", 0, 8, 1, 0, 5)
    assert pair.here.signal_wait_until(window, 0, 3, TIMEOUT_S) == 5
    pair.peer.call("put", "skipped", 0, 8, 1, 0, 2)
    pair.peer.call("put", "skipped", 0, 8, 1, 1, 1)
    assert pair.here.signal_wait_until(window, 1, 1, TIMEOUT_S) == 1
    assert window.read_signal(0) == 5  # the lower value changed nothing


def test_values_use_all_64_bits(pair: Pair) -> None:
    window = pair.here.alloc("large", 64, 1)
    pair.peer.call("attach", window.descriptor())
    top = (1 << 64) - 1
    pair.peer.call("put", "large", 0, 8, 1, 0, top)
    assert pair.here.signal_wait_until(window, 0, top, TIMEOUT_S) == top


def test_wait_any_wakes_a_sleeper_by_any_signal_of_any_window(pair: Pair) -> None:
    windows = [pair.here.alloc(f"any-{i}", 64, 3) for i in range(3)]
    waits = [(window, index, 1) for window in windows for index in range(3)]
    assert pair.here.wait_any(waits, 0.0) is None
    for chosen in (5, 1, 7):
        pair.peer.call("attach", windows[chosen // 3].descriptor())
        found: list[int | None] = []
        sleeper = threading.Thread(target=lambda: found.append(pair.here.wait_any(waits, TIMEOUT_S)))  # noqa: B023
        sleeper.start()
        time.sleep(0.02)  # well asleep
        pair.peer.call("put", f"any-{chosen // 3}", 0, 8, 1, chosen % 3, 1)
        sleeper.join()
        assert found == [chosen]
        windows[chosen // 3].set_signal(chosen % 3, 0)  # start over


def test_a_thread_wakes_another_of_its_own_process(pair: Pair) -> None:
    window = pair.here.alloc("own", 0, 1)
    found: list[int] = []
    sleeper = threading.Thread(
        target=lambda: found.append(pair.here.signal_wait_until(window, 0, 7, TIMEOUT_S))
    )
    sleeper.start()
    time.sleep(0.02)
    window.set_signal(0, 7)
    sleeper.join()
    assert found == [7]


def test_waits_end_by_timeout(pair: Pair) -> None:
    window = pair.here.alloc("timeout", 64, 2)
    window.set_signal(0, 3)
    with pytest.raises(SignalTimeoutError, match=r"signal 0 of window 'timeout' is 3, not 4 or more"):
        pair.here.signal_wait_until(window, 0, 4, 0.05)
    assert pair.here.wait_any([(window, 0, 4), (window, 1, 1)], 0.05) is None
    assert pair.here.wait_any([(window, 0, 3), (window, 1, 1)], None) == 0


def test_ctrl_c_ends_a_wait_without_limit(pair: Pair) -> None:
    window = pair.here.alloc("interrupt", 64, 1)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pair.here.signal_wait_until(window, 0, 1, None)
    timer.join()
