"""Adapters loaded, unloaded and pinned on every instance, or on none."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

from moe_lora.core.errors import AdapterError, AdapterExistsError, AdapterNotFoundError
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.cluster.pool.pool import FleetPool
from moe_lora.engine.client.client import EngineClient

from .fan_out import Answers, ask, load_alike
from .instances import Instance, InstanceRegistry, ServedVersion
from .reports import merge_adapters

logger = logging.getLogger(__name__)


async def load_everywhere(
    instance_registry: InstanceRegistry, name: str, path: str, *, replace: bool, pool: FleetPool | None = None
) -> AdapterInfo:
    """Serve the directory as `name` on all live instances; those that come back later load it too.

    The content is what the first of them finds.  If one refuses, be it that it finds other content, the
    others go back to what they served before.  Calls for one name must come one after the other.  pool: what
    has some of them hold it; None: all do.
    """
    with instance_registry.loading():
        previous = instance_registry.adapters.get(name)
        if previous is not None and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} is already loaded; unload it first or load it in place"
            )
        instances, version = instance_registry.candidates(None), instance_registry.next_version(name)
        if pool is None:

            async def load(some: list[Instance], content: str | None) -> Answers[AdapterInfo]:
                words: Any = {"replace": replace, "version": version, "content_hash": content}
                return await ask(
                    instance_registry, some, lambda client: client.load_adapter(name, path, **words)
                )

            answers, errors = await load_alike(instances, load)
        else:
            answers, errors = await pool.load(instances, name, path, replace=replace, version=version)
        if errors:
            await _take_back(instance_registry, [instance for instance, _ in answers], name, previous, pool)
            raise _refusal(name, answers, errors)
        for instance, _ in answers:
            instance.missing.discard(name)
        instance_registry.serve(answers[0][1], path)
        return answers[0][1]


async def unload_everywhere(
    instance_registry: InstanceRegistry, name: str, pool: FleetPool | None = None
) -> None:
    """Refuse new requests for `name` everywhere; returns when the last instance has freed it.

    Raises AdapterNotFoundError if no instance knows the name.
    """
    instance_registry.candidates(None)
    instance_registry.forget(name)
    # Asked anew: one that came in before it was forgotten came with it.
    instances = instance_registry.candidates(None)
    if pool is not None:
        pool.forget(name)
    answers, errors = await ask(instance_registry, instances, lambda client: client.unload_adapter(name))
    if pool is not None:
        await pool.sweep()
    for _, error in errors:
        if not answers or not isinstance(error, AdapterNotFoundError):
            raise error


async def pin_everywhere(instance_registry: InstanceRegistry, name: str, *, pinned: bool) -> AdapterInfo:
    """Pin or unpin an adapter on all live instances; those that come back later do so too.

    If one instance refuses, the others go back to what was.  Raises AdapterNotFoundError for an unknown name.
    """
    with instance_registry.loading():
        served = instance_registry.adapters.get(name)
        if served is None:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")
        answers, errors = await ask(
            instance_registry,
            instance_registry.candidates(name),
            lambda client: client.pin_adapter(name, pinned=pinned),
        )
        if errors:
            if served.pinned != pinned and answers:
                before = [instance for instance, _ in answers]
                await ask(
                    instance_registry, before, lambda client: client.pin_adapter(name, pinned=served.pinned)
                )
            raise errors[0][1]
        instance_registry.pin(name, pinned=pinned)
        return merge_adapters([info] for _, info in answers)[0]


async def _take_back(
    instance_registry: InstanceRegistry,
    instances: list[Instance],
    name: str,
    previous: ServedVersion | None,
    pool: FleetPool | None,
) -> None:
    """Undo a load; an instance where that fails gets no more requests for the adapter."""

    def undo(client: EngineClient) -> Awaitable[AdapterInfo | None]:
        if previous is None:
            return client.unload_adapter(name)
        words: Any = {"version": previous.version, "content_hash": previous.content_hash}
        return client.load_adapter(name, previous.path, replace=True, **words)

    if not instances:
        return
    if pool is None:
        _, errors = await ask(instance_registry, instances, undo)
    else:
        errors = await pool.take_back(instances, name, previous)
    for instance, error in errors:
        logger.error("instance %s can't go back to what it served as %s: %r", instance.name, name, error)
        instance.missing.add(name)


def _refusal(
    name: str, answers: list[tuple[Instance, AdapterInfo]], errors: list[tuple[Instance, Exception]]
) -> Exception:
    instance, error = errors[0]
    if not answers:
        return error
    return AdapterError(
        f"instance {instance.name} refused adapter {name!r}, so the others took it back: {error}"
    )
