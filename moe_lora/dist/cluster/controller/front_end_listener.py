# SPDX-License-Identifier: Apache-2.0
"""The controller's listener for front ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio import fail_after

from moe_lora.config import ONE_FRONT_END
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address, parse_address
from moe_lora.dist.cluster.listener import RECOVERY_S
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import Pings, listen
from moe_lora.dist.net.keys import Keys, keys_of
from moe_lora.dist.net.peer import Asked, Peer
from moe_lora.dist.net.session import Dialler
from moe_lora.provision.online import DemandWindow, Visit

from . import ALIVE, READY, set_times
from .cluster_controller import ControlledFleet, controlled_fleet
from .cluster_state import (
    ClusterState,
    ClusterStateLog,
    FrontEndReport,
    Leaving,
    StateChange,
    Taken,
    VisitEvent,
)
from .protocol import HANDSHAKE
from .routes import make_routes

if TYPE_CHECKING:
    from moe_lora.dist.cluster.leadership.leader import Leader

    from .served_registry import ServedRegistry

logger = logging.getLogger(__name__)

POLL_S = 0.2
SHOW_S = 1.0
TAKEN_S = 5.0
"""Longest wait for front ends without the new state."""
LONGEST_RECOVERY_S = 10.0
"""Longest wait for a configured front end."""


@dataclass(eq=False)
class Session:
    """A connected front end.  taken: number of its state."""

    name: str
    peer: Peer
    taken: int = 0
    is_leaving: bool = False
    visits: dict[int, Visit] = field(default_factory=dict)
    instances: Mapping[str, str | None] = field(default_factory=dict)

    def see(self, window: DemandWindow, event: VisitEvent) -> None:
        """Record a request's event."""
        if event.kind == "begin":
            assert event.adapter is not None
            self.visits[event.number] = window.begin(event.adapter)
        elif event.number not in self.visits:
            return  # started before this controller
        elif event.kind == "start":
            self.visits[event.number].start()
        elif event.kind == "refuse":
            self.visits.pop(event.number).refuse()
        else:
            self.visits.pop(event.number).end(event.timing)


class FrontEndListener:
    """Answers the calls of front ends, and sends decisions to all.

    The recovery ends after the configured front ends' reports.
    """

    def __init__(self, controlled: ControlledFleet, front_ends: Collection[str], epoch: int = 0) -> None:
        self.sessions: list[Session] = []
        self._controlled = controlled
        self._controller = controlled.controller
        self._state_log = ClusterStateLog(
            controlled.instance_registry, controlled.routes, controlled.controller.placement, epoch
        )
        if self._controller.instances is not None:
            self._controller.instances.seen_by_all = self._seen_by_all
        self._awaited = set(front_ends)
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(
        self, address: Address, keys: Keys | None, setting: str = "controller.address"
    ) -> AsyncIterator[Address]:
        """Listen until the context ends.  Raises ConfigError if the address is unavailable."""
        visit = partial(HANDSHAKE.receive, lambda caller: self._state_log.state.epoch, self._serve)
        pings = Pings.within(self._controlled.routes.config.heartbeat_timeout_s)
        async with listen(setting, address, keys, visit, pings) as place:
            yield place

    async def run(self) -> None:
        """Recover, then decide and send states, until cancelled."""
        self.spawn(self._show())
        try:
            await self._recover()
            self.spawn(self._controller.run())
            while True:
                await self._learn_ranks()
                self._give_out()
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()
            for session in self.sessions:
                session.peer.end("the controller was stopped")

    async def _recover(self) -> None:
        waited_s = 0.0
        while waited_s < RECOVERY_S or (self._awaited and waited_s < LONGEST_RECOVERY_S):
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
        self._controlled.catch_up.end_recovery()
        self._ready.set()
        self._state_log.write()
        # Else a front end may keep a former state.
        self._state_log.count_above(self._state_log.state)
        state = self._state_log.state
        self._send_all(state)
        logger.info(
            "the controller begins: state %d, table %d, %d front ends",
            state.number,
            state.table_version,
            len(self.sessions),
        )

    async def _show(self) -> None:
        while True:
            set_times(ALIVE, READY)
            for session in self.sessions:
                session.peer.send(self._controller.figures)
            await asyncio.sleep(SHOW_S)

    async def _learn_ranks(self) -> None:
        """Learn ranks from the first instance."""
        try:
            if await self._controlled.fleet.is_alive():
                await self._controlled.fleet.model_info()
        except Exception as error:  # the controller continues without the answer
            logger.debug("no instance says which ranks adapters have: %r", error)

    def _give_out(self) -> None:
        if (change := self._state_log.write()) is not None:
            self._send_all(change)

    def _seen_by_all(self, name: str, incarnation: str) -> bool:
        """True if all front ends route to this process; False without front ends."""
        return bool(self.sessions) and all(
            session.instances.get(name) == incarnation for session in self.sessions
        )

    def _send_all(self, message: ClusterState | StateChange) -> None:
        for session in self.sessions:
            session.peer.send(message)

    async def _serve(self, peer: Peer, caller: Dialler) -> None:
        session = Session(caller.name, peer)
        self._join(session, caller.payload)
        try:
            async for message in peer.messages():
                self._hear(session, message)
        finally:
            logger.warning("lost front end %s: %s", session.name, peer.problem)
            self.sessions.remove(session)
            for visit in session.visits.values():
                visit.end(None)
            self._changed.set()
            self._leave_with_all()

    def _join(self, session: Session, before: ClusterState | None) -> None:
        logger.info("front end %s dialled in", session.name)
        self.sessions.append(session)
        self._awaited.discard(session.name)
        if not self._ready.is_set():
            if before is not None:
                self._state_log.recover(before)
            return
        now = self._state_log.state
        if before is not None:
            self._state_log.learn_orders(before)
        if before is not None and before.number >= now.number and before != now:
            logger.warning("front end %s: state %d given up: it came too late", session.name, before.number)
            self._state_log.count_above(before)
            # Front ends with this state under a lower number would count as late.
            self._send_all(self._state_log.state)
        else:
            session.peer.send(self._state_log.state)

    def _hear(self, session: Session, message: Message | Asked) -> None:
        if isinstance(message, Asked):
            self.spawn(message.answer_by(self._value, message))
        elif isinstance(message, Taken):
            session.taken = message.number
            self._changed.set()
        elif isinstance(message, Leaving):
            session.is_leaving = True
            self._leave_with_all()
        elif isinstance(message, FrontEndReport):
            session.instances = message.instances
            if self._controlled.routes.meter is not None:
                self._controlled.routes.meter.add(message.tokens)
            window = self._controller.window
            if window is not None:
                for event in message.visits:
                    session.see(window, event)

    def _leave_with_all(self) -> None:
        """End pauses once all front ends leave."""
        if self.sessions and all(one.is_leaving for one in self.sessions):
            self.spawn(self._controller.leave())

    async def _value(self, call: Asked) -> Any:
        await self._ready.wait()
        value = await self._controller.call(call.method, *call.args)
        self._give_out()
        await self._all_taken(self._state_log.state.number)
        return value

    async def _all_taken(self, number: int) -> None:
        async def wait() -> None:
            while any(session.taken < number for session in self.sessions):
                self._changed.clear()
                await self._changed.wait()

        try:
            with fail_after(TAKEN_S):
                await wait()
        except TimeoutError:
            late = [session.name for session in self.sessions if session.taken < number]
            logger.warning("front ends %s do not take state %d; going on", ", ".join(late), number)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside `run`, which cancels the work at its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def run_controller(
    cluster: ClusterConfig,
    registry: ServedRegistry | None,
    hang_up: Callable[[], object] | None = None,
    leader: Leader | None = None,
    *,
    is_kept: bool = False,
) -> None:
    """Run the controller of a cluster until SIGINT or SIGTERM.

    hang_up: effect of SIGHUP.  leader: of several controllers.  is_kept: by `serve_host`.  Raises ConfigError
    for errors known at start.
    """
    loop = asyncio.get_running_loop()
    if hang_up is not None:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    section = next(iter(cluster.controllers_at)) if leader is None else leader.section
    setting, place = f"{section}.address", cluster.controllers_at[section]
    address = parse_address(setting, place.address)
    name, engines = f"{section}.engines_address", cluster.dialled_addresses()[section]
    fleet = controlled_fleet(cluster, make_routes(cluster), name, engines, registry=registry)
    async with fleet as controlled:
        listener = FrontEndListener(controlled, cluster.front_ends or (ONE_FRONT_END,), cluster.epoch)
        async with listener.open(address, keys_of(cluster), setting) as bound:
            task = asyncio.create_task(listener.run())
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, task.cancel)
            logger.info("the controller listens at %s", bound)
            if is_kept and cluster.lora_server is not None:
                from .keeper_link import KeeperLink

                listener.spawn(KeeperLink(cluster, controlled).run())
            if leader is not None:
                leader.loop = loop
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if leader is not None:
                await asyncio.to_thread(leader.release)
