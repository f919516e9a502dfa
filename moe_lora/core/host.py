# SPDX-License-Identifier: Apache-2.0
"""Folders, memory and limits of this host."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import ConfigError

logger = logging.getLogger(__name__)

CLUSTER_MARK = "MOE_LORA_CLUSTER"
"""Variable in each process of a cluster on this host: a token, new at each start.

Later processes with the same numbers, and other servers at the port, lack the token.
"""
_RUN = "run-"
_NEW, _NEW_S = "new-", 600.0
"""Prefix of an unlocked new folder, and its age at removal."""
_NO_LOCKS = frozenset({errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of file systems without locks for folders."""


def state_folder(given: str | None) -> Path:
    """The given folder, else $XDG_STATE_HOME/moe_lora or ~/.local/state/moe_lora, else a temporary folder.

    Raises ConfigError for an unusable given folder.
    """
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(given) if given is not None else Path(home) / "moe_lora" / host_name()
    try:
        _make(folder)
    except OSError as error:
        problem = f"state_dir={str(folder)!r} can't be written ({error.strerror}); let it name another folder"
        if given is not None:
            raise ConfigError(problem) from error
        folder = Path(tempfile.gettempdir()) / f"moe_lora-{os.getuid()}"
        logger.warning("%s; until then it is %s", problem, folder)
        try:
            _make(folder)
        except OSError as again:
            raise ConfigError(problem) from again
    else:
        if given is None:
            _warn_of_former(folder)
    return folder.resolve()


def _warn_of_former(folder: Path) -> None:
    former = folder.parent
    missing = [one.name for one in former.glob("contents-*") if not (folder / one.name).exists()]
    if missing:
        logger.warning(
            "%s in %s of an earlier version can't be found any more; move it to %s, or delete it where no "
            "adapter is served whose own folder has changed",
            ", ".join(sorted(missing)),
            former,
            folder,
        )


def host_name() -> str:
    """This host's folder in a shared one."""
    return "host-" + re.sub(r"[^\w.-]", "_", platform.node())


def _of_host(prefix: str) -> str:
    """Prefix of this host's folders, short for socket paths.  Locks of other hosts may be invisible here."""
    return f"{prefix}{hashlib.sha256(platform.node().encode()).hexdigest()[:6]}-"


@contextmanager
def run_folder(given: str | None) -> Iterator[Path]:
    """A folder for this run, deleted with the context.  Raises ConfigError."""
    parent = state_folder(given)
    try:
        folder = OwnFolder(parent, _RUN)
    except OSError as error:
        raise ConfigError(
            f"state_dir={str(parent)!r} can't be written ({error.strerror}); let it name another folder"
        ) from error
    with folder:
        yield folder.path


class OwnFolder:
    """A new folder for this user, deleted with the context or by `remove`.

    Folders of killed processes are deleted first, if folders have locks.  parent: may be shared by hosts.
    Raises OSError.
    """

    def __init__(self, parent: Path | None = None, prefix: str = "moe_lora-run-") -> None:
        parent = parent or Path(tempfile.gettempdir())
        sweep_folders(parent, prefix)
        prefix = _of_host(prefix)
        # Lock before the rename: other processes sweep unlocked folders with the final name.
        new = Path(tempfile.mkdtemp(dir=parent, prefix=f"{_NEW}{prefix}"))
        self._handle = -1
        try:
            self._handle = os.open(new, os.O_RDONLY)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            except OSError as error:  # without a lock the folder could be swept while in use
                if error.errno not in _NO_LOCKS:
                    raise
            self.path = new.rename(parent / new.name.removeprefix(_NEW))
        except BaseException:
            if self._handle >= 0:
                os.close(self._handle)
            with suppress(OSError):
                new.rmdir()  # rmtree would open it
            raise

    def remove(self, *_: object) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(handle)

    def __enter__(self) -> Path:
        return self.path

    __exit__ = remove


_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""


def socket_folder(longest: str) -> OwnFolder:
    """An `OwnFolder` for sockets.  longest: name of a socket.  Raises ConfigError for a long TMPDIR."""
    folder = OwnFolder()
    excess = len(os.fsencode(folder.path / longest)) - _SOCKET_BYTES
    if excess > 0:
        folder.remove()
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()} is {excess} bytes too long for the paths of sockets; give a "
            "shorter one"
        )
    return folder


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied")


def sweep_folders(parent: Path, prefix: str) -> None:
    """Delete folders of this host's killed processes."""
    prefix = _of_host(prefix)
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), folder_locked(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f"{_NEW}{prefix}*"):
        with suppress(OSError), folder_locked(folder, wait=False):
            if time.time() - folder.stat().st_mtime > _NEW_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def folder_locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a folder's lock.  wait: False raises BlockingIOError if the lock is taken."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def cluster_headers(token: str | None) -> dict[str, str]:
    """Headers of /ready in a cluster on this host."""
    return {"x-moe-lora-cluster": token[:8]} if token else {}


MEMINFO = Path("/proc/meminfo")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: files of limit and use, and the page cache's field of memory.stat.

Source: the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""


def free_memory_bytes() -> int:
    """Free memory of this host, within the limits of this container; a page cache is free."""
    # MemFree (SC_AVPHYS_PAGES) excludes the page cache, mostly reclaimable checkpoint files.
    found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    for limit, used, stat, cache in memory_limits():
        pairs = dict(line.split() for line in stat.read_text().splitlines())
        found = min(found, limit - int(used.read_text()) + int(pairs.get(cache, 0)))
    return max(0, found)


def host_memory_bytes() -> int:
    """Memory of this host, at most the limit of this container."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, *_ in memory_limits())])


@functools.cache
def memory_limits() -> list[tuple[int, Path, Path, str]]:
    """Limit in bytes, file of the use, memory.stat and its cache's field, of each limited control group."""
    found = []
    for version, folder in _control_groups("memory"):
        limit, used, cache = _MEMORY[version]
        with suppress(OSError, ValueError):  # "max" is no limit
            found.append((int((folder / limit).read_text()), folder / used, folder / "memory.stat", cache))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [one for one in found if one[0] < physical]


def processor_limit() -> float | None:
    """Processors of this container, by time; None without a limit."""
    found = []
    for version, folder in _control_groups("cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{one}_us").read_text() for one in ("quota", "period"))
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's control groups, from the innermost on.

    The outermost visible group may be the container's own, under an outer name.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield (1 if controllers else 2), folder


def cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_model() -> str | None:
    """The processor's name; None if unknown."""
    return cpu_info().get("model name") or platform.processor() or None


def allow_many_files() -> int:
    """Raise the limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def num_open_files() -> int:
    """Open files and connections of this process; 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def return_memory() -> None:
    """Return free memory to the system."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
        if trim is not None:
            trim(0)
