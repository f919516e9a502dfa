# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one `EngineClient`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError, EngineSilentError
from moe_lora.core.request import (
    AdapterInfo,
    EngineStats,
    GenerateRequest,
    InstanceStats,
    ModelInfo,
    MoveStats,
    TokenOutput,
)
from moe_lora.policies.routing.routing import listeners

from .adapter_calls import ask_live
from .instances import Instance, InstanceRegistry, ServedVersion
from .reports import merge_adapters, merge_stats
from .resumable_request import MAX_RESENDS, Attempt, ResumableRequest
from .suspects import Trial

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig

    from .controller.routes import Routes
    from .migration import MoveKind, RequestMover

logger = logging.getLogger(__name__)

ABORT_S = 5.0
"""Limit for an aborted request's last output."""


_NO_MOVES = MoveStats(num_moved={"tokens": 0, "kv": 0})


class FleetClient:
    """`EngineClient` over the instances of an `InstanceRegistry`.

    At an instance's end, unfinished requests continue at another from the last token.  call: runs a verb of
    the controller.  seed: for unseeded requests, so that answers can continue elsewhere.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        routes: Routes,
        clock: Clock,
        call: Callable[..., Coroutine[Any, Any, Any]],
        seed: int | str = 0,
    ) -> None:
        self._seeds = random.Random(seed)
        self._instance_registry = instance_registry
        self._routes = routes
        self._router = routes.router
        self._clock = clock
        self._listeners = listeners(routes.router, routes.meter)
        self.call = call
        self._running: dict[str, ResumableRequest] = {}
        self._mover: RequestMover | None = None
        instance_registry.on_move = lambda order: self.mover.follow(order)
        instance_registry.on_unheard = self._leave
        instance_registry.on_drain = lambda instance: self.mover.move_off(instance)
        if routes.meter is not None:
            instance_registry.on_forget = routes.meter.forget
        self._info: ModelInfo | None = None

    @property
    def instances(self) -> list[Instance]:
        return self._instance_registry.instances

    @property
    def adapters(self) -> Mapping[str, ServedVersion]:
        """Served versions by name.  Raises EngineDeadError."""
        self._instance_registry.having(None)
        return self._instance_registry.adapters

    @property
    def mover(self) -> RequestMover:
        """Created for the first move."""
        if self._mover is None:
            from .migration import RequestMover

            self._mover = RequestMover(
                self._instance_registry,
                self._clock,
                self._running,
                self._next_instance,
                self._continued,
                self.model_info,
            )
        return self._mover

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        limit = (self._info or await self.model_info()).max_model_len
        resumable, suspects = self._add(request), self._instance_registry.suspects
        adapter, trial = request.adapter, None
        try:
            while not resumable.aborted:
                attempt, resumable.next = resumable.next, None
                if attempt is None:
                    if suspects.active:
                        instance, trial = await self._admit(resumable)
                        if instance is None:
                            break
                    else:
                        instance, trial = self._next_instance(resumable), None
                    again = self._continued(resumable) if resumable.epoch else resumable.request
                    attempt = Attempt(instance, again, limit)
                    if resumable.left is not None:
                        resumable.left.num_resent += 1
                assert attempt.first == len(resumable.delivered), "no token is lost or doubled"
                resumable.attempt, resumable.left = attempt, None
                try:
                    async for output in attempt.outputs():
                        if output.finish_reason == "abort" and resumable.next is not None:
                            break
                        attempt.take(output)
                        if attempt.held_s is not None:
                            self.mover.note_pause(attempt)
                        if adapter is not None and output.token_ids and not resumable.delivered:
                            suspects.proven.add(adapter)
                        if trial is not None and output.token_ids:
                            suspects.note_token(trial.adapter, trial)
                            trial = None
                        yield resumable.take(output)
                    else:
                        return
                except EngineDeadError as error:
                    await self._lose(resumable, attempt, error)
                finally:
                    if trial is not None:
                        suspects.release(trial)
                    await attempt.close()
                if resumable.next is not None:
                    resumable.switch(resumable.next)
            yield TokenOutput(request_id=request.request_id, token_ids=(), finish_reason="abort")
        except Exception:
            self._cancel(resumable)
            raise
        finally:
            del self._running[request.request_id]
            for listener in self._listeners:
                listener.stop(request.request_id, len(resumable.delivered))
            if resumable.move is not None or resumable.next is not None:
                await self._end_move(resumable)

    def _add(self, request: GenerateRequest) -> ResumableRequest:
        """Register a request; a sampled request gets a seed for its next instance."""
        served = self._instance_registry.served_version(request.adapter)
        if request.adapter is not None and served is None:
            self._instance_registry.candidates(None)  # raises without instances: then no version is known
            raise AdapterNotFoundError(f"adapter {request.adapter!r} is not loaded")
        if request.request_id in self._running:
            raise ValueError(f"request_id {request.request_id!r} is already running")
        sampling = request.sampling
        if sampling.seed is None and not sampling.greedy:
            request = replace(request, sampling=replace(sampling, seed=self._seeds.getrandbits(63)))
        version = None if served is None else served.version
        resumable = ResumableRequest(request, version, self._clock.now_s())
        self._running[request.request_id] = resumable
        for listener in self._listeners:
            listener.start(request.request_id, request, sampling.max_tokens)
        return resumable

    async def _lose(self, resumable: ResumableRequest, attempt: Attempt, error: EngineDeadError) -> None:
        """Record a death.  Raises EngineDeadError if no other can continue."""
        if not isinstance(error, EngineSilentError):  # a silent instance may return
            self._instance_registry.lose(attempt.instance, attempt.client)
        if resumable.move is not None:
            await resumable.move.settle()
        if resumable.next is None:
            resumable.lose(self._clock.now_s())
            resumable.left = attempt.instance
            if not resumable.aborted:
                self._check_resend(resumable, attempt.instance, error)

    def _cancel(self, resumable: ResumableRequest) -> None:
        if not resumable.delivered:
            for listener in self._listeners:
                listener.cancel(resumable.request.request_id)

    async def _admit(self, resumable: ResumableRequest) -> tuple[Instance | None, Trial | None]:
        """The next instance, after a suspect's wait; None after an abort."""
        suspects, adapter = self._instance_registry.suspects, resumable.request.adapter
        if adapter is None:
            return self._next_instance(resumable), None
        trial = await suspects.admit(adapter, lambda: resumable.aborted)
        instance = None
        try:
            if not resumable.aborted:
                instance = self._next_instance(resumable)
        finally:
            if instance is None and trial is not None:
                suspects.release(trial)
        if instance is not None and trial is not None:
            suspects.start(trial, instance.name)
        return instance, None if instance is None else trial

    async def _end_move(self, resumable: ResumableRequest) -> None:
        if resumable.move is not None:
            await resumable.move.settle()
        if resumable.next is not None:
            await resumable.next.close()

    async def move(self, request_id: str, target: str, kind: MoveKind = "tokens") -> None:
        await self.mover.move(request_id, target, kind)

    async def migrate(
        self, source: str, target: str, num_requests: int, kind: MoveKind = "tokens"
    ) -> tuple[int, list[str]]:
        return await self.mover.migrate(source, target, num_requests, kind)

    def _leave(self, instance: Instance) -> None:
        """Continue requests of an instance without beats elsewhere, if possible."""
        for resumable in self._running.values():
            attempt = resumable.attempt
            if attempt is None or attempt.instance is not instance or attempt.given_up:
                continue
            if resumable.num_resends >= MAX_RESENDS:
                continue
            error = EngineSilentError(f"instance {instance.name} sends no beats")
            try:
                self._instance_registry.candidates(resumable.request.adapter)
                self._check_resend(resumable, instance, error)
            except EngineDeadError:
                continue  # only this instance can continue the request
            attempt.lose(error)

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
        """Raises EngineDeadError if the request can't continue elsewhere."""
        where = f"instance {instance.name} ended while it computed this request"
        if resumable.num_resends > MAX_RESENDS:
            raise EngineDeadError(
                f"{where}, as {MAX_RESENDS} did before, so it is not tried again: {error}"
            ) from error
        adapter, begun = resumable.request.adapter, resumable.adapter_version
        version = self._instance_registry.version(adapter)
        # During a load, only engines with the answer's version can continue.
        replaced = version is not None and begun is not None and version > begun
        must_end = resumable.delivered and replaced and not resumable.switches
        if adapter is not None and (version is None or must_end):
            raise EngineDeadError(
                f"{where}, and adapter {adapter!r} was {'unloaded' if version is None else 'replaced'} "
                "meanwhile, so that the answer can't go on with the version it began with"
            ) from error

    async def abort(self, request_id: str) -> None:
        resumable = self._running.get(request_id)
        if resumable is not None:
            resumable.aborted = True
            if self._instance_registry.suspects:
                self._instance_registry.suspects.wake()
            attempt = resumable.attempt
            if attempt is not None:
                await attempt.abort()
                asyncio.get_running_loop().call_later(ABORT_S, self._end_aborted, resumable, attempt)
            await self._end_move(resumable)

    def _end_aborted(self, resumable: ResumableRequest, attempt: Attempt) -> None:
        is_running = self._running.get(resumable.request.request_id) is resumable
        if is_running and resumable.attempt is attempt:
            attempt.leave()

    async def model_info(self) -> ModelInfo:
        """Of the first instance that answers."""
        if self._info is None:
            info = (await ask_live(self._instance_registry, lambda client: client.model_info()))[0][1]
            self._routes.ranks.update({one.name: one.lora_rank for one in await self.list_adapters()})
            self._info = info
        return self._info

    async def is_served(self, name: str) -> bool:
        return self._instance_registry.served_version(name) is not None

    def is_refused(self, name: str) -> bool:
        """True after deaths with the adapter, until a load replaces the adapter."""
        suspects = self._instance_registry.suspects
        return suspects.active and suspects.problem(name) is not None

    async def list_adapters(self) -> list[AdapterInfo]:
        answers = await ask_live(self._instance_registry, lambda client: client.list_adapters())
        served = self._instance_registry.adapters
        infos = {info.name: info for info in merge_adapters(infos for _, infos in answers)}
        for name in served.keys() - infos.keys():
            problem = self._instance_registry.problem(name)
            infos[name] = replace(_unavailable(name, served[name]), problem=problem)
        for name in served.keys() & infos.keys():
            if infos[name].version != served[name].version:
                infos[name] = replace(infos[name], version=served[name].version)
        for name, problem in self._instance_registry.suspects.refused.items():
            if name in infos:
                infos[name] = replace(infos[name], residency="unavailable", problem=problem)
        # A pool's instances have different orders.
        return [infos[name] for name in (*served, *(infos.keys() - served.keys())) if name in infos]

    async def stats(self) -> EngineStats:
        answers = await ask_live(self._instance_registry, lambda client: client.stats())
        for instance, stats in answers:
            instance.latest = stats
        instances = self._instance_registry.instances
        past = [self._instance_registry.past, *(instance.past for instance in instances)]
        drained = self._instance_registry.drained
        each = [_instance_stats(instance, instance.name in drained) for instance in instances]
        merged = merge_stats([stats for _, stats in answers], past, each)
        routing = next((one.stats for one in self._listeners if one.stats is not None), None)
        moves = _NO_MOVES if self._mover is None else self._mover.stats()
        return replace(merged, moves=moves, routing=routing)

    async def is_alive(self) -> bool:
        """True if an instance is in routing."""
        return bool(self._instance_registry.live)

    async def close(self) -> None:
        """Close all instances, even during a restart."""
        await asyncio.gather(*(client.close() for client in self._instance_registry.close()))


def make_client(
    cluster: ClusterConfig,
    instance_registry: InstanceRegistry,
    routes: Routes,
    call: Callable[..., Coroutine[Any, Any, Any]],
    name: str = "",
) -> FleetClient:
    """A front end's client."""
    kind = FleetClient
    if cluster.has_resolver:
        from .resolving import ResolvingClient

        kind = ResolvingClient
    elif cluster.front_end.prefill_instances:
        from .prefill_first import PrefillFirstClient

        kind = PrefillFirstClient
    return kind(instance_registry, routes, WallClock(), call, seed=f"{name} {cluster.engine.seed}")


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


def _instance_stats(instance: Instance, drained: bool) -> InstanceStats:
    return InstanceStats(
        index=instance.index,
        name=instance.name,
        live=instance.live,
        silent=instance.silent,
        drained=drained,
        num_running=instance.latest.num_running,
        num_waiting=instance.latest.num_waiting,
        kv_usage=instance.latest.kv_usage,
        outstanding_tokens=instance.outstanding_tokens,
        num_restarts=instance.num_restarts,
        num_resent=instance.num_resent,
        pool_adapters=instance.latest.pool_adapters,
        pool_bytes=instance.latest.pool_bytes,
        device_bytes=instance.latest.device_bytes,
        devices=instance.devices,
    )
