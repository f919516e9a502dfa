# SPDX-License-Identifier: Apache-2.0
"""Moves a running request between instances, without a gap in the stream.

The target gets the request and the answer so far, held: it loads the adapter, allocates pages and computes
all tokens but the last, while the source decodes.  Then the source holds the request between two steps and
returns the new tokens, and the target resumes with them.  Until the target's acknowledgement the source
resumes after any error.  Source: dLoRA section 5.2 (migration as a transfer of tokens); the two phases are
ours.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from anyio import current_time, fail_after

from moe_lora.core.clock import Clock
from moe_lora.core.errors import EngineDeadError, MoeLoraError, MoveError
from moe_lora.core.request import PAUSE_BUCKETS_S, GenerateRequest, ModelInfo, MoveStats
from moe_lora.engine.client.messages import HeldRequest, KvWindow, Move

from .instances import Instance, InstanceRegistry
from .resumable_request import Attempt, ResumableRequest

logger = logging.getLogger(__name__)

MoveKind = Literal["tokens", "kv"]
MOVES_AT_ONCE = 4
READY_S = 30.0
"""Limit for a target's adapter, pages and prompt."""
ACK_S = 5.0
"""Limit for each wait of a held request."""


class MoveTask:
    """A running move.  final: the target was told to resume."""

    def __init__(self, work: Coroutine[Any, Any, None], target: Instance) -> None:
        self.final = False
        self.target: Instance | None = target
        self.task = asyncio.create_task(work)

    async def settle(self) -> None:
        """Cancel a move before its `final` step, and await its end."""
        if not self.final:
            self.task.cancel()
        await asyncio.wait([self.task])


class RequestMover:
    """Moves requests of one front end.

    A pause lasts from the hold order to the target's first token.  continued: the latest epoch's request.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        clock: Clock,
        running: Mapping[str, ResumableRequest],
        next_instance: Callable[[ResumableRequest], Instance],
        continued: Callable[[ResumableRequest], GenerateRequest],
        model_info: Callable[[], Coroutine[Any, Any, ModelInfo]],
    ) -> None:
        self._instance_registry = instance_registry
        self._clock = clock
        self._running = running
        self._next_instance = next_instance
        self._continued = continued
        self._model_info = model_info
        self._places = asyncio.Semaphore(MOVES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[Attempt] = set()
        self.num_moved: dict[str, int] = {"tokens": 0, "kv": 0}
        self.num_failed = 0
        self.pause_counts = [0] * (len(PAUSE_BUCKETS_S) + 1)
        self.pause_s = 0.0

    def note_pause(self, attempt: Attempt) -> None:
        """Count a move's pause at the target's first output."""
        assert attempt.held_s is not None
        pause_s, attempt.held_s = self._clock.now_s() - attempt.held_s, None
        self.num_moved[attempt.kind] += 1
        self.pause_counts[bisect_left(PAUSE_BUCKETS_S, pause_s)] += 1
        self.pause_s += pause_s

    def stats(self) -> MoveStats:
        return MoveStats(
            num_moved=dict(self.num_moved),
            num_failed=self.num_failed,
            pause_counts=tuple(self.pause_counts),
            pause_s=self.pause_s,
        )

    async def move(self, request_id: str, target: str, kind: MoveKind = "tokens") -> None:
        """Move a request to this instance.  Raises MoveError; the source then resumes."""
        resumable = self._running.get(request_id)
        if resumable is None:
            raise MoveError(f"request {request_id!r} is not running")
        limit = (await self._model_info()).max_model_len
        source = resumable.attempt
        if source is None or resumable.next is not None or resumable.move is not None:
            raise MoveError(f"request {request_id!r} is between two instances; it can be moved later")
        instance = self._target(resumable, source, target)
        resumable.epoch += 1
        again = replace(self._continued(resumable), held=True, awaits_kv=kind == "kv")
        begin = partial(Attempt, instance, again, limit)
        move = resumable.move = MoveTask(self._carry_out(resumable, source, begin), instance)
        try:
            await asyncio.shield(move.task)
        except asyncio.CancelledError:
            if not move.task.cancelled():
                raise
            raise MoveError(f"request {request_id!r} ended while it was moved to {target}") from None
        except (MoeLoraError, ValueError, TimeoutError) as error:
            reason = str(error) or "it took too long"
            raise MoveError(f"request {request_id!r} could not be moved to {target}: {reason}") from error

    async def migrate(
        self, source: str, target: str, num_requests: int, kind: MoveKind
    ) -> tuple[int, list[str]]:
        """Move up to num_requests, without a token first; returns the number and the problems."""
        found = [(one, self._running[one].attempt) for one in self.requests_at(source)[:num_requests]]
        problems = await asyncio.gather(
            *(self._try_move(one, attempt, target, kind) for one, attempt in found)
        )
        return problems.count(None), [problem for problem in problems if problem is not None]

    def move_off(self, instance: Instance) -> None:
        """Move a drained instance's requests, and stop moves to it."""
        for move in [one.move for one in self._running.values() if one.move is not None]:
            if move.target is instance and not move.final:
                move.target = None  # one cancel: the second would cut the first's clean-up
                move.task.cancel()
        for name in self.requests_at(instance.name):
            attempt = self._running[name].attempt
            if attempt is not None and attempt not in self._leaving:
                self._leaving.add(attempt)
                self._in_background(self._move_one_off(name, attempt))

    def move_ahead(self, resumable: ResumableRequest, attempt: Attempt) -> None:
        """As `move_on` at the first token, with KV that leaves before."""
        attempt.first_token = asyncio.Event()
        self._in_background(self._move_kept(resumable, attempt))

    def move_on(self, resumable: ResumableRequest, attempt: Attempt) -> None:
        """Move a kept request in the background, with one retry."""
        attempt.kept_s = self._clock.now_s()
        if attempt.first_token is None:
            self._in_background(self._move_kept(resumable, attempt))
            return
        attempt.first_token.set()
        if attempt.limit is not None:
            attempt.limit.deadline = current_time() + ACK_S

    async def _move_kept(self, resumable: ResumableRequest, attempt: Attempt) -> None:
        name = resumable.request.request_id
        problem = await self._try_move(name, attempt, None, "kv")
        is_kept, attempt.first_token, attempt.kept_s = attempt.kept_s is not None, None, None
        if not is_kept:  # the first token moves the request
            logger.info(problem)
        elif problem is not None and self._running.get(name) is resumable and not resumable.aborted:
            logger.warning(problem)
            if resumable.move is None and resumable.next is None:  # else another move resumes the request
                self.resume(attempt)
            await self._move_or_log(name, attempt, None, "kv")

    def follow(self, order: Move) -> None:
        """Carry out a controller's order."""
        for name, resumable in self._running.items():
            attempt = resumable.attempt
            if attempt is not None and attempt.request.request_id == order.request_id:
                kind: MoveKind = "kv" if order.kind == "kv" else "tokens"
                self._in_background(self._move_or_log(name, attempt, order.target, kind))

    async def _try_move(
        self, request_id: str, attempt: Attempt | None, target: str | None, kind: MoveKind
    ) -> str | None:
        """Returns the problem, if any.  target None: the router chooses."""
        is_prompt = attempt is not None and (attempt.first_token or attempt.kept_s) is not None
        async with nullcontext() if is_prompt else self._places:
            resumable = self._running.get(request_id)
            if resumable is not None and resumable.attempt is not attempt:
                return f"request {request_id!r} has left the instance from which it was to be moved"
            try:
                if target is None and resumable is not None:
                    target = self._next_instance(resumable).name
                await self.move(request_id, target or "", kind)
            except (MoveError, EngineDeadError) as error:
                return str(error)
            return None

    async def _move_one_off(self, name: str, attempt: Attempt) -> None:
        try:
            await self._move_or_log(name, attempt, None, "tokens")
        finally:
            self._leaving.discard(attempt)

    async def _move_or_log(
        self, name: str, attempt: Attempt | None, target: str | None, kind: MoveKind
    ) -> None:
        problem = await self._try_move(name, attempt, target, kind)
        if problem is not None:
            logger.info(problem)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def requests_at(self, instance: str) -> list[str]:
        """Ids of the instance's requests, without a token first."""
        found = [
            (bool(one.delivered), request_id)
            for request_id, one in self._running.items()
            if one.attempt is not None and one.attempt.instance.name == instance
        ]
        return [request_id for _, request_id in sorted(found, key=lambda one: one[0])]

    def _target(self, resumable: ResumableRequest, source: Attempt, target: str) -> Instance:
        candidates = self._instance_registry.candidates(resumable.request.adapter)
        for instance in candidates:
            if instance.name == target and instance is not source.instance:
                return instance
        here = source.instance
        names = ", ".join(one.name for one in candidates if one is not here) or "none"
        raise MoveError(f"a request of {here.name} can't be moved to {target!r}; choose one of {names}")

    async def _carry_out(
        self, resumable: ResumableRequest, source: Attempt, begin: Callable[[], Attempt]
    ) -> None:
        target = begin()  # here: a task cancelled before its start closes no target
        try:
            target.begun_s = self._clock.now_s()
            with fail_after(READY_S if source.kept_s is None else ACK_S) as source.limit:
                ready = await anext(target.outputs())
            if ready.finish_reason is not None:
                raise MoveError(ready.error or "the target ended it")
            with fail_after(READY_S if source.kept_s is None else ACK_S) as source.limit:
                window = await self._send_kv(source, target) if target.request.awaits_kv else None
            if source.first_token is not None:  # prompts take long: the target may have left
                self._target(resumable, source, target.instance.name)
            await self._hand_over(resumable, source, target, ready.adapter_version, window)
        except BaseException as error:
            if source.first_token is None or source.kept_s is not None:  # else no hold to undo
                self.resume(source)
            try:
                self.num_failed += await self._has_failed(resumable, source, target, error)
            finally:
                await target.close()
            raise
        finally:
            resumable.move = None
        source.leave()

    async def _has_failed(
        self, resumable: ResumableRequest, source: Attempt, target: Attempt, error: BaseException
    ) -> bool:
        """False for an early move that was cancelled or gave way."""
        if source.first_token is None or (resumable.move is not None and resumable.move.final):
            return True
        if isinstance(error, asyncio.CancelledError):
            return not (source.instance.live and target.instance.live)
        with suppress(MoeLoraError, TimeoutError), fail_after(ACK_S):
            return await target.call("kv_window") is not None
        return True

    async def _send_kv(self, source: Attempt, target: Attempt) -> KvWindow | None:
        """Have a computing source put KV into the target's window, if any."""
        window: KvWindow | None = await target.call("kv_window")
        first_token = source.first_token
        if window is None:  # the pages went elsewhere, or the instance takes no KV
            if first_token is not None and source.kept_s is None:
                raise MoveError("the target has no room for the prompt's KV")
            target.kind = "tokens"
        elif source.kept_s is None:
            if source.limit is not None and first_token is not None:
                source.limit.deadline = math.inf  # until the first token
            await source.call("kv_send", window, first_token is not None)
            if first_token is not None:
                await first_token.wait()
        return window

    async def _hand_over(
        self,
        resumable: ResumableRequest,
        source: Attempt,
        target: Attempt,
        adapter_version: int | None,
        window: KvWindow | None,
    ) -> None:
        move = resumable.move
        assert move is not None
        held_s = source.kept_s or self._clock.now_s()
        known = tuple(resumable.delivered[target.first :])
        with fail_after(ACK_S):
            held: HeldRequest = await source.call("hold_request", target.first + len(known), window)
        if held.adapter_version != adapter_version:
            raise MoveError("the target has another version of its adapter")
        move.final = True
        tokens = known + held.tokens
        rest = tokens, held.sent.num_tokens, held.sent.first_page, held.unshared
        with fail_after(ACK_S):
            await target.call("resume_request", *rest)
        target.first += len(tokens)
        target.held_s, target.timing_before = held_s, held.timing
        resumable.next = target

    def resume(self, source: Attempt) -> None:
        """Resume a held request at its instance, in the background."""

        async def resume() -> None:
            with suppress(MoeLoraError, ValueError):  # the source or the request has ended
                await source.call("resume_request", (), 0, 0, False)

        self._in_background(resume())
