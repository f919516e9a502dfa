# SPDX-License-Identifier: Apache-2.0
"""Notes of an engine's current work, readable after the engine's death by front ends of the same host.

The shared memory outlives the process while a reader has it open.  After the death, a lock admits one trial
of a noted adapter at a time (`suspects`).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

NAME = "moe-lora-notes"
NUM_BYTES = 1 << 16
"""Bytes of each of two areas; further names are left out."""
TRIAL_BYTES = 1 << 12
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_TRIAL_START = _HEAD.size + 2 * NUM_BYTES
_SIZE = _TRIAL_START + _LENGTH.size + TRIAL_BYTES


class StepNotes:
    """The writing side: one engine's notes.  Thread-safe."""

    def __init__(self) -> None:
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, _SIZE)
        self._memory = mmap.mmap(self._file, 0)
        self._lock = threading.Lock()
        self._step: Collection[str] = set[str]()
        self._loads: Counter[str] = Counter()
        self._area = 0

    @property
    def place(self) -> str:
        """Place of the notes for `ReadNotes`."""
        return f"{host_of_processes()} {os.getpid()} {self._file}"

    def step(self, adapters: Collection[str]) -> None:
        """A step with these adapters starts; an empty set: without adapters."""
        if adapters != self._step:
            with self._lock:
                self._step = adapters
                self._write()

    @contextmanager
    def load(self, adapter: str) -> Iterator[None]:
        """A load lasts as long as the context."""
        self.start_load(adapter)
        try:
            yield
        finally:
            self.end_load(adapter)

    def start_load(self, adapter: str) -> None:
        with self._lock:
            self._loads[adapter] += 1
            self._write()

    def end_load(self, adapter: str) -> None:
        with self._lock:
            self._loads[adapter] -= 1
            self._loads += Counter()
            self._write()

    def close(self) -> None:
        """Clear the notes at an orderly end."""
        with self._lock:
            self._step, self._loads = set(), Counter()
            self._write()

    def _write(self) -> None:
        """Fill the other area, then switch: a reader finds whole notes."""
        text = b""
        for name in sorted({*self._step, *self._loads}):
            one = name.encode() + b"\n"
            if len(text) + len(one) > NUM_BYTES:
                break
            text += one
        self._area = 1 - self._area
        start = _HEAD.size + self._area * NUM_BYTES
        self._memory[start : start + len(text)] = text
        _HEAD.pack_into(self._memory, 0, self._area, len(text))


class ReadNotes:
    """The reading side; empty on another host, or without notes."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._file = _opened(place)
        self._memory = None if self._file is None else mmap.mmap(self._file.fileno(), 0)
        self.readable = self._memory is not None

    def try_lock(self) -> bool:
        """Lock the notes for a trial; False if already locked."""
        if self._file is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def unlock(self) -> None:
        """Unlock, as the end of this process does."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def trial(self) -> tuple[str, ...]:
        """Words of the last trial; (): none, or a good end."""
        if self._memory is None:
            return ()
        (length,) = _LENGTH.unpack_from(self._memory, _TRIAL_START)
        start = _TRIAL_START + _LENGTH.size
        text = self._memory[start : start + min(length, TRIAL_BYTES)].decode(errors="replace")
        return tuple(text.split("\n")) if text else ()

    @trial.setter
    def trial(self, words: tuple[str, ...]) -> None:
        text = "\n".join(words).encode()
        if self._memory is not None and len(text) <= TRIAL_BYTES:
            start = _TRIAL_START + _LENGTH.size
            self._memory[start : start + len(text)] = text
            _LENGTH.pack_into(self._memory, _TRIAL_START, len(text))

    def adapters(self) -> frozenset[str]:
        """Names of the noted adapters."""
        if self._memory is None:
            return frozenset()
        area, length = _HEAD.unpack_from(self._memory, 0)
        if area > 1 or length > NUM_BYTES:
            return frozenset()
        start = _HEAD.size + area * NUM_BYTES
        return frozenset(self._memory[start : start + length].decode(errors="replace").split("\n")) - {""}


def host_of_processes() -> str:
    """Equal for processes that see each other's numbers: one boot of a host, one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _opened(place: str) -> BinaryIO | None:
    try:
        host, pid, number = place.split(" ")
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        if host != host_of_processes() or NAME not in os.readlink(path):
            return None
        file = open(path, "r+b", buffering=0)  # noqa: SIM115  (open as long as the notes are read)
    except (ValueError, OSError) as error:
        if place:
            logger.info("an engine's notes can't be read: %s", error)
        return None
    if os.fstat(file.fileno()).st_size != _SIZE:
        file.close()
        return None
    return file
