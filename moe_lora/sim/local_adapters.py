"""A coupled instance: adapters in slots of its own, loaded by itself, idle ones evicted."""

from __future__ import annotations

from collections.abc import Iterable

from moe_lora.core.clock import Clock
from moe_lora.policies.eviction import least_recently_used

from .sources import LoadLink, SimAdapter
from .system_config import AdapterBytes, LocalConfig, bytes_of


class LocalAdapters:
    """`AdapterSource` of `capacity` slots; a load holds up the step, as it does in vLLM's S-LoRA.

    link: from the host's memory.  fetches: to it, from other hosts', one after the other.
    """

    loads_first = True

    def __init__(self, config: LocalConfig, adapter_bytes: AdapterBytes, clock: Clock) -> None:
        self.link = LoadLink(config.load_bytes_per_s, 1, layer_wise=False)
        self.fetches = LoadLink(config.fetch_bytes_per_s, 1, layer_wise=False)
        self.starvation_s = config.starvation_s
        self._capacity = config.capacity
        self._adapter_bytes = adapter_bytes
        self._clock = clock
        self._resident: dict[int, SimAdapter] = {}
        self._on_host: set[str] | None = None

    def begin_with(self, names: Iterable[str]) -> None:
        """The host has these adapters and no others.  If this is never called, it has all."""
        self._on_host = set(names)

    def keep(self, names: Iterable[str]) -> None:
        """The placement has these here from now on: the host drops others; what it lacks comes when used."""
        if self._on_host is not None:
            self._on_host &= set(names)

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
        there_s = self._clock.now_s()
        if self._on_host is not None and adapter.name not in self._on_host:
            self._on_host.add(adapter.name)
            there_s = self.fetches.load(there_s, num_bytes)[1]
        adapter.first_layer_s, adapter.last_layer_s = self.link.load(there_s, num_bytes)
        return True

    def let_go(self, adapter: SimAdapter) -> bool:
        return True  # it stays, but may be evicted now

    def work(self, layer_s: float, delta_s: float) -> float:
        return 0.0
