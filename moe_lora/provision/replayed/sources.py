# SPDX-License-Identifier: Apache-2.0
"""Adapter sources of a simulated instance, and the load link."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_lora.core.clock import Clock
from moe_lora.policies.admission.admission import least_recently_used
from moe_lora.timing.host_times import LinkTime

from .running import SimRequest
from .system_config import AdapterBytes, LocalConfig, bytes_of


@dataclass(slots=True, eq=False)
class SimAdapter:
    """An adapter in the view of an instance."""

    name: str
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float = -math.inf
    told_s: float = -math.inf
    """Time of the grant at the instance."""
    first_layer_s: float = -math.inf
    last_layer_s: float = -math.inf


class AdapterSource(ABC):
    """Counts requests per adapter of an instance, and makes adapters ready."""

    loads_first = False
    """A request leaves the queue only with a loaded adapter; the load blocks the step."""
    starvation_s = math.inf
    """inf if handled elsewhere."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._adapters: dict[str, SimAdapter] = {}

    @abstractmethod
    def hold(self, adapter: SimAdapter) -> bool:
        """Make the adapter ready, or start to, and pin; False without room.  Sets the times."""

    @abstractmethod
    def let_go(self, adapter: SimAdapter) -> bool:
        """The last running request ended; True if another adapter may find room."""

    def work(self, layer_s: float, delta_s: float) -> float:
        """Set times per layer, total and server's.  Returns the server's time for all instances."""
        return 0.0

    def adapter(self, request: SimRequest) -> SimAdapter | None:
        """The request's adapter; None for the base model."""
        name = request.adapter
        if name is None:
            return None
        if name not in self._adapters:
            self._adapters[name] = SimAdapter(name)
        return self._adapters[name]

    def wait(self, request: SimRequest) -> None:
        """The request has joined the queue."""
        adapter = self.adapter(request)
        if adapter is not None:
            adapter.num_waiting += 1

    def end_wait(self, request: SimRequest) -> None:
        """The request has left the queue."""
        adapter = self.adapter(request)
        if adapter is not None:
            adapter.num_waiting -= 1

    def acquire(self, request: SimRequest) -> bool:
        """Make the adapter ready and pin; False without room."""
        adapter = self.adapter(request)
        if adapter is None:
            return True
        if not self.hold(adapter):
            return False
        adapter.num_running += 1
        adapter.num_waiting -= 1
        adapter.last_used_s = self._clock.now_s()
        return True

    def release(self, request: SimRequest) -> bool:
        """The request has ended; True if another adapter may find room."""
        adapter = self.adapter(request)
        if adapter is None:
            return False
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        return adapter.num_running == 0 and self.let_go(adapter)

    def loaded_s(self, requests: Iterable[SimRequest]) -> tuple[float, float] | None:
        """Load times of first and last layer over adapters; None without adapters."""
        adapters = [adapter for request in requests if (adapter := self.adapter(request)) is not None]
        if not adapters:
            return None
        first_layer_s = max(adapter.first_layer_s for adapter in adapters)
        return first_layer_s, max(adapter.last_layer_s for adapter in adapters)


class LoadLink:
    """Loads over a link, in parts of 1 / num_layers.

    layer_wise: a layer of each current load in turn (InfiniLoRA section 5.3); else whole adapters.
    """

    def __init__(self, bytes_per_s: float, num_layers: int = 1, *, layer_wise: bool = False) -> None:
        self._link = LinkTime(bytes_per_s)
        self._num_layers = num_layers if layer_wise else 1
        self._free_s = -math.inf
        self._under_way: list[float] = []
        self.num_loads = 0

    def load(self, now_s: float, num_bytes: float) -> tuple[float, float]:
        """Times of the first and last part; later loads delay last parts."""
        load_s = self._link.seconds(num_bytes)
        self._free_s = max(self._free_s, now_s) + load_s
        self._under_way = [end_s for end_s in self._under_way if end_s > now_s]
        before = len(self._under_way)
        self._under_way.append(self._free_s)
        self.num_loads += 1
        if self._num_layers == 1:
            return self._free_s, self._free_s
        return min(self._free_s, now_s + (before + 1) * load_s / self._num_layers), self._free_s


class LocalAdapters(AdapterSource):
    """Adapters of a coupled instance: `capacity` slots.

    link: from host memory.  fetches: from further hosts, in sequence.
    """

    def __init__(self, config: LocalConfig, adapter_bytes: AdapterBytes, clock: Clock) -> None:
        super().__init__(clock)
        self.loads_first = config.blocking
        self.link = LoadLink(config.load_bytes_per_s)
        self.fetches = LoadLink(config.fetch_bytes_per_s)
        self.starvation_s = config.starvation_s
        self._config = config
        self._adapter_bytes = adapter_bytes
        self._resident: dict[str, SimAdapter] = {}
        self._on_host: set[str] | None = None

    def prefetch(self, names: Sequence[str]) -> None:
        """Make these resident at the start; the last is evicted first."""
        for before, name in enumerate(reversed(names), start=-len(names)):
            self._resident[name] = self._adapters[name] = SimAdapter(name, last_used_s=float(before))

    def begin_with(self, names: Iterable[str]) -> None:
        """Set the host's adapters.  Without this call: all."""
        self._on_host = set(names)

    def keep(self, names: Iterable[str]) -> None:
        """Set the placement: the host drops the rest, and fetches missing adapters at first use."""
        if self._on_host is not None:
            self._on_host &= set(names)

    def hold(self, adapter: SimAdapter) -> bool:
        if adapter.name in self._resident:
            return True
        if len(self._resident) >= self._config.capacity:
            victim = least_recently_used(self._resident.values())
            if victim is None:
                return False
            del self._resident[victim.name]
        self._resident[adapter.name] = adapter
        num_bytes = bytes_of(self._adapter_bytes, adapter.name)
        there_s = self._clock.now_s()
        if self._on_host is not None and adapter.name not in self._on_host:
            self._on_host.add(adapter.name)
            there_s = self.fetches.load(there_s, num_bytes)[1]
        loaded_s = self.link.load(there_s, num_bytes)
        if self.loads_first:
            adapter.first_layer_s, adapter.last_layer_s = loaded_s
        else:
            adapter.told_s = loaded_s[1]
        return True

    def let_go(self, adapter: SimAdapter) -> bool:
        return True
