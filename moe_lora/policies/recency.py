"""Least recently used, in the systems that FastLibra is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from .caching import CacheLoad, Floats, NodeColumns, Traits


@dataclass(frozen=True, kw_only=True)
class Recency:
    """value = 1 / (1 + idle_s): what was used last stays longest, whatever it is."""

    traits: Traits = field(default_factory=Traits)
    adapter_recent_s: float = 60.0

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return 1 / (1 + nodes.idle_s)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return self.values(nodes, load)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True


def lru() -> Recency:
    """One pool, adapters and KV independent of each other, moved on demand."""
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False))


def fastlibra_wos() -> Recency:
    """FastLibra-WOS: its tree and thresholds, without its cost model (section 6.7)."""
    return Recency(traits=Traits(keeps_dependencies=True))


def static_partition(adapter_share: float = 0.2) -> Recency:
    """vLLM as FastLibra compares with it: a fixed part of the device for adapters, LRU in either part,
    history and adapters offloaded to the host by LRU, loaded on demand (sections 2.2 and 6.1).
    """
    if not 0 < adapter_share < 1:
        raise ValueError(f"adapter_share={adapter_share} must lie between 0 and 1")
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False, adapter_share=adapter_share))


def slora() -> Recency:
    """S-LoRA: one pool; KV is discarded when its request ends, adapters are loaded on demand and leave when
    no request uses them (section 6.1).
    """
    return Recency(
        traits=Traits(
            keeps_dependencies=False,
            keeps_history=False,
            keeps_idle_adapters=False,
            uses_host_for_kv=False,
            swaps_in=False,
        )
    )
