# SPDX-License-Identifier: Apache-2.0
"""What a host can lack while a server runs on it: room on the disk and in /dev/shm, a registry to write to.

For a process in a mount namespace of its own (`in_own_namespace`), where file systems are the test's.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OWN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
MAX_FILES = 256
_STATE_MB, _SHM_MB = 64, 1
_BLOCK = 1 << 16


def has_namespaces() -> bool:
    """Whether this machine lets this user make one."""
    try:
        return subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def in_own_namespace(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` in a mount namespace; its exit status."""
    return subprocess.run([*OWN_NAMESPACE, sys.executable, "-m", module, *arguments], check=False).returncode


class ChaosHost:
    """A host of its own for a server: `state`, its state folder, and /dev/shm are small file systems, and
    each of its processes may open MAX_FILES files.  folder: holds state, the registry and what is loaded.
    """

    prefix = ("prlimit", f"--nofile={MAX_FILES}:{MAX_FILES}")

    def __init__(self, folder: Path) -> None:
        self.state, self.registry, self.fresh = folder / "state", folder / "registry", folder / "fresh"
        for place in (self.state, self.registry, self.fresh):
            place.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", f"size={_STATE_MB}m", "tmpfs", str(self.state))
        _mount("-t", "tmpfs", "-o", f"size={_SHM_MB}m", "tmpfs", "/dev/shm")

    def close(self) -> None:
        for place in ("/dev/shm", str(self.state)):
            subprocess.run(["umount", "--lazy", place], check=True)

    def copy_of(self, adapter: Path, rng: random.Random) -> Path:
        """A folder with the same adapter but for a few bits of a weight: content that is nowhere else."""
        place = self.fresh / f"{rng.getrandbits(64):x}"
        shutil.copytree(adapter, place)
        with (place / "adapter_model.safetensors").open("rb+") as file:
            file.seek(-4, os.SEEK_END)
            file.write(rng.randbytes(2))  # the low half of an fp32 value
        return place

    @contextmanager
    def full(self, place: Path) -> Iterator[None]:
        """No room is left on the file system of this folder."""
        filler = place / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while _has_room(file.fileno()):
                    pass
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only_registry(self) -> Iterator[None]:
        place = str(self.registry)
        _mount("--bind", place, place)
        try:
            _mount("-o", "remount,bind,ro", place)
            yield
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


def _has_room(file: int) -> bool:
    """Whether another block was written, or part of one."""
    try:
        return os.write(file, bytes(_BLOCK)) > 0
    except OSError:
        return False


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)
