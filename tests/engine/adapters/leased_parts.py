# SPDX-License-Identifier: Apache-2.0
"""Instances' bookkeeping over one lease table; what they say to each other waits until a test hands it on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.adapters.leased_adapters import LeasedAdapters
from moe_lora.engine.sequence import Sequence
from moe_lora.lora.row_routing import Lease
from moe_lora.policies.caching.caching import ANYBODY, Asker
from tests.engine.parts import Parts, packed
from tests.virtual_clock import VirtualClock


class TableClient:
    """A `LeaseClient` without thread or socket: `hand_on` carries what was said, either way."""

    def __init__(self, server: TableServer, instance: str, on_change: Callable[[], None]) -> None:
        self._server = server
        self._instance = instance
        self._on_change = on_change
        self._said: deque[tuple[str, str, int, Asker]] = deque()
        self._heard: deque[tuple[Grant, int]] = deque()
        self._wanted: dict[str, int] = {}
        self._leases: dict[str, Lease] = {}
        self._num_asked = 0

    def knows(self, adapter_id: str) -> bool:
        return False

    def register(self, adapter_id: str) -> None:
        self._server.table.register(adapter_id, {0: {0: 1}})

    def acquire(self, adapter_id: str, asker: Asker) -> bool:
        if adapter_id not in self._wanted:
            self._num_asked += 1
            self._wanted[adapter_id] = self._num_asked
            self._said.append(("acquire", adapter_id, self._num_asked, asker))
        return True

    def lease(self, adapter_id: str) -> Lease | None:
        return self._leases.get(adapter_id)

    def release(self, adapter_id: str) -> None:
        if adapter_id in self._wanted:
            del self._wanted[adapter_id]
            self._leases.pop(adapter_id, None)
            self._said.append(("release", adapter_id, 0, ANYBODY))

    def hear(self, grant: Grant, number: int) -> None:
        self._heard.append((grant, number))

    def hand_on(self) -> None:
        """What this instance said reaches the table, and what the table had answered reaches it."""
        while self._said:
            self._server.decide(self._instance, *self._said.popleft())
        while self._heard:
            grant, number = self._heard.popleft()
            if self._wanted.get(grant.adapter_id) == number:
                self._leases[grant.adapter_id] = Lease(grant.slot, grant.generation)
                self._on_change()


class TableServer:
    """The leader without connections."""

    def __init__(self, clock: VirtualClock, capacity: int, starvation_s: float) -> None:
        self.table = LeaseTable(capacity, [capacity], 1, starvation_s=starvation_s)
        self._clock = clock
        self._clients: dict[str, TableClient] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    def attach(self, instance: str) -> Any:
        """What `LeasedAdapters` takes."""

        def leases(on_change: Callable[[], None], on_failure: Callable[..., None]) -> TableClient:
            return self._clients.setdefault(instance, TableClient(self, instance, on_change))

        kept: dict[str, PackedAdapter] = {}
        store = SimpleNamespace(
            put=lambda adapter: kept.setdefault(adapter.content_hash, adapter),
            get=lambda content_hash, name: kept[content_hash],
            restore=lambda content_hash: None,
        )
        return SimpleNamespace(store=store, leases=leases)

    def client(self, instance: str) -> TableClient:
        return self._clients[instance]

    def decide(self, instance: str, kind: str, adapter_id: str, number: int, asker: Asker) -> None:
        now_s = self._clock.now_s()
        if kind == "acquire":
            self._numbers[instance, adapter_id] = number
            self.table.acquire(instance, adapter_id, now_s, asker)
        else:
            self.table.cancel(instance, adapter_id)
            self.table.release(instance, adapter_id, now_s)
        self.table.grant_due(now_s)
        for event in self.table.take_events():
            if isinstance(event, Grant):
                asked = self._numbers[event.instance, event.adapter_id]
                self._clients[event.instance].hear(event, asked)


class LeasedParts(Parts):
    """`Parts` of an instance whose adapters are leased, and have pages here too unless they take none."""

    def __init__(self, server: TableServer, clock: VirtualClock, instance: str, **settings: Any) -> None:
        super().__init__(clock=clock, leases=LeasedAdapters(server.attach(instance)), **settings)
        self.client = server.client(instance)

    def adapters(self, *pages: int) -> list[AdapterVersion]:
        """One for each number of pages here, alike in all instances."""
        return [self.manager.add(packed(f"a{i}", num), None) for i, num in enumerate(pages)]

    def _check_adapter(self, sequence: Sequence) -> None:
        """It is leased, and what of it belongs here is here."""
        adapter = sequence.adapter
        assert adapter is None or adapter.lease is not None
        if adapter is not None and adapter.packed.nbytes:
            super()._check_adapter(sequence)

    def finish_after(self, num_tokens: dict[str, int]) -> list[Sequence]:
        """End the running requests that have their tokens."""
        done = [
            sequence
            for sequence in self.scheduler.running
            if sequence.num_generated >= num_tokens[sequence.request.request_id]
        ]
        for sequence in done:
            self.scheduler.finish(sequence)
        return done
