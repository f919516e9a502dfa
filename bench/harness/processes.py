# SPDX-License-Identifier: Apache-2.0
"""Instances and LoRA Servers in processes of this host, for callers of any thread and event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.launch.local import local_instances, local_lora_server
from moe_lora.dist.net.thread import LoopThread
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.routing.routing import Router

T = TypeVar("T")


@contextmanager
def engine_processes(
    config: EngineConfig, front_end: FrontEndConfig | None = None, router: Router | None = None
) -> Iterator[EngineClient]:
    """`local_instances` for callers of any thread and event loop."""
    cluster = _instances_only(config, front_end or FrontEndConfig())
    with entered(lambda: local_instances(cluster, router=router)) as (controlled, thread):
        yield cast("EngineClient", ThreadedClient(controlled.fleet, thread))


@contextmanager
def instance_processes(config: EngineConfig) -> Iterator[list[EngineClient]]:
    """The separate engines of `local_instances`, for callers of any thread and event loop."""
    cluster = _instances_only(config, FrontEndConfig())
    with entered(lambda: local_instances(cluster)) as (controlled, thread):
        instances = controlled.instance_registry.instances
        yield [cast("EngineClient", ThreadedClient(one.client, thread)) for one in instances]


@contextmanager
def lora_server_processes(config: EngineConfig, server: LoraServerConfig | None) -> Iterator[EngineConfig]:
    """`local_lora_server` for callers of any thread; yields settings of an engine with the server."""
    cluster = replace(_instances_only(config, FrontEndConfig()), lora_server=server)
    with entered(lambda: local_lora_server(cluster)) as (joined, _):
        yield joined.instance()


def _instances_only(config: EngineConfig, front_end: FrontEndConfig) -> ClusterConfig:
    """A cluster without HTTP."""
    return ClusterConfig(
        engine=replace(config, lora_server=None),
        served_model_name=config.model_dir,
        lora_server=config.lora_server,
        front_end=front_end,
    )


class ThreadedClient:
    """`EngineClient` whose calls run in the event loop of `thread`, where `client` belongs."""

    def __init__(self, client: EngineClient, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **keywords: Any) -> Any:
            work = getattr(self._client, name)(*args, **keywords)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._thread.loop))

        return call

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[TokenOutput | BaseException | None] = asyncio.Queue()

        def put(item: TokenOutput | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        async def collect() -> None:
            try:
                async for output in self._client.generate(request):
                    put(output)
                put(None)
            except BaseException as error:
                put(error)

        collecting = asyncio.run_coroutine_threadsafe(collect(), self._thread.loop)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            collecting.cancel()


@contextmanager
def entered(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[tuple[T, LoopThread]]:
    """Value of an asynchronous context, and the thread of its event loop."""
    thread = LoopThread()
    try:
        over = asyncio.Event()
        inside: Future[T] = Future()

        async def stay() -> None:
            try:
                async with make() as found:
                    inside.set_result(found)
                    await over.wait()
            except BaseException as error:
                if inside.done():
                    raise
                inside.set_exception(error)

        staying = asyncio.run_coroutine_threadsafe(stay(), thread.loop)
        try:
            yield inside.result(), thread
        finally:
            thread.loop.call_soon_threadsafe(over.set)
            staying.result()
    finally:
        thread.stop()
