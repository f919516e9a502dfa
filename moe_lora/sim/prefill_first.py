# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances, in both simulators: with its first token a request moves.

As `dist.cluster.prefill_first`: a prompt waits for prompt instances, however full.  After the first token the
request keeps pages, adapter and seat there until a target, chosen by the router, admits the request between
two steps; the KV comes, and the answer goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_lora.core.errors import ConfigError
from moe_lora.policies.routing.routing import Router
from moe_lora.timing.host_times import LinkTime

from .events import EventQueue

MOVE_READY_S = 5.0
"""Limit for a target's adapter and pages (`dist.cluster.migration.ACK_S`)."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """The first num_instances compute prompts, the others answers.

    kv_token_bytes: per token.  link_bytes_per_s: from each prompt instance.
    """

    num_instances: int
    kv_token_bytes: float
    link_bytes_per_s: float

    def check(self, num_instances: int) -> None:
        """Raise ConfigError without an instance of each kind."""
        if not 0 < self.num_instances < num_instances:
            raise ConfigError(
                f"{self.num_instances} of {num_instances} instances compute prompts; choose 1 to "
                f"{num_instances - 1}"
            )


class PrefillFirst:
    """Moves between instances; one transfer at a time leaves an instance.

    A target not ready within MOVE_READY_S loses the request: the answer goes on at the source.
    """

    def __init__(
        self, config: PrefillConfig, events: EventQueue, router: Router, instances: Sequence[Any]
    ) -> None:
        config.check(len(instances))
        self.for_prompts = instances[: config.num_instances]
        self.num_moved = self.num_failed = 0
        self._for_answers = instances[config.num_instances :]
        self._events, self._router = events, router
        self._token_bytes, self._link = config.kv_token_bytes, LinkTime(config.link_bytes_per_s)
        self._free_s = [-math.inf] * config.num_instances
        for instance in self.for_prompts:
            instance.on_first_token = partial(self._move, instance)

    def _move(self, source: Any, request: Any) -> None:
        target = self._router.choose(request, self._for_answers)
        moved = target.receive(request, partial(self._send, source, request, target))
        limit_s = self._events.now_s() + MOVE_READY_S
        self._events.at(limit_s, partial(self._give_up, source, request, target, moved))

    def _send(self, source: Any, request: Any, target: Any, moved: Any, takes_kv: bool) -> None:
        num_kv = request.num_computed if takes_kv else 0
        start_s = max(self._free_s[source.index], self._events.now_s())
        end_s = self._free_s[source.index] = start_s + self._link.seconds(num_kv * self._token_bytes)
        self._events.at(end_s, partial(self._hand_over, source, request, target, moved, num_kv))

    def _hand_over(self, source: Any, request: Any, target: Any, moved: Any, num_kv: int) -> None:
        self.num_moved += 1
        source.release(request)
        target.start_received(moved, num_kv)

    def _give_up(self, source: Any, request: Any, target: Any, moved: Any) -> None:
        if target.remove(moved):
            self.num_failed += 1
            source.resume(request)
