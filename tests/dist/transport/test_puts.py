# SPDX-License-Identifier: Apache-2.0
"""Data arrives before its signal, whatever its size and place; nothing is written beyond a window."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

from moe_lora.dist.transport import RemoteWindow, Window

from .conftest import Pair
from .peers import TIMEOUT_S, pattern

SIZE = 1 << 20


@pytest.fixture(scope="module")
def both(pair: Pair) -> tuple[Window, RemoteWindow]:
    """A window here that the peer is attached to, and the peer's "puts-there", attached here."""
    window = pair.here.alloc("puts-here", SIZE, 4)
    pair.peer.call("attach", window.descriptor())
    return window, pair.attach("puts-there", SIZE, 4)


_values = itertools.count(1)


def test_data_arrive_before_their_signal_in_both_directions(
    pair: Pair, both: tuple[Window, RemoteWindow]
) -> None:
    window, remote = both
    draw = random.Random(0)
    sizes = [0, 1, 7, 63, 64, 65, 4095, 4096, 65_537, SIZE] + [draw.randrange(1, 200_000) for _ in range(40)]
    rounds = [(draw.randrange(SIZE - size + 1), size, next(_values)) for size in sizes]
    pair.peer.start("echo", "puts-there", "puts-here", rounds)
    for offset, size, value in rounds:
        data = pattern(size, value)
        pair.here.put_signal(remote, offset, data, 0, value)
        assert pair.here.signal_wait_until(window, 0, value, TIMEOUT_S) == value
        assert torch.equal(window.bytes[offset : offset + size], data)
        pair.here.quiet(remote)
    assert pair.peer.finish() == 0


def test_quick_puts_into_many_places_all_arrive(pair: Pair, both: tuple[Window, RemoteWindow]) -> None:
    _, remote = both
    parts = [pattern(1 + 37 * i, i) for i in range(100)]
    offset, offsets = 0, []
    for index, part in enumerate(parts):
        pair.here.put_signal(remote, offset, part, 1, index + 1)
        offsets.append(offset)
        offset += part.nbytes
    pair.here.quiet(remote)
    assert pair.peer.call("wait", "puts-there", 1, len(parts)) == len(parts)
    assert pair.peer.call("read", "puts-there", 0, offset) == bytes(torch.cat(parts).numpy())


def test_fence_orders_puts_without_a_signal_of_their_own(
    pair: Pair, both: tuple[Window, RemoteWindow]
) -> None:
    _, remote = both
    data = pattern(100_000, 3)
    pair.here.put_signal(remote, 0, data, 2, 0)
    pair.here.fence(remote)
    pair.here.put_signal(remote, 0, None, 2, 9)
    assert pair.peer.call("wait", "puts-there", 2, 9) == 9
    assert pair.peer.call("read", "puts-there", 0, data.nbytes) == bytes(data.numpy())


def test_any_dtype_and_a_signal_alone(pair: Pair, both: tuple[Window, RemoteWindow]) -> None:
    _, remote = both
    data = torch.arange(33, dtype=torch.float32).to(torch.bfloat16)
    pair.here.put_signal(remote, 3, data, 3, 1)
    pair.here.put_signal(remote, 0, None, 3, 2)
    remote.signal(3, 3)
    assert pair.peer.call("wait", "puts-there", 3, 3) == 3
    assert pair.peer.call("read", "puts-there", 3, 66) == bytes(data.view(torch.uint8).numpy())


def test_get_reads_what_the_peer_holds(pair: Pair, both: tuple[Window, RemoteWindow]) -> None:
    _, remote = both
    data = pattern(70_001, 5)
    pair.here.put_signal(remote, 11, data, 0, next(_values))
    pair.here.quiet(remote)
    out = torch.zeros_like(data)
    pair.here.get(remote, 11, out)
    assert torch.equal(out, data)
    pair.here.get(remote, 0, out[:0])


def test_view_writes_in_place_where_the_medium_maps_memory(
    pair: Pair, both: tuple[Window, RemoteWindow]
) -> None:
    _, remote = both
    view = remote.view(5, 1000)
    assert (view is not None) == (pair.kind == "shm")
    if view is None:
        return
    value = next(_values)
    view.copy_(pattern(1000, value))
    remote.signal(0, value)
    pair.peer.call("wait", "puts-there", 0, value)
    assert pair.peer.call("read", "puts-there", 5, 1000) == bytes(pattern(1000, value).numpy())


def test_puts_from_several_threads_arrive(pair: Pair) -> None:
    target = pair.attach("threads", 4 * 5000, 4)

    def work(index: int) -> None:
        for value in range(1, 11):
            pair.here.put_signal(target, index * 5000, pattern(5000, value), index, value)
            pair.here.quiet(target)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        assert pair.peer.call("wait", "threads", index, 10) == 10
    assert pair.peer.call("read", "threads", 0, 20_000) == bytes(pattern(5000, 10).repeat(4).numpy())


def test_a_signal_covers_all_puts_before_it_without_a_fence(pair: Pair) -> None:
    """Large puts before small ones and before signals alone: the last value says that all are there."""
    large, small, num_frames, num_rounds = 1 << 21, 64, 4, 6
    target, value = pair.attach("covered", num_frames * large, 1), 0
    for round_ in range(num_rounds):
        sizes = [large, small, large - 1, small + 1] if round_ % 2 else [large, large, large, small]
        frames = [pattern(size, value + index) for index, size in enumerate(sizes)]
        value += num_frames + 1
        pair.peer.start("read_at", "covered", 0, value, [(i * large, size) for i, size in enumerate(sizes)])
        for index, frame in enumerate(frames):
            pair.here.put_signal(target, index * large, frame, 0, value - num_frames + index)
        target.signal(0, value)
        assert pair.peer.finish() == [bytes(frame.numpy()) for frame in frames]


@pytest.mark.parametrize(("offset", "size"), [(SIZE, 1), (-1, 4), (SIZE - 3, 4), (0, SIZE + 1)])
def test_put_beyond_the_window_names_the_sizes(
    pair: Pair, both: tuple[Window, RemoteWindow], offset: int, size: int
) -> None:
    _, remote = both
    with pytest.raises(ValueError, match=f"{size} bytes at offset {offset} do not fit .* of {SIZE} bytes"):
        pair.here.put_signal(remote, offset, torch.zeros(size, dtype=torch.uint8), 0, 1)
    with pytest.raises(ValueError, match="do not fit"):
        pair.here.get(remote, offset, torch.zeros(size, dtype=torch.uint8))


def test_what_is_no_put_is_refused(pair: Pair, both: tuple[Window, RemoteWindow]) -> None:
    window, remote = both
    data = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="4 signals"):
        pair.here.put_signal(remote, 0, data, 4, 1)
    with pytest.raises(ValueError, match="64-bit"):
        pair.here.put_signal(remote, 0, data, 0, -1)
    with pytest.raises(ValueError, match="contiguous"):
        pair.here.put_signal(remote, 0, data.t()[1:], 0, 1)
    with pytest.raises(ValueError, match="4 signals"):
        window.read_signal(4)
    with pytest.raises(ValueError, match="0 or more"):
        pair.here.alloc("negative", -1, 0)
    with pytest.raises(ValueError, match="another label"):
        pair.here.alloc("puts-here", 1, 1)
