# SPDX-License-Identifier: Apache-2.0
"""Limits of a container on memory and processors: Linux control groups, versions 1 and 2.

Field names are those of the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_MEMORY = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, free) in bytes of each group with this process; a group's page cache counts as free."""
    for version, folder in _groups("memory"):
        limit, used, cache = _MEMORY[version]
        with suppress(OSError, ValueError):  # "max" is no limit
            total = int((folder / limit).read_text())
            pairs = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            held = int((folder / used).read_text()) - int(pairs.get(cache, 0))
            yield total, max(0, total - held)


def processor_limit() -> float | None:
    """Processors whose time this process may use; None without a limit."""
    found = []
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{one}_us").read_text() for one in ("quota", "period"))
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group with this process, from its own to the outermost one seen here.

    In a container the outermost is often the container's own, under whatever name outside.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers if controllers else GROUPS
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield (1 if controllers else 2), folder
