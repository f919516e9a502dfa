"""What the cache has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


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
