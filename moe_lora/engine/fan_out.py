"""One call to several instances at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moe_lora.core.errors import EngineDeadError, EngineSilentError

from .client import EngineClient
from .roster import Instance, Roster

Answer = TypeVar("Answer")


async def ask(
    roster: Roster, instances: list[Instance], call: Callable[[EngineClient], Awaitable[Answer]]
) -> tuple[list[tuple[Instance, Answer]], list[tuple[Instance, Exception]]]:
    """What these instances answered, and what those that refused raised.

    Those found dead are taken out of routing and left out, those that were silent only left out: until the
    last has answered they may be back.  Raises EngineDeadError if all were.
    """
    clients = [instance.client for instance in instances]
    results = await asyncio.gather(*map(call, clients), return_exceptions=True)
    answers: list[tuple[Instance, Answer]] = []
    errors: list[tuple[Instance, Exception]] = []
    for instance, client, result in zip(instances, clients, results, strict=True):
        if isinstance(result, EngineSilentError):
            continue
        if isinstance(result, EngineDeadError):
            roster.lose(instance, client)
        elif isinstance(result, Exception):
            errors.append((instance, result))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append((instance, result))
    if not answers and not errors:
        roster.candidates(None)
        raise EngineDeadError("the LLM instances that were asked ended meanwhile; send the request again")
    return answers, errors


async def ask_live(
    roster: Roster, call: Callable[[EngineClient], Awaitable[Answer]]
) -> list[tuple[Instance, Answer]]:
    """What each live instance answers.  Raises the first refusal, EngineDeadError if none is live."""
    answers, errors = await ask(roster, roster.candidates(None), call)
    for _, error in errors:
        raise error
    return answers
