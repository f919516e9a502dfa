# SPDX-License-Identifier: Apache-2.0
"""Pauses and a sleep, for instances that join later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from anyio import move_on_after

from moe_lora.core.errors import BusyError, EngineDeadError
from moe_lora.engine.client.messages import CurrentPause, PauseOrder, SleepOrder

from .instances import DIAL_IN_S

if TYPE_CHECKING:
    from moe_lora.engine.client.client import EngineClient

    from .instances import InstanceRegistry

logger = logging.getLogger(__name__)
_LOOK_S = 0.05
SLEEP_S = 60.0
"""Time for an idle instance's loads, before its sleep."""


class StandingOrders:
    """The latest orders to all instances, pauses by owner.  elsewhere: another process's controller has
    orders.
    """

    def __init__(self, instance_registry: InstanceRegistry) -> None:
        self._instance_registry = instance_registry
        self.pauses: dict[str, PauseOrder] = {}
        self.sleep: SleepOrder | None = None
        self.elsewhere = False
        self._knows_pauses = False
        self._changes = False

    @asynccontextmanager
    async def recording(self, verb: str, args: Sequence[Any]) -> AsyncIterator[None]:
        """Record one of `adapter_calls.STANDING` before the instances answer.

        A refused sleep returns all instances to the earlier order; a refused wake-up stays ordered.
        Raises BusyError for a sleep or wake-up beside another.
        """
        if verb == "pause_requests":
            self._knows_pauses = True
            scope, mode, timeout_s, *_ = args
            self.pauses[scope.owner] = PauseOrder(scope, mode, time.monotonic() + timeout_s)
            yield
        elif verb == "resume_requests":
            self._knows_pauses = True
            [owner] = args
            self.pauses = {name: one for name, one in self.pauses.items() if owner not in (None, name)}
            yield
        else:
            async with self._changing(verb, args):
                yield

    @asynccontextmanager
    async def _changing(self, verb: str, args: Sequence[Any]) -> AsyncIterator[None]:
        if self._changes:
            raise BusyError("the model falls asleep or wakes up; send the request again later")
        before = self.sleep
        now = before or SleepOrder()
        self.sleep, self._changes = now.start(*args[:3]) if verb == "sleep" else now.stop(*args), True
        try:
            yield
        except Exception:
            if verb == "sleep":
                self.sleep = before
                live = self._instance_registry.live
                await asyncio.gather(*(self._sleep(one.client) for one in live), return_exceptions=True)
            raise
        finally:
            self._changes = False

    @property
    def active(self) -> bool:
        """True while a joining instance gets an order."""
        now_s = time.monotonic()
        return bool(self.sleep and self.sleep.parts) or any(one.end_s > now_s for one in self.pauses.values())

    def recover(self, asleep: Sequence[SleepOrder], paused: Iterable[CurrentPause]) -> None:
        """Adopt an instance's sleep and pauses, unless such an order came here.

        A pause after a missed resume lasts to its end, or to a further resume.
        """
        if asleep and self.sleep is None:
            self.sleep = asleep[0]
        if not self._knows_pauses:
            for one in paused:
                order = PauseOrder(one.scope, one.mode, time.monotonic() + one.left_s)
                self.pauses.setdefault(one.scope.owner, order)

    async def until_given(self, name: str, incarnation: str) -> None:
        """Wait at most `DIAL_IN_S` until another process's controller has given an instance its orders."""
        with move_on_after(DIAL_IN_S):
            while self.elsewhere and self._instance_registry.holding_of(name, incarnation) is None:
                await asyncio.sleep(_LOOK_S)

    async def give(
        self, client: EngineClient, known: dict[str, PauseOrder], *, may_differ: bool
    ) -> dict[str, PauseOrder]:
        """Bring an engine into the ordered state; returns the current pauses.

        known: from an earlier call.  may_differ: the engine may have missed a resume.
        """
        await self._sleep(client)
        scopes = await client.call("paused_scopes") if may_differ else ()
        for scope in scopes:
            if scope.owner not in self.pauses:
                await client.call("resume_requests", scope.owner)
        current = dict(self.pauses)
        for owner, pause in current.items():
            left_s = pause.end_s - time.monotonic()
            if pause is known.get(owner) or pause is not self.pauses.get(owner) or left_s <= 0:
                continue
            # A second "abort" would end requests delayed by the first.
            mode = "keep" if pause.mode == "abort" and pause.scope in scopes else pause.mode
            await client.call("pause_requests", pause.scope, mode, left_s, waits=False)
            if owner not in self.pauses:  # a resume came meanwhile
                await client.call("resume_requests", owner)
        return current

    async def _sleep(self, client: EngineClient) -> None:
        """An engine that can't follow stays, with a warning."""
        found = await client.call("sleep_orders")
        asleep, ordered = found[0].parts if found else frozenset(), self.sleep or SleepOrder()
        try:
            if missed := asleep - ordered.parts:
                await client.call("wake_up", sorted(missed))
            if ordered.parts - asleep:
                words = sorted(ordered.parts), ordered.drops_weights, ordered.mode, SLEEP_S
                await client.call("sleep", *words)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.warning("an instance does not sleep or wake up as ordered: %s", error)
