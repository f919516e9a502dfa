# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances, in both simulators: with its first token a request moves.

As `dist.cluster.prefill_first`.  After the first of several steps of a prompt, a target chosen by the router
has the adapter and pages; KV of each step leaves beside later steps.  After the first token the request keeps
pages, adapter and seat until the rest of its KV has left.  After a failed move the source decodes, and the
answer moves once more.  A prompt waits for prompt instances, however full.
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
"""Limit after the first token for a target's adapter and pages (`dist.cluster.migration.ACK_S`)."""
RETRY_READY_S = 30.0
"""The same of a second move (`READY_S`)."""
RETRIES_AT_ONCE = 4
"""As `MOVES_AT_ONCE`."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """The first num_instances compute prompts, the others answers.

    kv_token_bytes: per token.  link_bytes_per_s: of each instance, to or from the others.
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


@dataclass(slots=True, eq=False)
class _Move:
    """moved: the request at the target.  num_done, num_sent: tokens with KV, and on the link."""

    source: Any
    request: Any
    target: Any
    moved: Any = None
    num_done: int = 0
    num_sent: int = 0
    is_ready: bool = False
    takes_kv: bool = False
    has_token: bool = False


class PrefillFirst:
    """Moves between instances; an instance sends or receives one transfer at a time.

    A target not ready within MOVE_READY_S loses the request.  A target without a seat to spare holds no
    unfinished prompt.  In a second move the source decodes until the target is ready; all KV leaves then.
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
        self._free_s = [-math.inf] * len(instances)
        self._early: dict[Any, _Move | None] = {}
        """Of unfinished prompts after a step; None: the target had no seat to spare."""
        self._failed: dict[Any, Any] = {}
        """Requests before a second move -> sources."""
        self._retries: dict[Any, _Move] = {}
        for instance in self.for_prompts:
            instance.on_prompt_step = partial(self._send_early, instance)
            instance.on_first_token = partial(self._move, instance)

    def _send_early(self, source: Any, request: Any) -> None:
        if request not in self._early:
            target = self._router.choose(request, self._for_answers)
            has_seat = target.has_spare_seat
            self._early[request] = self._start(_Move(source, request, target)) if has_seat else None
        move = self._early[request]
        if move is not None:
            move.num_done = request.num_computed
            self._send(move)

    def _move(self, source: Any, request: Any) -> None:
        move = self._early.pop(request, None)
        if move is None:
            move = self._start(_Move(source, request, self._router.choose(request, self._for_answers)))
        self._send_rest(move)
        self._events.at(self._events.now_s() + MOVE_READY_S, partial(self._give_up, move))

    def _start(self, move: _Move) -> _Move:
        move.moved = move.target.receive(move.request, partial(self._set_ready, move))
        return move

    def _set_ready(self, move: _Move, moved: Any, takes_kv: bool) -> None:
        move.moved, move.is_ready, move.takes_kv = moved, True, takes_kv
        if self._retries.get(move.request) is move:
            move.source.hold(move.request, partial(self._send_rest, move))
        else:
            self._send(move)

    def _send_rest(self, move: _Move) -> None:
        move.num_done, move.has_token = move.request.num_computed, True
        self._send(move)

    def _send(self, move: _Move) -> None:
        num_new = max(0, move.num_done - move.num_sent) if move.takes_kv else 0
        if not move.is_ready or not (num_new or move.has_token):
            return
        source, target = move.source.index, move.target.index
        start_s = max(self._free_s[source], self._free_s[target], self._events.now_s())
        end_s = start_s + self._link.seconds(num_new * self._token_bytes)
        self._free_s[source] = self._free_s[target] = end_s
        move.num_sent += num_new
        if move.has_token:
            self._events.at(end_s, partial(self._hand_over, move))

    def _hand_over(self, move: _Move) -> None:
        self.num_moved += 1
        move.source.release(move.request)
        move.target.start_received(move.moved, move.num_sent, move.request)
        self._retries.pop(move.request, None)
        self._retry()

    def _give_up(self, move: _Move) -> None:
        if move.target.remove(move.moved):
            self.num_failed += 1
            if self._retries.pop(move.request, None) is None:
                move.source.resume(move.request)
                self._failed[move.request] = move.source
            self._retry()

    def _retry(self) -> None:
        while self._failed and len(self._retries) < RETRIES_AT_ONCE:
            request, source = next(iter(self._failed.items()))
            del self._failed[request]
            move = _Move(source, request, self._router.choose(request, self._for_answers))
            self._retries[request] = move  # the target may be ready at once
            self._start(move)
            self._events.at(self._events.now_s() + RETRY_READY_S, partial(self._give_up, move))

    def end(self, request: Any) -> None:
        """An answer is over: a second move, if any, has no effect."""
        self._failed.pop(request, None)
        move = self._retries.pop(request, None)
        if move is not None:
            move.target.remove(move.moved, is_ready=True)
            self._retry()
