# SPDX-License-Identifier: Apache-2.0
"""A front end's connection to the controller, with redials."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.core.request import RequestTiming
from moe_lora.dist.cluster.instances import InstanceRegistry, take_changes
from moe_lora.dist.cluster.listener import InstanceListener
from moe_lora.dist.cluster.routing_client import FleetClient, make_client
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import Pings, dial
from moe_lora.dist.net.keys import Keys, keys_of
from moe_lora.dist.net.peer import Asked, Peer, PeerEndedError
from moe_lora.dist.net.session import stay_connected
from moe_lora.engine.client.messages import Heartbeat
from moe_lora.provision.online import Visit

from .cluster_state import (
    ClusterState,
    Figures,
    FrontEndReport,
    Leaving,
    StateChange,
    Taken,
    VisitEvent,
    follow_aborts,
    take_table,
)
from .protocol import HANDSHAKE
from .routes import Routes, make_routes

logger = logging.getLogger(__name__)

REPORT_S = 0.25
READY_S = 5.0
_LOOK_S = 0.05


class ReportedWindow:
    """Records requests' events for the controller's `DemandWindow`."""

    def __init__(self) -> None:
        self._events: list[VisitEvent] = []
        self._numbers = itertools.count()

    def begin(self, adapter: str) -> Visit:
        visit = Visit(self, adapter, next(self._numbers))
        self._events.append(VisitEvent("begin", visit.number, adapter))
        return visit

    def start(self, visit: Visit) -> None:
        self._events.append(VisitEvent("start", visit.number))

    def refuse(self, visit: Visit) -> None:
        self._events.append(VisitEvent("refuse", visit.number))

    def end(self, visit: Visit, timing: RequestTiming | None) -> None:
        self._events.append(VisitEvent("end", visit.number, timing=timing))

    def take(self) -> tuple[VisitEvent, ...]:
        """The events since the last call."""
        taken = tuple(self._events)
        self._events.clear()
        return taken


class ControllerLink:
    """Carries a front end's calls and reports to the controller, and decisions to registry and router.

    Belongs to the event loop of `run`.  state: the newest.  num_joins: connections so far.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        name: str,
        instance_registry: InstanceRegistry,
        routes: Routes,
        *,
        watched: bool = True,
    ) -> None:
        self._address, self._keys, self.name = address, keys, name
        self._instance_registry, self._routes = instance_registry, routes
        self._peer: Peer | None = None
        self.ranks = routes.ranks
        self.state: ClusterState | None = None
        self.figures = Figures()
        self.window = ReportedWindow() if watched else None
        self.num_joins = 0
        self._is_leaving = False

    @property
    def link(self) -> ControllerLink:
        return self

    @property
    def up(self) -> bool:
        return self._peer is not None

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """The controller's answer.  Raises its error, or ControllerAwayError."""
        if self._peer is None:
            raise ControllerAwayError(
                "the controller is away, and nothing can be changed without it; requests go on, send this "
                "again in a while"
            )
        try:
            return await self._peer.call(verb, *args, **words)
        except PeerEndedError as error:
            raise ControllerAwayError(
                "the controller was lost before it answered, so it is not known whether this was done; look "
                "what is there (GET /v1/adapters, GET /v1/instances) once it is back, then send it again"
            ) from error

    async def leave(self) -> None:
        """Leave: pauses end with the last front end."""
        self._is_leaving = True
        if self._peer is not None:
            self._peer.send(Leaving())

    async def ready(self) -> None:
        """Return once this front end can serve, or after READY_S."""
        waited_s = 0.0
        while waited_s < READY_S and (self.state is None or not self._instance_registry.live):
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S

    async def run(self) -> None:
        """Keep the connection and report events, until cancelled."""
        dialling = asyncio.create_task(stay_connected("the controller", self._connect, self._serve))
        reported: tuple[Peer | None, dict[str, str | None]] = None, {}
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                # Counts without a listener are dropped: a later step must not include old counts.
                tokens = {} if self._routes.meter is None else self._routes.meter.read()
                visits = () if self.window is None else self.window.take()
                now = self._peer, {one.name: one.incarnation for one in self._instance_registry.live}
                if self._peer is not None and (tokens or visits or now != reported):
                    self._peer.send(FrontEndReport(tokens, visits, now[1]))
                    reported = now
        finally:
            dialling.cancel()
            if self._peer is not None:
                self._peer.end("the front end was stopped")
                await self._peer.closed()

    async def _connect(self) -> Peer:
        pings = Pings.within(self._routes.config.heartbeat_timeout_s)
        connection = await dial("controller.address", self._address, self._keys, pings)
        hello = HANDSHAKE.hello(self.name, self.state)
        return (await HANDSHAKE.open(connection, self._address, hello))[0]

    async def _serve(self, peer: Peer) -> None:
        self._peer = peer
        self.num_joins += 1
        if self._is_leaving:
            peer.send(Leaving())
        try:
            async for message in peer.messages():
                self.receive(message)
        finally:
            self._peer = None
        logger.warning("lost the controller: %s; requests go on by what it said last", peer.problem)

    def receive(self, message: Message | Asked) -> None:
        if isinstance(message, ClusterState):
            if self.state is None or message.number > self.state.number:
                here = ClusterState(number=0, served=self._instance_registry.served, ranks=self.ranks)
                self._take(message, StateChange.between(here, message))
        elif isinstance(message, StateChange):
            assert self.state is not None
            assert self.state.number == message.since
            self._take(message.applied_to(self.state), message)
        elif isinstance(message, Figures):
            self.figures = message
        if self._peer is not None and self.state is not None and not isinstance(message, Figures):
            self._peer.send(Taken(self.state.number))

    def _take(self, state: ClusterState, change: StateChange) -> None:
        self.state = state
        if state.ordered or self._instance_registry.standing is not None:
            self._instance_registry.standing_orders().elsewhere = state.ordered
        self._instance_registry.follow(change.adapters, change.versions, state.holdings)
        self._instance_registry.drains.follow(state.drains, state.restarting)
        if state.aliases or self._instance_registry.aliases:
            from moe_lora.dist.cluster.aliases import replace_all

            replace_all(self._instance_registry.aliases, state.aliases)
        if self._instance_registry.on_abort is not None:
            follow_aborts(self._instance_registry, state.aborts)
        take_changes(self.ranks, change.ranks)
        if state.table_version != self._routes.table_version:
            take_table(state, self._routes, self._instance_registry)


@dataclass(frozen=True, kw_only=True)
class DirectedFleet:
    """A front end's fleet, with the link to a separate controller."""

    controller: ControllerLink
    fleet: FleetClient
    instance_registry: InstanceRegistry
    name: str


@asynccontextmanager
async def directed_fleet(cluster: ClusterConfig, name: str) -> AsyncIterator[DirectedFleet]:
    """Instances that dial this front end, and the controller's link.

    Raises ConfigError for errors known at start.
    """
    assert cluster.controller is not None
    place, keys = cluster.dialled_addresses()[name], keys_of(cluster)
    address = parse_address("controller.address", cluster.controller.address)
    registry = InstanceRegistry((), cluster.engine.adapters, heartbeat=Heartbeat.of(cluster.front_end))
    routes = make_routes(cluster)
    watched = cluster.provisioning is not None
    link = ControllerLink(address, keys, name, registry, routes, watched=watched)
    fleet = make_client(cluster, registry, routes, link.call, name)
    if cluster.has_resolver:
        from moe_lora.dist.cluster.resolving import attach_resolver

        attach_resolver(fleet, cluster, link.call)
    listener = InstanceListener(registry, max_unread=cluster.front_end.max_unread_steps)
    async with listener.open(f"front_ends.{name}.engines_address", place, keys):
        try:
            yield DirectedFleet(controller=link, fleet=fleet, instance_registry=registry, name=name)
        finally:
            await fleet.close()
