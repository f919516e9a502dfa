# SPDX-License-Identifier: Apache-2.0
"""Settings of the adapter pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .settings import Settings, setting

POOL_TRANSPORTS = ("shm", "gloo")
"""Not nixl: it keeps freed windows for as long as the process lives, and pools free them all the time."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig(Settings):
    """The adapter pool: adapters lie in the host memory of some instances, and others read them there."""

    SECTION: ClassVar[str] = "pool"

    replicas: int = setting(1, least=1, former="--pool-replicas", unset="every instance has all")
    """Instances with each adapter in host memory; other instances read it there
    (docs/guides/placement.md)."""
    transport: str = setting("shm", choices=POOL_TRANSPORTS)
    """Reading between instances: shm on one host, gloo between hosts."""
    host: str | None = setting(None, unset="the one from which it reaches the front end")
    """Address of this host for other instances."""
