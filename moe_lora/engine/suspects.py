# SPDX-License-Identifier: Apache-2.0
"""Reruns a failed CPU step in parts: an adapter's error ends only its requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.scheduling.views import Scheduled

from . import sequence

logger = logging.getLogger(__name__)
Item = Scheduled[sequence.Sequence]


@dataclass
class Found:
    """num_done: successful parts.  adapters, requests: failed, with errors."""

    num_done: int = 0

    adapters: list[tuple[AdapterVersion, Exception]] = field(default_factory=list)
    requests: list[tuple[sequence.Sequence, Exception]] = field(default_factory=list)


def run_apart(
    plan: Iterable[Item], error: Exception, runner: ModelRunner, complete: Callable[[Sequence[Item]], None]
) -> Found:
    """Run each adapter's items, and each request of the base model, alone.

    complete: computes items.  Raises `error` if no part succeeds and a row of padding fails too.
    """
    parts: dict[object, list[Item]] = {}
    for item in plan:
        parts.setdefault(item.sequence.adapter or item.sequence, []).append(item)
    logger.error(
        "a step of %d requests failed; its adapters run one by one",
        sum(map(len, parts.values())),
        exc_info=error,
    )
    found = Found()
    error = runner.abandon(error)
    for part in parts.values():
        try:
            complete(part)
            found.num_done += 1
        except Exception as problem:
            if not runner.can_repeat(problem):
                raise
            cause, first = runner.abandon(problem), part[0].sequence
            if first.adapter is None:
                found.requests.append((first, cause))
            else:
                found.adapters.append((first.adapter, cause))
    if not found.num_done:
        try:
            runner.probe()
        except Exception:
            raise error from None
    return found
