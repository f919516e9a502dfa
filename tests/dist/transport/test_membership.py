# SPDX-License-Identifier: Apache-2.0
"""Processes come, die and return under their name; what they held is given back."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_lora.core.errors import ConfigError, PeerGoneError, PeerUnreachableError
from moe_lora.dist.transport import RemoteWindow, make_transport

from .conftest import Pair
from .peers import TIMEOUT_S, Peer, pattern

NUM_PUTS_TILL_NOTICED = 500
ROOT = Path(__file__).parents[3]


def put_often(pair: Pair, remote: RemoteWindow) -> None:
    """A medium may take some puts before it notices that nobody is there."""
    for value in range(1, NUM_PUTS_TILL_NOTICED):
        pair.here.put_signal(remote, 0, pattern(1000, 1), 0, value)
        pair.here.quiet(remote)


def expect_gone(pair: Pair, remote: RemoteWindow) -> None:
    with pytest.raises(PeerGoneError, match=f"{remote.label!r} of {remote.peer!r}"):
        put_often(pair, remote)


def test_a_killed_peer_is_noticed_and_its_return_found(mortal_pair: Pair) -> None:
    pair = mortal_pair
    window = pair.here.alloc("mine", 1000, 1)
    pair.peer.call("attach", window.descriptor())
    pair.peer.call("put", "mine", 0, 1000, 1, 0, 1)
    descriptor = pair.peer.call("alloc", "theirs", 1000, 1)
    old = pair.here.attach(descriptor)
    assert old.alive()
    pair.peer.kill()

    expect_gone(pair, old)
    assert not old.alive()
    with pytest.raises(PeerGoneError):
        pair.here.get(old, 0, torch.zeros(8))
    with pytest.raises(PeerUnreachableError, match=pair.peer_name):
        pair.here.attach(descriptor)
    pair.here.detach(old)

    pair.rejoin(Peer())
    new = pair.attach("theirs", 1000, 1)
    pair.here.put_signal(new, 0, pattern(1000, 4), 0, 1)
    pair.here.quiet(new)
    assert pair.peer.call("wait", "theirs", 0, 1) == 1
    assert pair.peer.call("read", "theirs", 0, 1000) == bytes(pattern(1000, 4).numpy())
    pair.peer.call("attach", window.descriptor())  # the survivor's window, without its doing anything
    pair.peer.call("put", "mine", 0, 1000, 2, 0, 2)
    assert pair.here.signal_wait_until(window, 0, 2, TIMEOUT_S) == 2
    assert torch.equal(window.bytes, pattern(1000, 2))


def test_a_freed_window_takes_no_more_puts(pair: Pair) -> None:
    remote = pair.attach("freed", 1000, 1)
    pair.here.put_signal(remote, 0, pattern(1000, 1), 0, 1)
    pair.here.quiet(remote)
    pair.peer.call("free", "freed")
    expect_gone(pair, remote)
    assert pair.attach("freed", 10, 1).num_bytes == 10, "the label is free again"


def test_a_detached_window_takes_no_more_puts_and_can_be_attached_again(pair: Pair) -> None:
    descriptor = pair.peer.call("alloc", "detached", 1000, 1)
    remote = pair.here.attach(descriptor)
    pair.here.detach(remote)
    pair.here.detach(remote)
    assert not remote.alive()
    with pytest.raises(PeerGoneError, match="detached"):
        pair.here.put_signal(remote, 0, pattern(10, 1), 0, 1)
    again = pair.here.attach(descriptor)
    pair.here.put_signal(again, 0, pattern(10, 1), 0, 1)
    assert pair.peer.call("wait", "detached", 0, 1) == 1


def test_descriptors_that_do_not_fit_are_refused(pair: Pair) -> None:
    fields = json.loads(pair.peer.call("alloc", "checked", 5000, 3))
    for change, message in (
        ({"version": 99}, "version 99, this process speaks 2"),
        ({"kind": "pigeon"}, f"over transport 'pigeon', this process uses '{pair.kind}'"),
        ({"num_bytes": 9000}, "5000 bytes and 3 signals, its descriptor says 9000 and 3"),
        ({"num_signals": 2}, "5000 bytes and 3 signals, its descriptor says 5000 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.here.attach(json.dumps({**fields, **change}).encode())
    with pytest.raises(ValueError, match="no window descriptor"):
        pair.here.attach(b"nonsense")


def test_descriptors_are_all_that_peers_need_of_each_other(kind: str, pair: Pair) -> None:
    with make_transport(kind, name="alone/0", **pair.options) as alone:
        remote = alone.attach(pair.peer.call("alloc", "for-alone", 64, 1))
        alone.put_signal(remote, 0, pattern(64, 9), 0, 1)
        alone.quiet(remote)
        assert pair.peer.call("wait", "for-alone", 0, 1) == 1


def test_closing_gives_back_files_and_threads(kind: str, pair: Pair, shared_peer: Peer) -> None:
    """After a first round, which starts what a library keeps, more rounds leave nothing more behind.

    What ends meanwhile is of others: a round that leaves something leaves it in each further round.
    """

    def live_through() -> tuple[int, int]:
        descriptor = shared_peer.call("alloc", "leaks", 100_000, 2)
        here = make_transport(kind, name="leaky/0", **pair.options)
        here.alloc("w", 100_000, 2)
        remote = here.attach(descriptor)
        here.put_signal(remote, 0, pattern(100, 1), 0, 1)
        here.quiet(remote)
        here.close()
        here.close()
        shared_peer.call("free", "leaks")
        del here, remote
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    live_through()
    shared_peer.call("footprint")
    first, first_there = live_through(), shared_peer.call("footprint")
    for _ in range(50):
        last, there = live_through(), shared_peer.call("footprint")
        if all(now <= then for now, then in zip((*last, *there), (*first, *first_there), strict=True)):
            return
    raise AssertionError(f"{(first, first_there)} became {(last, there)}")


def test_threads_take_and_give_back_windows_at_once(pair: Pair) -> None:
    """Each thread has windows of its own, there and here; one label is fought for, and has one owner."""
    num_threads, num_rounds = 4, 8
    descriptors = [pair.peer.call("alloc", f"busy-{i}", 4000, 1) for i in range(num_threads)]
    barrier = threading.Barrier(num_threads)

    def live(index: int) -> int:
        owned = 0
        for value in range(1, num_rounds + 1):
            mine = pair.here.alloc(f"mine-{index}", 4000, 1)
            remote = pair.here.attach(descriptors[index])
            pair.here.put_signal(remote, 0, pattern(4000, value), 0, value)
            pair.here.quiet(remote)
            barrier.wait(TIMEOUT_S)
            try:
                fought_for = pair.here.alloc("fought-for", 4000, 1)
                owned += 1
            except ValueError:
                fought_for = None
            barrier.wait(TIMEOUT_S)
            if fought_for is not None:
                fought_for.free()
            pair.here.detach(remote)
            mine.free()
            mine.free()
        return owned

    with ThreadPoolExecutor(num_threads) as threads:
        assert sum(threads.map(live, range(num_threads))) == num_rounds
    for index in range(num_threads):
        assert pair.peer.call("wait", f"busy-{index}", 0, num_rounds) == num_rounds
        assert pair.peer.call("read", f"busy-{index}", 0, 4000) == bytes(pattern(4000, num_rounds).numpy())
        pair.peer.call("free", f"busy-{index}")


def test_a_window_freed_by_several_threads_is_freed_once(pair: Pair) -> None:
    for _ in range(20):
        window = pair.here.alloc("freed-often", 4000, 1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda free: free(), [window.free] * 4))


def test_a_process_that_never_closes_ends_cleanly() -> None:
    """Threads that wait inside a library would abort the interpreter on its way out."""
    program = """
from moe_lora.dist.transport import make_transport
for kind in ("shm", "gloo"):
    here, there = make_transport(kind, name="a"), make_transport(kind, name="b")
    window = here.alloc("w", 100, 1)
    remote = there.attach(window.descriptor())
    there.put_signal(remote, 0, None, 0, 1)
    here.signal_wait_until(window, 0, 1, 20.0)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="'pigeon' is unknown; choose one of shm, "):
        make_transport("pigeon", name="x")


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="nixl is installed")
def test_a_transport_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'moe-lora\[nixl\]'"):
        make_transport("nixl", name="x")
