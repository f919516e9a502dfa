# SPDX-License-Identifier: Apache-2.0
"""The simulated LoRA Server: the real lease table, a load link, and compute time."""

from __future__ import annotations

import math
from collections.abc import Callable

from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.cache.leases.residency import Load
from moe_lora.core.clock import Clock

from .sources import AdapterSource, LoadLink, SimAdapter
from .system_config import AdapterBytes, SimLoraServerConfig, bytes_of


class SimLoraServer:
    """Uses the real leader's lease table (capacity in slots, not in pages)."""

    def __init__(
        self, config: SimLoraServerConfig, adapter_bytes: AdapterBytes, num_layers: int, clock: Clock
    ) -> None:
        self.link = LoadLink(config.load_bytes_per_s, num_layers, layer_wise=config.layer_wise)
        self.clock = clock
        self._table = LeaseTable(config.capacity, (), 1, starvation_s=config.starvation_s)
        self._adapter_bytes = adapter_bytes
        self._num_stages = config.num_stages
        self._control_s = config.control_s
        self._clients: list[RemoteAdapters] = []
        self._loaded_s = dict.fromkeys(config.prefetched, (-math.inf, -math.inf))
        self._table.prefill(config.prefetched)

    def client(self, on_grant: Callable[[], None], on_contention: Callable[[], None]) -> RemoteAdapters:
        """Access for a further instance.  on_grant: an awaited adapter is ready or loading.
        on_contention: its layer times may change through further instances.
        """
        client = RemoteAdapters(self, str(len(self._clients)), on_grant, on_contention)
        self._clients.append(client)
        return client

    def acquire(self, instance: str, name: str) -> None:
        """Give the instance its lease, now or later."""
        self._table.register(name, {})
        self._table.acquire(instance, name, self.clock.now_s())
        self._carry_out()

    def release(self, instance: str, name: str) -> None:
        self._table.release(instance, name, self.clock.now_s())
        self._carry_out()

    def work(self, client: RemoteAdapters, layer_s: float, delta_s: float) -> float:
        """See `AdapterSource.work`; notifies affected instances."""
        before_s = sum(one.delta_s for one in self._clients)
        client.layer_s, client.delta_s = layer_s, delta_s
        after_s = sum(one.delta_s for one in self._clients)
        if before_s != after_s:
            most_s = max(before_s, after_s) / self._num_stages
            for other in self._clients:
                if other is not client and 0 < other.layer_s < most_s:
                    other.on_contention()
        return after_s / self._num_stages if delta_s else 0.0

    def _carry_out(self) -> None:
        self._table.grant_due(self.clock.now_s())
        for event in self._table.take_events():
            if isinstance(event, Load):
                num_bytes = bytes_of(self._adapter_bytes, event.adapter_id)
                self._loaded_s[event.adapter_id] = self.link.load(self.clock.now_s(), num_bytes)
            elif isinstance(event, Grant):
                told_s = self.clock.now_s() + self._control_s
                self._clients[int(event.instance)].take(
                    event.adapter_id, told_s, *self._loaded_s[event.adapter_id]
                )


class RemoteAdapters(AdapterSource):
    """`AdapterSource` of one instance: an adapter is ready while the instance has a lease.

    Only the lease table stops requests behind a starving request.  Instances that did too could block each
    other forever.
    layer_s, delta_s: the instance's last values (`work`).
    """

    def __init__(
        self,
        server: SimLoraServer,
        instance: str,
        on_grant: Callable[[], None],
        on_contention: Callable[[], None],
    ) -> None:
        super().__init__(server.clock)
        self.on_contention = on_contention
        self.layer_s = self.delta_s = 0.0
        self._instance = instance
        self._on_grant = on_grant
        self._server = server
        self._leases: set[str] = set()
        self._waits: set[str] = set()

    def hold(self, adapter: SimAdapter) -> bool:
        name = adapter.name
        if name not in self._leases and name not in self._waits:
            self._server.acquire(self._instance, name)
            if name not in self._leases:
                self._waits.add(name)
        return name in self._leases

    def let_go(self, adapter: SimAdapter) -> bool:
        self._leases.remove(adapter.name)
        self._server.release(self._instance, adapter.name)
        return False

    def take(self, name: str, told_s: float, first_layer_s: float, last_layer_s: float) -> None:
        """Record the lease: known at told_s, first and last layer loaded at the given times."""
        self._leases.add(name)
        adapter = self._adapters[name]
        adapter.told_s, adapter.first_layer_s, adapter.last_layer_s = told_s, first_layer_s, last_layer_s
        if name in self._waits:
            self._waits.remove(name)
            self._on_grant()

    def work(self, layer_s: float, delta_s: float) -> float:
        return self._server.work(self, layer_s, delta_s)
