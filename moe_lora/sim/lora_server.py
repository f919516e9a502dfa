# SPDX-License-Identifier: Apache-2.0
"""A simulated LoRA Server: the real lease table, loads and deltas by layer.  Adapters have one size."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.cache.leases.residency import Evict, Load
from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.errors import ConfigError

from .events import EventQueue


@dataclass(frozen=True, kw_only=True)
class SimServerConfig:
    """layer_load_s: a layer of an adapter over a stage's links.

    num_stages: y of EPx-PPy; stage s loads and computes the layers s, s + y, ...
    control_s: round trip for a lease.  prefetched: resident at the start, evicted last to first.
    """

    capacity: int
    num_layers: int
    layer_load_s: float
    num_stages: int = 1
    control_s: float = 0.001
    starvation_s: float = 5.0
    prefetched: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= self.num_layers:
            raise ConfigError(
                f"num_stages={self.num_stages} of {self.num_layers} layers; choose 1 to {self.num_layers}"
            )
        if not 0 <= self.layer_load_s < math.inf:
            raise ConfigError(f"layer_load_s={self.layer_load_s} must be finite, and 0 or more")
        if len(self.prefetched) > self.capacity:
            raise ConfigError(
                f"prefetched={len(self.prefetched)} adapters exceed capacity={self.capacity}; name fewer"
            )


@dataclass(slots=True, eq=False)
class _Loading:
    """num_loaded: layers of each stage.  left: layers to come."""

    num_loaded: list[int]
    left: int

    def has(self, layer: int) -> bool:
        return self.num_loaded[layer % len(self.num_loaded)] > layer // len(self.num_loaded)


class LayerLoads:
    """A link per stage; adapters take turns by layer (InfiniLoRA section 5.3)."""

    def __init__(self, config: SimServerConfig, events: EventQueue) -> None:
        self.num_loads = 0
        self._config = config
        self._events = events
        self._loading: dict[str, _Loading] = {}
        self._turns: list[deque[_Loading]] = [deque() for _ in range(config.num_stages)]
        self._busy = [False] * config.num_stages
        self._waiting: list[Callable[[], None]] = []

    def start(self, name: str) -> None:
        """Load the adapter."""
        loading = self._loading[name] = _Loading([0] * self._config.num_stages, self._config.num_layers)
        self.num_loads += 1
        for stage, turns in enumerate(self._turns):
            turns.append(loading)
            self._start_layer(stage)

    def stop(self, name: str) -> None:
        """Drop an evicted adapter's remaining layers."""
        loading = self._loading.pop(name, None)
        if loading is None:
            return
        loading.left = 0
        for turns in self._turns:
            if loading in turns:
                turns.remove(loading)

    def run_layers(self, names: Iterable[str], layer_s: float, on_end: Callable[[], None]) -> None:
        """Compute a step; each layer waits for its loads."""
        loading = [self._loading[name] for name in names if name in self._loading]
        self._run(loading, 0, layer_s, on_end)

    def _run(self, loading: list[_Loading], layer: int, layer_s: float, on_end: Callable[[], None]) -> None:
        loading = [one for one in loading if one.left]
        now_s = self._events.now_s()
        if not loading:
            self._events.at(now_s + (self._config.num_layers - layer) * layer_s, on_end)
        elif all(one.has(layer) for one in loading):
            self._events.at(now_s + layer_s, partial(self._run, loading, layer + 1, layer_s, on_end))
        else:
            self._waiting.append(partial(self._run, loading, layer, layer_s, on_end))

    def _start_layer(self, stage: int) -> None:
        if self._busy[stage] or not self._turns[stage]:
            return
        self._busy[stage] = True
        end_s = self._events.now_s() + self._config.layer_load_s
        self._events.at(end_s, partial(self._end_layer, stage, self._turns[stage].popleft()))

    def _end_layer(self, stage: int, loading: _Loading) -> None:
        self._busy[stage] = False
        if loading.left:
            loading.num_loaded[stage] += 1
            loading.left -= 1
            if loading.num_loaded[stage] < len(range(stage, self._config.num_layers, len(self._turns))):
                self._turns[stage].append(loading)
        self._start_layer(stage)
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


class SimServer:
    """Leases by the leader's table."""

    def __init__(self, config: SimServerConfig, events: EventQueue) -> None:
        self.config = config
        self.events = events
        self.loads = LayerLoads(config, events)
        self._table = LeaseTable(config.capacity, (), 1, starvation_s=config.starvation_s)
        self._instances: dict[str, SimLeases] = {}
        self._work_s: dict[str, float] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._table.prefill(config.prefetched)

    def leases(self, index: int, cache: UnifiedCache, on_change: Callable[[], None]) -> SimLeases:
        """Leases of an instance.  on_change: called after a new lease."""
        found = self._instances[str(index)] = SimLeases(self, str(index), cache, on_change)
        return found

    def acquire(self, instance: str, name: str, number: int) -> None:
        """Send a lease of this number, once there is room."""
        self._numbers[instance, name] = number
        self._table.register(name, {})
        self._table.acquire(instance, name, self.events.now_s())
        self._carry_out()

    def release(self, instance: str, name: str) -> None:
        """End the lease or the wait."""
        if not self._table.release(instance, name, self.events.now_s()):
            self._table.cancel(instance, name)
        self._carry_out()

    def layer_s(self, instance: str, layer_s: float, work_s: float) -> float:
        """Seconds of a layer.  work_s: of the server, for the instance's deltas.

        A stage serves instances in turn; no layer is shorter than the stage's whole work.
        """
        self._work_s[instance] = work_s
        return max(layer_s, sum(self._work_s.values()) / self.config.num_stages) if work_s else layer_s

    def _carry_out(self) -> None:
        now_s = self.events.now_s()
        self._table.grant_due(now_s)
        for event in self._table.take_events():
            if isinstance(event, Load):
                self.loads.start(event.adapter_id)
            elif isinstance(event, Evict):
                self.loads.stop(event.adapter_id)
            elif isinstance(event, Grant):
                name, leases = event.adapter_id, self._instances[event.instance]
                receive = partial(leases.receive, name, self._numbers[event.instance, name])
                self.events.at(now_s + self.config.control_s, receive)


class SimLeases:
    """`scheduling.views.Adapters` beside a LoRA Server."""

    waits_for_others = True

    def __init__(
        self, server: SimServer, instance: str, cache: UnifiedCache, on_change: Callable[[], None]
    ) -> None:
        self._server = server
        self._instance = instance
        self._cache = cache
        self._on_change = on_change
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._wanted: dict[str, int] = {}
        self._numbers = count(1)
        self._leased: set[str] = set()

    def enqueue(self, adapter: str) -> None:
        """A request waits."""
        self._waiting[adapter] += 1

    def dequeue(self, adapter: str) -> None:
        """End a wait; unneeded leases return."""
        self._waiting[adapter] -= 1
        if not self._waiting[adapter]:
            self.release_lease(adapter)

    def begin_round(self) -> None:
        """Does nothing: the server finds room."""

    def acquire(self, adapter: str, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Use the lease, or request a lease."""
        if adapter not in self._wanted:
            self._wanted[adapter] = next(self._numbers)
            self._server.acquire(self._instance, adapter, self._wanted[adapter])
        self._cache.note_remote(adapter, adapter in self._leased)
        if adapter not in self._leased:
            return Readiness.NO_ROOM
        self._running[adapter] += 1
        return self._cache.hold(adapter, self._server.events.now_s(), again=again)

    def has_unused_lease(self, adapter: str) -> bool:
        """True for a lease without a running request."""
        return adapter in self._leased and not self._running[adapter]

    def readiness(self, adapter: str) -> Readiness:
        """A lease is enough; steps wait for layers."""
        return self._cache.readiness(adapter)

    def pays_on_host(self, adapter: str, num_tokens: int, on_host: int) -> bool:
        """False without host workers."""
        return False

    def release(self, adapter: str) -> None:
        """Undo `acquire`."""
        self._running[adapter] -= 1
        self._cache.let_go(adapter, self._server.events.now_s())
        self.release_lease(adapter)

    def receive(self, adapter: str, number: int) -> None:
        """A lease has come; old numbers are of released leases."""
        if self._wanted.get(adapter) == number:
            self._leased.add(adapter)
            self._on_change()

    def run_layers(
        self, adapters: Iterable[str], layer_s: float, work_s: float, on_end: Callable[[], None]
    ) -> float:
        """Compute a step; returns seconds without load waits."""
        layer_s = self._server.layer_s(self._instance, layer_s, work_s)
        self._server.loads.run_layers(adapters, layer_s, on_end)
        return self._server.config.num_layers * layer_s

    def rest(self) -> None:
        """The instance is idle."""
        self._server.layer_s(self._instance, 0.0, 0.0)

    def release_lease(self, adapter: str) -> None:
        """Release the lease, or cancel its request, unless a request holds the adapter."""
        if adapter in self._wanted and not self._running[adapter]:
            del self._wanted[adapter]
            self._leased.discard(adapter)
            self._server.release(self._instance, adapter)
