# SPDX-License-Identifier: Apache-2.0
"""Stands for NVSHMEM where there is no GPU: processes with a file of memory each, which all of them map.

What NVSHMEM promises, and no more: a put is delivered some time after it returned, in pieces, and puts
overtake each other; a put with a signal adds to it after its own bytes, whatever became of others; `quiet`
returns when all puts of its process are delivered.

`install()` comes before `moe_lora.dist.transport.nvshmem_kernels` is imported: these run as they are, in
Triton's interpreter, over the calls of this file.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lora.dist.transport.contract import LINE_BYTES
from moe_lora.dist.transport.device_puts import AnswerRows, SymmetricWindow
from tests.patience import PATIENCE_S

_MODULE = "torch.distributed._symmetric_memory._nvshmem_triton"
_ADD = 5


class Network:
    """Delivers this process's puts.  longest_s: that one is under way.  quiet_works: False shows what relies
    on it."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self.quiet_works = True
        self.cut = False
        """Nothing is delivered any more."""
        self.holds_plain = False
        """Puts without a signal are not delivered before `quiet` asks for it."""
        self.num_delivered = self.num_overtaken = 0
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._held: list[Callable[[], None]] = []
        self._number = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, deliver: Callable[[], None], *, plain: bool) -> None:
        with self._changed:
            if plain and self.holds_plain:
                self._held.append(deliver)
                return
            due_s = time.monotonic() + self._random.random() * self._longest_s
            self._under_way.append((due_s, self._number, deliver))
            self._number += 1
            self._changed.notify_all()

    def quiet(self) -> None:
        with self._changed:
            if self.quiet_works:
                for deliver in self._held:
                    deliver()
                self._held.clear()
                self._changed.wait_for(lambda: not self._under_way or self.cut)

    def _run(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                due = [one for one in self._under_way if one[0] <= now_s and not self.cut]
                self._random.shuffle(due)
                for one in due:
                    one[2]()
                    self.num_delivered += 1
                    self.num_overtaken += any(other[1] < one[1] for other in self._under_way)
                    self._under_way.remove(one)
                self._changed.notify_all()
                self._changed.wait(0.0005 if self._under_way else 0.05)


class Heap:
    """One allocation: the memory of each member, mapped here."""

    def __init__(self, folder: Path, number: int, rank: int, size: int, num_bytes: int, num_signals: int):
        self.num_data = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        total = self.num_data + num_signals * LINE_BYTES
        own = folder / f"{number}.{rank}"
        with open(f"{own}.part", "wb") as file:
            file.truncate(total)
        os.rename(f"{own}.part", own)
        self.members = []
        for member in range(size):
            path = _appear(folder / f"{number}.{member}")
            with path.open("r+b") as file:
                self.members.append(np.frombuffer(mmap.mmap(file.fileno(), total), dtype=np.uint8))
        self.start = self.members[rank].ctypes.data
        self.end = self.start + total


def _appear(path: Path) -> Path:
    """The file, once it is there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path.name} does not come"
        time.sleep(0.01)
    return path


class StandInGroup:
    """`DevicePuts` of processes that meet in a folder."""

    device = torch.device("cpu")

    def __init__(
        self, folder: Path, rank: int, size: int, *, seed: int = 0, longest_s: float = 0.003
    ) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self.network = Network(seed * 100 + rank, longest_s)
        self._heaps: list[Heap] = []
        self._num_meetings = 0
        self.closed = False
        _groups.append(self)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def alloc(self, num_bytes: int, num_signals: int) -> SymmetricWindow:
        heap = Heap(self._folder, len(self._heaps), self._rank, self._size, num_bytes, num_signals)
        self._heaps.append(heap)
        memory = torch.from_numpy(heap.members[self._rank])
        words = memory[heap.num_data :].view(torch.int64)
        sizes = {"num_bytes": num_bytes, "num_signals": num_signals}
        return SymmetricWindow(label="window", bytes=memory[:num_bytes], words=words, **sizes)

    def meet(self) -> None:
        (self._folder / f"meeting-{self._num_meetings}.{self._rank}").touch()
        for member in range(self._size):
            _appear(self._folder / f"meeting-{self._num_meetings}.{member}")
        self._num_meetings += 1

    def put_pieces(
        self, window: SymmetricWindow, places: Sequence[tuple[int, int]], signal: int, peer: int
    ) -> None:
        from moe_lora.dist.transport import nvshmem_kernels

        nvshmem_kernels.launch_put_pieces(window, places, signal, peer)

    def put_rows(
        self, window: SymmetricWindow, answer: AnswerRows, status_bytes: int, signal: int, peer: int
    ) -> None:
        from moe_lora.dist.transport import nvshmem_kernels

        nvshmem_kernels.launch_put_rows(window, answer, status_bytes, signal, peer)

    def close(self) -> None:
        self.closed = True

    def place(self, address: int, num_bytes: int, member: int) -> np.ndarray:
        """A member's memory at an address of this process's."""
        heap = next(one for one in self._heaps if one.start <= address < one.end)
        assert address + num_bytes <= heap.end, "a put beyond the window"
        start = address - heap.start
        return heap.members[member][start : start + num_bytes]


_groups: list[StandInGroup] = []


def _number(value: Any) -> int:
    """Of a scalar of the interpreter."""
    return (
        int(value.handle.data.reshape(-1)[0])
        if hasattr(value, "handle")
        else int(getattr(value, "value", value))
    )


def _bytes(value: Any) -> int:
    """Bytes of what a pointer points at."""
    return value.type.element_ty.primitive_bitwidth // 8


def _send_pieces(
    group: StandInGroup, there: np.ndarray, source: int, then: Callable[[], None] | None = None
) -> None:
    """In two pieces, in any order, and `then` once both are there."""
    copied = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * len(there)).from_address(source)).copy()
    cut, left = len(there) // 2, [2]

    def deliver(start: int, end: int) -> None:
        there[start:end] = copied[start:end]
        left[0] -= 1
        if not left[0] and then is not None:
            then()

    for start, end in ((0, cut), (cut, len(there))):
        group.network.send(partial(deliver, start, end), plain=then is None)


def put(dst: Any, src: Any, count: Any, peer: Any) -> None:
    assert _number(dst) == _number(src), "the network reads symmetric memory only"
    group, num_bytes = _groups[-1], _number(count) * _bytes(dst)
    assert num_bytes > 0, "NVSHMEM takes no empty put"
    _send_pieces(group, group.place(_number(dst), num_bytes, _number(peer)), _number(src))


def putmem_signal_block(
    dst: Any, src: Any, size_bytes: Any, signal: Any, value: Any, operation: Any, peer: Any
) -> None:
    assert _number(dst) == _number(src), "the network reads symmetric memory only"
    group, num_bytes, member = _groups[-1], _number(size_bytes), _number(peer)
    assert num_bytes > 0, "NVSHMEM takes no empty put"
    assert _number(operation) == _ADD
    word = group.place(_number(signal), 8, member).view(np.int64)
    more = _number(value)

    def add() -> None:
        word[0] += more

    _send_pieces(group, group.place(_number(dst), num_bytes, member), _number(src), add)


def quiet() -> None:
    _groups[-1].network.quiet()


def install() -> None:
    """These instead of the library's.  One member a process."""
    module = types.ModuleType(_MODULE)
    for function in (put, putmem_signal_block, quiet):
        setattr(module, function.__name__, function)
    module.requires_nvshmem = lambda kernel: kernel  # type: ignore[attr-defined]
    sys.modules[_MODULE] = module


# In the place of `moe_lora.dist.transport.nvshmem`.


def check_machine() -> None:
    """It needs none."""


def join_group(address: str, rank: int, size: int, device: torch.device) -> StandInGroup:
    """Members that were told the same address meet in a folder of that name (`FOLDER`)."""
    folder = Path(os.environ[FOLDER]) / address.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return StandInGroup(folder, rank, size, seed=int(os.environ.get(SEED, "0")))


FOLDER, SEED = "TEST_SYMMETRIC_FOLDER", "TEST_SYMMETRIC_SEED"
