# SPDX-License-Identifier: Apache-2.0
"""What the cache wants moved: orders that somebody else executes and confirms.  No tensors here."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Namespace = Hashable
"""An adapter version's uid; None: the base model."""


class Readiness(Enum):
    """Whether an adapter is there for a request.  The cache knows nothing of HOST_COMPUTABLE."""

    READY = "ready"
    LOADING = "coming"
    """Held; an order for its bytes is under way."""
    HOST_COMPUTABLE = "host_computable"
    """As LOADING, and until it is there host workers compute its prompts' deltas."""
    NO_ROOM = "no_room"
    """Not held: nothing more can be evicted now; ask again later."""


class Copy(NamedTuple):
    """Copy device_pages[i] <-> host_pages[i] for all i, towards the device or away from it.

    Of an adapter the pages come in layer order.  Until the order is confirmed by `UnifiedCache.copied`, the
    cache reuses neither side.  namespace: whose bytes these are; is_adapter: its own, else its history KV.
    """

    copy_id: int
    namespace: Namespace
    is_adapter: bool
    to_device: bool
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class LoadAdapter(NamedTuple):
    """Write an adapter from its packed files into the device arena.

    layer_first_pages: where each layer's run of pages starts, -1 for a layer without bytes.
    """

    copy_id: int
    namespace: Namespace
    layer_first_pages: tuple[int, ...]


Order = Copy | LoadAdapter


# What the cache has done since its start.


@dataclass
class CacheCounters:
    """Totals.  A hit is counted once per `hold` or `match`; tokens are those of matched prompts.

    kv_query_tokens = kv_device_hit_tokens + kv_host_hit_tokens + tokens that had to be computed.
    pages_dropped: left the device without a copy although the host did not have them.
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
