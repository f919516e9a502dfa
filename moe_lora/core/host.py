# SPDX-License-Identifier: Apache-2.0
"""Where a host keeps what must outlive a process: cleaners of temporary folders don't go there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
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

_RUN = "run-"
_NEW, _NEW_S = "new-", 600.0
"""Of a folder that is not locked yet: how its name begins, and for how long nobody takes it for a killed
process's."""
_NO_LOCKS = frozenset({errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What a file system says that has no locks for folders."""


def state_folder(given: str | None) -> Path:
    """The folder given, else this host's in $XDG_STATE_HOME/moe_lora or ~/.local/state/moe_lora, which hosts
    may share; made if it is absent.

    Where neither of these can be written, one for temporary files.  Raises ConfigError for a given one.
    """
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(given) if given is not None else Path(home) / "moe_lora" / _host_name()
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
    """Earlier versions kept contents of adapters beside the folders of hosts, where nobody looks any more."""
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


def _host_name() -> str:
    return "host-" + re.sub(r"[^\w.-]", "_", platform.node())


def _of_host(prefix: str) -> str:
    """How names begin of this host's folders: whether a lock of another's is held may not be seen here.

    Short, for sockets in such folders.
    """
    return f"{prefix}{hashlib.sha256(platform.node().encode()).hexdigest()[:6]}-"


@contextmanager
def run_folder(given: str | None) -> Iterator[Path]:
    """A folder under `state_folder` for this run, deleted with the context.

    Those of runs that were killed are deleted before.  Raises ConfigError.
    """
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
    """A new folder that only this user can enter, deleted with the context or by `remove`.

    Those of this host's processes that were killed are deleted before; where folders have no locks (on some
    network file systems) they stay.  parent: None: for temporary files; hosts may share it.
    Raises OSError, and then leaves nothing behind.
    """

    def __init__(self, parent: Path | None = None, prefix: str = "moe_lora-run-") -> None:
        parent = parent or Path(tempfile.gettempdir())
        sweep_folders(parent, prefix)
        prefix = _of_host(prefix)
        # It is locked before it has a name by which others look for what was left behind.
        new = Path(tempfile.mkdtemp(dir=parent, prefix=f"{_NEW}{prefix}"))
        self._handle = -1
        try:
            self._handle = os.open(new, os.O_RDONLY)
            _lock(self._handle)
            self.path = new.rename(parent / new.name.removeprefix(_NEW))
        except BaseException:
            if self._handle >= 0:
                os.close(self._handle)
            with suppress(OSError):
                new.rmdir()  # rmtree would open it
            raise

    def remove(self) -> None:
        """May be called again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied")


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:  # one that may pass: who went on unlocked would lose the folder while in use
        if error.errno not in _NO_LOCKS:
            raise


def sweep_folders(parent: Path, prefix: str) -> None:
    """Delete each `OwnFolder` there whose process was killed on this host."""
    prefix = _of_host(prefix)
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), folder_locked(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f"{_NEW}{prefix}*"):
        with suppress(OSError), folder_locked(folder, wait=False):
            if time.time() - folder.stat().st_mtime > _NEW_S:
                shutil.rmtree(folder, ignore_errors=True)


# One process at a time in a folder.


@contextmanager
def folder_locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of an existing folder: the folder's own, so that no lock file is left behind.

    wait: False raises BlockingIOError where another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


# What this machine is.


MEMINFO = Path("/proc/meminfo")


def free_memory_bytes() -> int:
    """Host memory that is free now."""
    # Not MemFree (SC_AVPHYS_PAGES): the page cache, checkpoint files above all, gives way when asked.
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_memory_bytes() -> int:
    """Memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_info() -> dict[str, str]:
    """The system's words on the first processor, by their names; empty where it has none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():  # not Linux
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_model() -> str | None:
    """The processor's name; None where it is not known."""
    return cpu_info().get("model name") or platform.processor() or None


# How many files and connections a process may have open.


def allow_many_files() -> int:
    """Raise this process's limit as far as the system lets it; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def num_open_files() -> int:
    """Files and connections that this process has open now; 0 where it is not told."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return 0


# The end of our own processes.


def resident_bytes() -> int:
    """Memory that this process has of the system now; 0 where it is not told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def return_memory() -> None:
    """Give free memory back to the system, where the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
