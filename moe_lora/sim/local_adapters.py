"""A coupled instance: adapters in slots of its own, loaded by itself, idle ones evicted."""

from __future__ import annotations

from moe_lora.core.clock import Clock
from moe_lora.policies.eviction import least_recently_used

from .adapters import LoadLink, SimAdapter
from .config import AdapterBytes, LocalConfig, bytes_of


class LocalAdapters:
    """`AdapterSource` of `capacity` slots; a load holds up the step, as it does in vLLM's S-LoRA."""

    loads_first = True

    def __init__(self, config: LocalConfig, adapter_bytes: AdapterBytes, clock: Clock) -> None:
        self.link = LoadLink(config.load_bytes_per_s, 1, layer_wise=False)
        self.starvation_s = config.starvation_s
        self._capacity = config.capacity
        self._adapter_bytes = adapter_bytes
        self._clock = clock
        self._resident: dict[int, SimAdapter] = {}

    def hold(self, adapter: SimAdapter) -> bool:
        if adapter.uid in self._resident:
            return True
        if len(self._resident) >= self._capacity:
            victim = least_recently_used(self._resident.values())
            if victim is None:
                return False
            del self._resident[victim.uid]
        self._resident[adapter.uid] = adapter
        num_bytes = bytes_of(self._adapter_bytes, adapter.name)
        adapter.first_layer_s, adapter.last_layer_s = self.link.load(self._clock.now_s(), num_bytes)
        return True

    def let_go(self, adapter: SimAdapter) -> bool:
        return True  # it stays, but may be evicted now

    def work(self, layer_s: float, delta_s: float) -> float:
        return 0.0
