# SPDX-License-Identifier: Apache-2.0
"""States of a cluster's roles, and the wait for its front ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_lora.core.errors import ConfigError

from .host_roles import FRONT_END, START_TRIES

PLACED, STARTING, RUNNING, READY = "placed", "starting", "running", "ready"
"""States of a role."""
LOOK_S = 0.5
_NAME = re.compile("[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class RoleFacts:
    """A role's state.

    process: number on this host.  addresses: name:port -> ip:port.  book_number: of the address book.  url:
    of a front end.  num_restarts: of the process.  num_failures: placements with an error at the end.
    problem: reason of a missing start.
    """

    name: str
    state: str
    host: str = ""
    process: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    book_number: int = 0
    url: str = ""
    num_restarts: int = 0
    num_failures: int = 0
    problem: str = ""


def check_name(name: str) -> None:
    """Raises ConfigError for a cluster's name with other characters."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: give at most 40 of a-z, 0-9 and -, beginning with a letter")


def ready_urls(
    status: Callable[[float], list[RoleFacts]], limit_s: float, say: Callable[[str], None]
) -> list[str]:
    """Wait for ready front ends; returns the URLs.

    status: roles' states within a time.  say: gets lines of progress.  Raises ConfigError.
    """
    said: dict[str, str] = {}
    deadline_s = time.monotonic() + limit_s
    while True:
        rows = status(max(1.0, deadline_s - time.monotonic()))
        for row in rows:
            if said.get(row.name) != (text := _line(row)):
                said[row.name] = text
                say(text)
        front_ends = [row for row in rows if row.name.startswith(FRONT_END)]
        if front_ends and all(row.state == READY for row in front_ends):
            return list(dict.fromkeys(row.url for row in front_ends))
        for row in rows:
            if row.num_failures >= START_TRIES:
                raise ConfigError(f"{row.name} can't be started: {row.problem}")
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"no front end is ready after --limit-s {limit_s:g}: {'; '.join(said.values())}; give more "
                "time, or on Ray more hosts"
            )
        time.sleep(LOOK_S)


def _line(row: RoleFacts) -> str:
    place = f" on {row.host}" if row.host else ""
    return f"{row.name}{place}: {row.state}" + (f" ({row.problem})" if row.problem else "")
