"""What the cache holds and has done, as `EngineStats` tells it."""

from __future__ import annotations

from typing import Any

from moe_lora.cache.unified import UnifiedCache


class CacheFigures:
    """Pages of the cache as bytes.  max_kv_pages: what KV may take of the device."""

    def __init__(self, cache: UnifiedCache, page_bytes: int, max_kv_pages: int) -> None:
        self._cache = cache
        self._page_bytes = page_bytes
        self._max_kv_pages = max_kv_pages

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        counters, pages = self._cache.counters, self._cache.usage()
        return {
            "kv_usage": pages["device_kv_used"] / self._max_kv_pages,
            "adapter_loads": counters.adapter_loads,
            "adapter_evictions": counters.adapter_evictions,
            "kv_query_tokens": counters.kv_query_tokens,
            "kv_device_hit_tokens": counters.kv_device_hit_tokens,
            "kv_host_hit_tokens": counters.kv_host_hit_tokens,
        } | {name: num_pages * self._page_bytes for name, num_pages in self._bytes(pages).items()}

    def _bytes(self, pages: dict[str, int]) -> dict[str, int]:
        counters = self._cache.counters
        totals = {
            f"{tier}_bytes": sum(pages[f"{tier}_{part}"] for part in ("kv", "adapters", "free"))
            for tier in ("device", "host")
        }
        return totals | {
            "adapter_load_bytes": counters.pages_loaded,
            "swapped_in_bytes": counters.pages_in,
            "swapped_out_bytes": counters.pages_out,
            "kv_lost_bytes": counters.pages_dropped,
            "device_kv_bytes": pages["device_kv"],
            "device_kv_invalid_bytes": pages["device_kv_invalid"],
            "device_adapter_bytes": pages["device_adapters"],
            "host_kv_bytes": pages["host_kv"],
            "host_adapter_bytes": pages["host_adapters"],
        }
