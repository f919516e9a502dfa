# SPDX-License-Identifier: Apache-2.0
"""Where a simulated instance's adapters come from: the interface, and the link they come over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_lora.core.clock import Clock
from moe_lora.policies.admission.admission import least_recently_used

from .running import SimRequest
from .system_config import AdapterBytes, LocalConfig, bytes_of


@dataclass(slots=True, eq=False)
class SimAdapter:
    """An adapter as one instance knows it (`policies.admission.admission.ResidentView`).

    first_layer_s, last_layer_s: when these are, or were, loaded.  told_s: when the instance hears, or heard,
    that it may use it.
    """

    name: str
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float = -math.inf
    told_s: float = -math.inf
    first_layer_s: float = -math.inf
    last_layer_s: float = -math.inf


class AdapterSource(ABC):
    """Counts one instance's requests of each adapter and makes adapters ready for them, as
    `engine.adapters.manager` does.

    loads_first: a request leaves the queue only when its adapter is there, holding up the step meanwhile.
    starvation_s: see `policies.admission.admission.admissible`; inf where somebody else sees to it.
    """

    loads_first = False
    starvation_s = math.inf

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._adapters: dict[str, SimAdapter] = {}

    @abstractmethod
    def hold(self, adapter: SimAdapter) -> bool:
        """Make the adapter ready, or begin to, and keep it so; False if that can't be done now.

        Sets the adapter's times.
        """

    @abstractmethod
    def let_go(self, adapter: SimAdapter) -> bool:
        """Its last running request ended; whether another adapter of this instance may find room by that."""

    def work(self, layer_s: float, delta_s: float) -> float:
        """From now on the instance's layers take layer_s each, of which a server computes for delta_s.

        Returns the time that a server needs for a layer of all instances.
        """
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

    def acquire(self, request: SimRequest) -> bool:
        """Have the adapter made ready and hold it for the request; False if there is no place now."""
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
        """The request has ended; whether another adapter may find room by that."""
        adapter = self.adapter(request)
        if adapter is None:
            return False
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        return adapter.num_running == 0 and self.let_go(adapter)

    def loaded_s(self, requests: Iterable[SimRequest]) -> tuple[float, float] | None:
        """When first and last layer of all their adapters are there; None if they have none."""
        adapters = [adapter for request in requests if (adapter := self.adapter(request)) is not None]
        if not adapters:
            return None
        first_layer_s = max(adapter.first_layer_s for adapter in adapters)
        return first_layer_s, max(adapter.last_layer_s for adapter in adapters)


class LoadLink:
    """Loads over one link of `bytes_per_s`, in parts of 1 / num_layers.

    layer_wise: a layer of each adapter under way in turn (InfiniLoRA section 5.3); else whole adapters one
    after the other, of which nothing is ready before all is.
    """

    def __init__(self, bytes_per_s: float, num_layers: int = 1, *, layer_wise: bool = False) -> None:
        self._bytes_per_s = bytes_per_s
        self._num_layers = num_layers if layer_wise else 1
        self._free_s = -math.inf
        self._under_way: list[float] = []
        self.num_loads = 0

    def load(self, now_s: float, num_bytes: float) -> tuple[float, float]:
        """When the first and the last part are there.

        As if nothing came after it: a later load takes turns with this one and makes its last parts later.
        """
        load_s = num_bytes / self._bytes_per_s
        self._free_s = max(self._free_s, now_s) + load_s
        self._under_way = [end_s for end_s in self._under_way if end_s > now_s]
        before = len(self._under_way)
        self._under_way.append(self._free_s)
        self.num_loads += 1
        if self._num_layers == 1:
            return self._free_s, self._free_s
        return min(self._free_s, now_s + (before + 1) * load_s / self._num_layers), self._free_s


class LocalAdapters(AdapterSource):
    """Of a coupled instance: `capacity` slots of its own, idle adapters evicted.  See `LocalConfig.blocking`.

    link: from the host's memory.  fetches: to it, from other hosts', one after the other.
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
        """Make these resident before anything happens, the last of them evicted first."""
        for before, name in enumerate(reversed(names), start=-len(names)):
            self._resident[name] = self._adapters[name] = SimAdapter(name, last_used_s=float(before))

    def begin_with(self, names: Iterable[str]) -> None:
        """The host has these adapters and no others.  If this is never called, it has all."""
        self._on_host = set(names)

    def keep(self, names: Iterable[str]) -> None:
        """The placement has these here from now on: the host drops others; what it lacks comes when used."""
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
        return True  # it stays, but may be evicted now
