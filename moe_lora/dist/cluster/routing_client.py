"""Several engines behind one `EngineClient`: requests are routed, and outlive the engine they run on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, cast

from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError
from moe_lora.core.request import (
    AdapterInfo,
    EngineStats,
    GenerateRequest,
    InstanceStats,
    ModelInfo,
    TokenOutput,
)
from moe_lora.policies.routing import Router, TokenMeter

from .failover import MAX_RESENDS, ResumableRequest, token_work
from .fan_out import ask_live
from .instances import Instance, InstanceRegistry, ServedVersion
from .reports import merge_adapters, merge_stats


class _Unfinished:
    """The work of one request at one instance, counted in the instance's load from now until `end`."""

    def __init__(self, instance: Instance, request: GenerateRequest, max_model_len: int) -> None:
        self._instance = instance
        self._adapter = request.adapter
        self._prompt_tokens = self._num_prompt = request.known_tokens
        self._left = token_work(request, max_model_len)
        self._started = False
        instance.asked_tokens += self._left
        instance.load.add(request.adapter, self._prompt_tokens)

    def take(self, output: TokenOutput) -> int:
        """The tokens that were computed for an output: with the first one those of the prompt."""
        done = min(self._left, self._num_prompt + len(output.token_ids))
        self._num_prompt = 0
        self._left -= done
        self._instance.asked_tokens -= done
        if output.token_ids and not self._started:
            self._started = True
            self._instance.load.start(self._adapter, self._prompt_tokens)
        return done

    def end(self) -> None:
        """What is left is not to be done here."""
        self._instance.asked_tokens -= self._left
        self._instance.load.end(self._adapter, self._prompt_tokens, started=self._started)


class AdapterCalls(Protocol):
    """What decides which adapters are served: `FleetAdapters` here, or a link to the process where it is."""

    ranks: dict[str, int]

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> AdapterInfo: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo: ...


class FleetClient:
    """`EngineClient` over the instances of an `InstanceRegistry` (see `EngineClient` for its contract).

    When an instance ends, its unfinished requests go on at another one, from the token they had reached.
    adapters: who loads, unloads and pins them; its ranks are filled before the first request is routed.
    meter: counts each adapter's tokens, those of a prompt with its first output.  seed: of the seeds that
    requests without one get, so that their answers can go on elsewhere.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        router: Router,
        clock: Clock,
        adapters: AdapterCalls,
        meter: TokenMeter | None = None,
        seed: int | str = 0,
    ) -> None:
        self._seeds = random.Random(seed)
        self._instance_registry = instance_registry
        self._router = router
        self._clock = clock
        self._meter = meter
        self._adapters = adapters
        self._running: dict[str, ResumableRequest] = {}
        self._info: ModelInfo | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        limit = (await self.model_info()).max_model_len
        version = self._instance_registry.version(request.adapter)
        if request.adapter is not None and version is None:
            # Without any instance nobody knows what is loaded.
            self._instance_registry.candidates(None)
            raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")
        if request.request_id in self._running:
            raise ValueError(f"request_id {request.request_id!r} is already running")
        resumable = ResumableRequest(self._seeded(request), version, self._clock.now_s())
        self._running[request.request_id] = resumable
        left: Instance | None = None
        try:
            while not resumable.aborted:
                instance = self._next_instance(resumable)
                if left is not None:
                    left.num_resent += 1
                client = resumable.client = instance.client
                continued = self._continued(resumable)
                work = _Unfinished(instance, continued, limit)
                try:
                    outputs = cast("AsyncGenerator[TokenOutput, None]", client.generate(continued))
                    async with aclosing(outputs):
                        async for output in outputs:
                            done = work.take(output)
                            if self._meter is not None:
                                self._meter.add(request.adapter, done)
                            yield resumable.take(output)
                    return
                except EngineDeadError as error:
                    self._instance_registry.lose(instance, client)
                    resumable.lose(self._clock.now_s())
                    left = instance
                    if not resumable.aborted:
                        self._check_resend(resumable, instance, error)
                finally:
                    work.end()
            yield TokenOutput(request_id=request.request_id, token_ids=(), finish_reason="abort")
        finally:
            del self._running[request.request_id]

    def _seeded(self, request: GenerateRequest) -> GenerateRequest:
        sampling = request.sampling
        if sampling.greedy or sampling.seed is not None:
            return request
        return replace(request, sampling=replace(sampling, seed=self._seeds.getrandbits(63)))

    def _continued(self, resumable: ResumableRequest) -> GenerateRequest:
        served = self._instance_registry.served_version(resumable.request.adapter)
        known = served is not None and served.version == resumable.adapter_version
        return resumable.continued(served.content_hash if known and served is not None else None)

    def _next_instance(self, resumable: ResumableRequest) -> Instance:
        try:
            candidates = self._instance_registry.candidates(resumable.request.adapter)
        except EngineDeadError as error:
            if not resumable.num_resends:
                raise
            raise EngineDeadError(f"the LLM instance that computed this request ended; {error}") from error
        return self._router.choose(resumable.request, candidates)

    def _check_resend(self, resumable: ResumableRequest, instance: Instance, error: EngineDeadError) -> None:
        """Raises EngineDeadError if the request can't go on elsewhere."""
        where = f"instance {instance.name} ended while it computed this request"
        if resumable.num_resends > MAX_RESENDS:
            raise EngineDeadError(
                f"{where}, as {MAX_RESENDS} did before, so it is not tried again: {error}"
            ) from error
        adapter, begun = resumable.request.adapter, resumable.adapter_version
        version = self._instance_registry.version(adapter)
        # While a new version is being loaded some engines have it; what they began only they can go on with.
        replaced = version is not None and begun is not None and version > begun
        if adapter is not None and (version is None or (resumable.delivered and replaced)):
            raise EngineDeadError(
                f"{where}, and adapter {adapter!r} was {'unloaded' if version is None else 'replaced'} "
                "meanwhile, so that the answer can't go on with the version it began with"
            ) from error

    async def abort(self, request_id: str) -> None:
        resumable = self._running.get(request_id)
        if resumable is not None:
            resumable.aborted = True
            if resumable.client is not None:
                await resumable.client.abort(request_id)

    async def model_info(self) -> ModelInfo:
        """That of one instance; they are alike.  max_loras counts for each."""
        if self._info is None:
            info = (await ask_live(self._instance_registry, lambda client: client.model_info()))[0][1]
            self._adapters.ranks.update({one.name: one.lora_rank for one in await self.list_adapters()})
            self._info = info
        return self._info

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> AdapterInfo:
        assert version is content_hash is None, "the controller says which"
        return await self._adapters.load_adapter(name, path, replace)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload_adapter(name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        return await self._adapters.pin_adapter(name, pinned)

    async def list_adapters(self) -> list[AdapterInfo]:
        answers = await ask_live(self._instance_registry, lambda client: client.list_adapters())
        served = self._instance_registry.adapters
        infos = {info.name: info for info in merge_adapters(infos for _, infos in answers)}
        for name in served.keys() - infos.keys():
            infos[name] = _unavailable(name, served[name])
        for name in served.keys() & infos.keys():
            infos[name] = replace(infos[name], version=served[name].version)
        # Instances of a pool got them in different orders.
        return [infos[name] for name in (*served, *(infos.keys() - served.keys())) if name in infos]

    async def stats(self) -> EngineStats:
        answers = await ask_live(self._instance_registry, lambda client: client.stats())
        for instance, stats in answers:
            instance.latest = stats
        instances = self._instance_registry.instances
        past = [instance.past for instance in instances]
        return merge_stats([stats for _, stats in answers], past, map(_instance_stats, instances))

    async def is_alive(self) -> bool:
        return bool(self._instance_registry.live)

    async def close(self) -> None:
        """End all instances, those that are being restarted too."""
        await asyncio.gather(*(client.close() for client in self._instance_registry.close()))


def _unavailable(name: str, served: ServedVersion) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        version=served.version,
        lora_rank=0,
        nbytes=0,
        targets=(),
        path=served.path,
        residency="unavailable",
        content_hash=served.content_hash or "",
    )


def _instance_stats(instance: Instance) -> InstanceStats:
    return InstanceStats(
        index=instance.index,
        name=instance.name,
        live=instance.live,
        silent=instance.silent,
        num_running=instance.latest.num_running,
        num_waiting=instance.latest.num_waiting,
        kv_usage=instance.latest.kv_usage,
        outstanding_tokens=instance.outstanding_tokens,
        num_restarts=instance.num_restarts,
        num_resent=instance.num_resent,
        pool_adapters=instance.latest.pool_adapters,
        pool_bytes=instance.latest.pool_bytes,
    )
