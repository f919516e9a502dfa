# SPDX-License-Identifier: Apache-2.0
"""Orders of the cache, executed and confirmed by its caller.  No tensors here."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Namespace = Hashable
"""An adapter version's uid; None: the base model."""


class Readiness(Enum):
    """Readiness of an adapter for a request.  The cache itself never returns HOST_COMPUTABLE."""

    READY = "ready"
    LOADING = "coming"
    """Held; its load is under way."""
    HOST_COMPUTABLE = "host_computable"
    """As LOADING, with host workers for its prompts' deltas meanwhile."""
    NO_ROOM = "no_room"
    """Not held: no evictable pages now; ask again later."""


class Copy(NamedTuple):
    """Copy device_pages[i] <-> host_pages[i] for all i, to the device or from it.

    An adapter's pages come in layer order.  Before `UnifiedCache.copied` the cache reuses neither side.
    namespace: of the bytes; is_adapter: the adapter's own bytes, else history KV.
    """

    copy_id: int
    namespace: Namespace
    is_adapter: bool
    to_device: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class LoadAdapter(NamedTuple):
    """Write an adapter from packed files into the device arena.

    layer_first_pages: start of each layer's run of pages, -1 for an empty layer.
    """

    copy_id: int
    namespace: Namespace
    layer_first_pages: tuple[int, ...]


Order = Copy | LoadAdapter


@dataclass
class CacheCounters:
    """Totals.  A hit counts once per `hold` or `match`; tokens are of matched prompts.

    kv_query_tokens = kv_device_hit_tokens + kv_host_hit_tokens + computed tokens.
    pages_dropped: left the device without a copy on the host.
    """

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
