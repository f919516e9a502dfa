# SPDX-License-Identifier: Apache-2.0
"""An instance's health: out of routing while silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import EngineDeadError, EngineSilentError

from .instances import Instance, InstanceRegistry

if TYPE_CHECKING:
    from .listener import DialledClient

logger = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 10


class HealthMonitor:
    """Watches one engine from its first beat to its end.

    A silent engine leaves routing, and calls fail.  Requests move only without beats: with beats the engine
    may be at one long step.  `come` brings the engine into routing, also after each silence.  `give_up` ends
    an engine that stays silent or fails to come.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        instance: Instance,
        client: DialledClient,
        come: Callable[[], Awaitable[None]],
        give_up: Callable[[], None],
        clock: Clock | None = None,
        wait: Callable[[float], Awaitable[bool]] | None = None,
    ) -> None:
        self._instance_registry, self._instance, self._client = instance_registry, instance, client
        self._come, self._give_up = come, give_up
        self._clock = clock or WallClock()
        self._wait = wait
        self._coming: asyncio.Task[None] | None = None
        self._moved_off_s = self._clock.now_s()

    async def run(self) -> None:
        """Watch until the engine's end; then out of routing."""
        ending = asyncio.ensure_future(self._client.ended.wait())
        try:
            await self._watch(ending)
        finally:
            ending.cancel()
        if self._coming is not None:
            await asyncio.wait([self._coming])
        self._instance_registry.lose(self._instance, self._client)
        self._instance.silent = False

    async def _watch(self, ending: asyncio.Future[Any]) -> None:
        heartbeat, hearing = self._instance_registry.heartbeat, self._client.hearing
        self._client.on_beat = self._instance.hear
        while True:
            silent_s, is_in = hearing.silent_s(), self._is_in()
            if silent_s >= heartbeat.dead_s:
                logger.error(
                    "instance %s is silent for %.0f s and is ended; "
                    "where one step may take that long, give heartbeat_dead_s more",
                    self._instance.name,
                    silent_s,
                )
                self._give_up()
            elif silent_s >= heartbeat.timeout_s:
                self._leave(silent_s)
                if hearing.unheard_s() >= heartbeat.timeout_s:
                    self._instance_registry.on_unheard(self._instance)
            elif is_in:
                if self._instance_registry.drains.names:
                    self._move_off(heartbeat.timeout_s)
            elif self._coming is None or self._coming.done():
                self._coming = asyncio.create_task(self._try_to_come())
            looked_s = self._clock.now_s()
            wait_s = heartbeat.timeout_s / _LOOKS_PER_TIMEOUT
            if is_in and not self._instance_registry.drains.names:
                wait_s = max(wait_s, heartbeat.timeout_s - silent_s)
            if self._wait is not None:
                ended = await self._wait(wait_s)
            else:
                ended = bool((await asyncio.wait([ending], timeout=wait_s))[0])
            if ended:
                break
            if self._clock.now_s() - looked_s - wait_s > heartbeat.timeout_s / 2:
                hearing.restart_clock()  # this process stood still too

    def _is_in(self) -> bool:
        return self._instance.live and self._instance.client is self._client

    def _move_off(self, interval_s: float) -> None:
        """Move requests repeatedly: a move may fail, or bring an earlier request."""
        now_s = self._clock.now_s()
        if now_s - self._moved_off_s >= interval_s and self._instance.name in self._instance_registry.drained:
            self._moved_off_s = now_s
            self._instance_registry.on_drain(self._instance)

    def _leave(self, silent_s: float) -> None:
        name = self._instance.name
        if self._instance_registry.note_silent(self._instance, self._client):
            logger.warning("instance %s is silent for %.1f s; it gets no requests", name, silent_s)
        self._client.fail_all(EngineSilentError(f"instance {name} does not get on; send the request again"))

    async def _try_to_come(self) -> None:
        name = self._instance.name
        try:
            await self._come()
        except EngineSilentError:
            logger.warning("instance %s is silent again before it took part", name)
        except EngineDeadError as error:
            if not self._instance_registry.closed.is_set():
                logger.warning("instance %s left before it took part: %s", name, error)
            self._give_up()
        except Exception:
            logger.exception("instance %s can't be brought to what the others serve; it is ended", name)
            self._give_up()
