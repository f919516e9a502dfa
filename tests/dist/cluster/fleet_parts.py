# SPDX-License-Identifier: Apache-2.0
"""Engines for tests of what stands before them: the next token is the number of tokens before it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, CapacityError, EngineDeadError
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, ModelInfo, TokenOutput
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.engine.client.messages import Alias, CurrentPause, DrainOrder, PauseScope, SleepOrder
from moe_lora.policies.routing.demand import DemandMeter
from moe_lora.policies.routing.routing import Router
from tests.virtual_clock import VirtualClock

INFO = ModelInfo(
    name="base",
    model_dir="base",
    family="mixtral",
    dtype="float32",
    max_model_len=64,
    vocab_size=64,
    max_loras=4,
    eos_token_ids=(),
)


def cluster_config(front_end: FrontEndConfig | None = None, **engine: Any) -> ClusterConfig:
    """A cluster of engines like `CountingEngine`."""
    return ClusterConfig(
        engine=EngineConfig(model_dir="base", **engine),
        served_model_name="base",
        front_end=front_end or FrontEndConfig(),
    )


def fleet_client(
    instance_registry: InstanceRegistry,
    router: Router,
    clock: Clock | None = None,
    meter: DemandMeter | None = None,
    ranks: dict[str, int] | None = None,
) -> FleetClient:
    """A client of the instances that are there."""
    routes = Routes(config=FrontEndConfig(), router=router, meter=meter, ranks={} if ranks is None else ranks)
    adapters = FleetAdapters(instance_registry, routes.ranks)
    return FleetClient(instance_registry, routes, clock or VirtualClock(), adapters.call)


@dataclass(eq=False)
class CountingEngine:
    """`EngineClient` that ends when the sequence of a request has `dies_at` tokens.  adapters: name -> path.

    refuse: paths that can't be loaded, names that can't be pinned.
    """

    dies_at: int | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    refuse: frozenset[str] = frozenset()
    alive: bool = True
    closed: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    stats_now: EngineStats = field(default_factory=EngineStats)
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def check(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine's process has ended")

    async def model_info(self) -> ModelInfo:
        self.check()
        return INFO

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        self.check()
        if request.adapter is not None and request.adapter not in self.adapters:
            raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            first = len(request.prompt_token_ids)
            limit = first + (request.sampling.max_tokens or 0)
            for place in range(request.known_tokens, limit):
                await asyncio.sleep(0)
                if place == self.dies_at:
                    self.alive = False
                self.check()
                reason = "length" if place + 1 == limit else None
                reason = reason if request.request_id in self.running else "abort"
                yield TokenOutput(
                    request_id=request.request_id,
                    token_ids=() if reason == "abort" else (place,),
                    finish_reason=reason,
                )
                if reason == "abort":
                    return
        finally:
            self.running.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.running.discard(request_id)

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        self.check()
        return await getattr(self, f"_{verb}")(*args, **words)

    async def _load_adapter(
        self,
        name: str,
        path: str,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> AdapterInfo:
        await asyncio.sleep(0)
        self.check()
        self.calls.append(("load", name, path))
        if path in self.refuse:
            raise AdapterError(f"{path} can't be read")
        self.adapters[name] = path
        self.versions[name] = version or 1
        return self._info(name)

    async def _check_next(self, name: str) -> None:
        self.check()
        self.calls.append(("check", name))

    async def _unload_adapter(self, name: str, waits: bool = True) -> None:
        await asyncio.sleep(0)
        self.check()
        self.calls.append(("unload", name))
        if self.adapters.pop(name, None) is None:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")

    async def _pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        await asyncio.sleep(0)
        self.check()
        self.calls.append(("pin" if pinned else "unpin", name))
        if pinned and name in self.refuse:
            raise CapacityError(f"adapter {name!r} can't be pinned")
        (self.pinned.add if pinned else self.pinned.discard)(name)
        return self._info(name)

    async def _remember_drain(self, order: DrainOrder) -> None: ...

    async def _remember_aliases(self, aliases: Mapping[str, Alias]) -> None: ...

    async def _abort_requests(self, scope: PauseScope) -> None: ...

    async def _pause_requests(self, scope: PauseScope, *_: object) -> None: ...

    async def _used_adapters(self) -> dict[str, int]:
        return Counter(request.adapter for request in self.requests if request.adapter is not None)

    async def _ready_adapters(self, names: Sequence[str]) -> list[str]:
        return []

    async def _preload_adapters(self, names: Sequence[str]) -> int:
        self.calls.append(("preload", *names))
        return len(names)

    async def _paused_scopes(self) -> list[PauseScope]:
        return []

    async def _current_pauses(self) -> list[CurrentPause]:
        return []

    async def _sleep_orders(self) -> list[SleepOrder]:
        return []

    async def list_adapters(self) -> list[AdapterInfo]:
        self.check()
        return [self._info(name) for name in self.adapters]

    async def stats(self) -> EngineStats:
        self.check()
        return self.stats_now

    async def is_alive(self) -> bool:
        return self.alive

    async def close(self) -> None:
        self.closed, self.alive = True, False

    def _info(self, name: str) -> AdapterInfo:
        return AdapterInfo(
            name=name,
            version=self.versions.get(name, 1),
            lora_rank=1,
            nbytes=1,
            targets=(),
            path=self.adapters[name],
            residency="host",
            pinned=name in self.pinned,
            num_running=sum(one.adapter == name and one.request_id in self.running for one in self.requests),
        )
