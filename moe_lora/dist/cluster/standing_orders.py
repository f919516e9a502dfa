# SPDX-License-Identifier: Apache-2.0
"""Pauses and a sleep of all instances, for instances that join later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anyio import move_on_after

from moe_lora.engine.client.messages import PauseOrder, SleepOrder, SleepPart

from .instances import DIAL_IN_S

if TYPE_CHECKING:
    from moe_lora.engine.client.client import CallableEngine

    from .instances import InstanceRegistry

_LOOK_S = 0.05
SLEEP_S = 60.0
"""Time for the loads of an instance without requests, before its sleep."""


class StandingOrders:
    """The latest orders to all instances.

    pauses: by owner.  sleep: None without an order.  elsewhere: another process's controller has orders.
    """

    def __init__(self) -> None:
        self.pauses: dict[str, PauseOrder] = {}
        self.sleep: SleepOrder | None = None
        self.elsewhere = False

    @contextmanager
    def recording(self, verb: str, args: Sequence[Any]) -> Iterator[None]:
        """Record one of `adapter_calls.STANDING` before the instances answer.

        A refused sleep or wake-up is forgotten.
        """
        if verb == "pause_requests":
            scope, mode, timeout_s, *_ = args
            self.pauses[scope.owner] = PauseOrder(scope, mode, time.monotonic() + timeout_s)
            yield
        elif verb == "resume_requests":
            [owner] = args
            self.pauses = {name: one for name, one in self.pauses.items() if owner not in (None, name)}
            yield
        else:
            before = self.sleep
            self.sleep = _changed(before or SleepOrder(), verb, args)
            try:
                yield
            except Exception:
                self.sleep = before
                raise

    @property
    def active(self) -> bool:
        """True while an instance that joins gets an order."""
        now_s = time.monotonic()
        return bool(self.sleep and self.sleep.parts) or any(one.end_s > now_s for one in self.pauses.values())

    def recover(self, parts: Sequence[SleepPart]) -> None:
        """Adopt the sleep of an instance, unless an order is known here."""
        if self.sleep is None:
            self.sleep = SleepOrder(frozenset(parts))

    async def until_given(self, registry: InstanceRegistry, name: str, incarnation: str) -> None:
        """Return once another process's controller has given its orders to an instance's process.

        Returns too at the end of the orders, and after `DIAL_IN_S` without that controller.
        """
        with move_on_after(DIAL_IN_S):
            while self.elsewhere and registry.holding_of(name, incarnation) is None:
                await asyncio.sleep(_LOOK_S)

    async def give(
        self, client: CallableEngine, known: dict[str, PauseOrder], *, may_differ: bool
    ) -> dict[str, PauseOrder]:
        """Bring an engine into the ordered state; returns the current pauses.

        known: pauses from an earlier call.  may_differ: the engine may have missed a resume.
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
            # A second "abort" would end the requests that the first delays.
            mode = "keep" if pause.mode == "abort" and pause.scope in scopes else pause.mode
            await client.call("pause_requests", pause.scope, mode, left_s, waits=False)
            if owner not in self.pauses:  # a resume came meanwhile
                await client.call("resume_requests", owner)
        return current

    async def _sleep(self, client: CallableEngine) -> None:
        asleep, ordered = set(await client.call("parts_asleep")), self.sleep or SleepOrder()
        if missed := asleep - ordered.parts:
            await client.call("wake_up", sorted(missed))
        if ordered.parts - asleep:
            words = sorted(ordered.parts), ordered.drops_weights, "abort", SLEEP_S
            await client.call("sleep", *words)


def _changed(before: SleepOrder, verb: str, args: Sequence[Any]) -> SleepOrder:
    if verb == "sleep":
        return SleepOrder(before.parts | set(args[0]), before.drops_weights or args[1])
    left = before.parts - set(args[0])
    return SleepOrder(left, before.drops_weights and "weights" in left)
