"""Which adapters an instance's requests hold or wait for."""

from __future__ import annotations

from collections.abc import Iterable

from moe_lora.core.clock import Clock

from .sources import AdapterSource, SimAdapter
from .requests import SimRequest


class SimResidency:
    """Counts the requests of each adapter, and asks the source for adapters; as `engine.adapters.manager` does."""

    def __init__(self, source: AdapterSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._adapters: dict[int, SimAdapter] = {}

    def adapter(self, request: SimRequest) -> SimAdapter | None:
        """The request's adapter; None for the base model."""
        if request.adapter is None or request.adapter_uid is None:
            return None
        adapter = self._adapters.get(request.adapter_uid)
        if adapter is None:
            adapter = self._adapters[request.adapter_uid] = SimAdapter(request.adapter, request.adapter_uid)
        return adapter

    def wait(self, request: SimRequest) -> None:
        """The request has joined the queue."""
        adapter = self.adapter(request)
        if adapter is not None:
            adapter.num_waiting += 1

    def acquire(self, request: SimRequest) -> bool:
        """Have the adapter made ready and pin it for the request; False if there is no place now."""
        adapter = self.adapter(request)
        if adapter is None:
            return True
        if not self._source.hold(adapter):
            return False
        adapter.num_running += 1
        adapter.num_waiting -= 1
        adapter.last_used_s = self._clock.now_s()
        return True

    def give_back(self, request: SimRequest) -> None:
        """The request, whose adapter was acquired, waits on after all."""
        self.wait(request)
        self.release(request)

    def release(self, request: SimRequest) -> bool:
        """The request has ended; whether another adapter may find room by that."""
        adapter = self.adapter(request)
        if adapter is None:
            return False
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        return adapter.num_running == 0 and self._source.let_go(adapter)

    def loaded_s(self, requests: Iterable[SimRequest]) -> tuple[float, float] | None:
        """When first and last layer of all their adapters are there; None if they have none."""
        adapters = [adapter for request in requests if (adapter := self.adapter(request)) is not None]
        if not adapters:
            return None
        first_layer_s = max(adapter.first_layer_s for adapter in adapters)
        return first_layer_s, max(adapter.last_layer_s for adapter in adapters)
