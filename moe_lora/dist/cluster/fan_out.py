# SPDX-License-Identifier: Apache-2.0
"""One call to several instances at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from moe_lora.core.errors import EngineDeadError, EngineSilentError
from moe_lora.core.request import AdapterInfo
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.messages import PoolEntry

from .instances import Instance, InstanceRegistry

Answer = TypeVar("Answer")
Loaded = TypeVar("Loaded", AdapterInfo, PoolEntry)
Answers = tuple[list[tuple[Instance, Answer]], list[tuple[Instance, Exception]]]
"""Answers, and errors of instances that refused."""


async def ask(
    instance_registry: InstanceRegistry,
    instances: list[Instance],
    calls: Iterable[Awaitable[Answer]],
) -> Answers[Answer]:
    """Answers of these instances, and errors of instances that refused.

    calls: one of each instance's client.

    Dead instances leave routing and the result; silent instances only the result, since they may return.
    Raises EngineDeadError if no instance is left.
    """
    clients = [instance.client for instance in instances]
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[tuple[Instance, Answer]] = []
    errors: list[tuple[Instance, Exception]] = []
    for instance, client, result in zip(instances, clients, results, strict=True):
        if isinstance(result, EngineSilentError):
            continue
        if isinstance(result, EngineDeadError):
            instance_registry.lose(instance, client)
        elif isinstance(result, Exception):
            errors.append((instance, result))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append((instance, result))
    if not answers and not errors:
        instance_registry.having(None)
        raise EngineDeadError("the LLM instances that were asked ended meanwhile; send the request again")
    return answers, errors


async def ask_live(
    instance_registry: InstanceRegistry, call: Callable[[EngineClient], Awaitable[Answer]]
) -> list[tuple[Instance, Answer]]:
    """Each live instance's answer.  Raises the first refusal, EngineDeadError without a live instance."""
    live = instance_registry.having(None)
    answers, errors = await ask(instance_registry, live, [call(one.client) for one in live])
    for _, error in errors:
        raise error
    return answers


async def load_alike(
    instances: list[Instance], load: Callable[[list[Instance], str | None], Awaitable[Answers[Loaded]]]
) -> Answers[Loaded]:
    """Load an adapter on these instances: the first reads the content, the others must match.

    load: on some instances, with the required content hash.  As `ask` otherwise.
    """
    for number, first in enumerate(instances, 1):
        rest = instances[number:]
        try:
            answers, errors = await load([first], None)
        except EngineDeadError:
            if not rest:
                raise
            continue  # the next instance is first
        if errors or not rest:
            return answers, errors
        loaded = answers[0][1]
        info = loaded if isinstance(loaded, AdapterInfo) else loaded.info
        try:
            more, errors = await load(rest, info.content_hash or None)
        except EngineDeadError:  # no instance left: they hear at their return
            return answers, []
        return answers + more, errors
    raise AssertionError("an adapter is loaded somewhere")
