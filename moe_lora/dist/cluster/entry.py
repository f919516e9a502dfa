"""How an engine that dialled in comes into routing."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from .catch_up import catch_up, held_by
from moe_lora.dist.cluster.controller.directed_roster import DirectedRoster
from .instances import Instance, Roster
from .served import Served, ServedAdapter

if TYPE_CHECKING:
    from .listener import DialledClient

RECOVERY_S = 2.0
"""Engines that are there dial in at least once a second."""


class Entry(Protocol):
    async def bring_in(self, instance: Instance, client: DialledClient, incarnation: str) -> None:
        """Put the instance into routing.  Raises EngineDeadError if it ended, or the fleet was closed."""
        ...


class CatchUp:
    """Gives an engine what it lacks first, takes from it what is not served, and pins.

    recovery: takes over what engines serve already, while it lasts.
    """

    def __init__(self, roster: Roster, recovery: Recovery | None = None) -> None:
        self._roster = roster
        self._recovery = recovery

    async def bring_in(self, instance: Instance, client: DialledClient, incarnation: str) -> None:
        pool = self._roster.pool
        have, missing = await held_by(client, pool), set[str]()
        if self._recovery is not None and not self._recovery.over:
            self._recovery.report(have)
            await self._roster.at_rest()
            have = await held_by(client, pool)  # engines that start together are given adapters meanwhile
        while not await self._roster.join(instance, client, have, missing, incarnation):
            await catch_up(client, self._roster.adapters, have, missing, pool)


class AsItIs:
    """Takes an engine as it is: a controller looks after what it has."""

    def __init__(self, roster: DirectedRoster) -> None:
        self._roster = roster

    async def bring_in(self, instance: Instance, client: DialledClient, incarnation: str) -> None:
        self._roster.join_as_it_is(instance, client, await held_by(client), incarnation)


class Recovery:
    """The first seconds of a process that looks after instances: it takes over what it finds.

    Until it is over nobody comes into routing; by then the engines that outlived the process before this one
    have dialled in and said what they serve, and so what was loaded over HTTP is served on.  limit_s: None:
    until `end` is called.
    """

    def __init__(self, roster: Roster, limit_s: float | None = RECOVERY_S) -> None:
        self._roster = roster
        self._holding = ExitStack()
        self._holding.enter_context(roster.loading())
        self.over = False
        if limit_s is not None:
            asyncio.get_running_loop().call_later(limit_s, self.end)

    def report(self, have: dict[str, ServedAdapter]) -> None:
        """An engine has these; once it is over that changes nothing."""
        if not self.over:
            self._roster.recover(Served.of(have))

    def end(self) -> None:
        """Let them in.  May be called again."""
        self.over = True
        self._holding.close()
