# SPDX-License-Identifier: Apache-2.0
"""Orders of the cache, executed and confirmed by the caller."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Namespace = Hashable
"""An adapter version's uid; None: the base model."""


class Readiness(Enum):
    """The cache never returns HOST_COMPUTABLE."""

    READY = "ready"
    LOADING = "coming"
    """Held, and loading."""
    HOST_COMPUTABLE = "host_computable"
    """As LOADING; host workers compute deltas meanwhile."""
    NO_ROOM = "no_room"
    """Not held: no evictable pages."""


class Copy(NamedTuple):
    """Copy host_pages[i] to device_pages[i], or back, for each i.

    Pages are in layer order.  The cache reuses neither side before `UnifiedCache.copied`.
    """

    copy_id: int
    namespace: Namespace
    is_adapter: bool
    to_device: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class LoadAdapter(NamedTuple):
    """Write an adapter from packed files into the device arena.

    layer_first_pages: start of each layer's run, -1: empty.
    """

    copy_id: int
    namespace: Namespace
    layer_first_pages: tuple[int, ...]


Order = Copy | LoadAdapter


@dataclass
class CacheCounters:
    """Totals; a hit counts once per `hold` or `match`.  Query tokens: hit and computed tokens."""

    adapter_hits: int = 0
    adapter_misses: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    kv_query_tokens: int = 0
    kv_device_hit_tokens: int = 0
    kv_host_hit_tokens: int = 0
    pages_in: int = 0
    pages_out: int = 0
    pages_loaded: int = 0
    pages_dropped: int = 0
    """Without a host copy."""
