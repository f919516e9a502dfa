# SPDX-License-Identifier: Apache-2.0
"""A front end's connection to the controller, with redials."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
from moe_lora.dist.net.session import RefusedError, stay_connected
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

if TYPE_CHECKING:
    from moe_lora.dist.net.fence import Fence

logger = logging.getLogger(__name__)

_AWAY = "the controller is away, and nothing can be changed without it"
_NO_LEADER = (
    "no controller leads that is known here: another begins soon, or all are down, or most members of the "
    "leadership's store do not answer; nothing can be changed meanwhile"
)
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

    Belongs to the event loop of `run`.  places: controllers; one leads.  state: the newest.  num_joins:
    connections so far.  leader: the latest controller.
    """

    def __init__(
        self,
        places: Mapping[str, Address],
        keys: Keys | None,
        name: str,
        instance_registry: InstanceRegistry,
        routes: Routes,
        *,
        watched: bool = True,
    ) -> None:
        self._places, self._keys, self.name = places, keys, name
        self._instance_registry, self._routes = instance_registry, routes
        self._peer: Peer | None = None
        self.ranks = routes.ranks
        self.state: ClusterState | None = None
        self.figures = Figures()
        self.window = ReportedWindow() if watched else None
        self.num_joins = 0
        self.leader = ""
        self._fence: Fence | None = None
        self._is_leaving = False

    @property
    def link(self) -> ControllerLink:
        return self

    @property
    def epoch(self) -> int:
        """The leader's; 0: an only controller."""
        return 0 if self._fence is None else self._fence.epoch

    @property
    def up(self) -> bool:
        return self._peer is not None

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """The controller's answer.  Raises its error, or ControllerAwayError."""
        if self._peer is None:
            away = _AWAY if len(self._places) == 1 else _NO_LEADER
            raise ControllerAwayError(f"{away}; requests go on, send this again in a while")
        try:
            return await self._peer.call(verb, *args, **words)
        except PeerEndedError as error:
            raise ControllerAwayError(
                "the controller was lost before it answered, so it is not known whether this was done or "
                "goes on; look (GET /v1/adapters, GET /v1/instances, GET /v1/lora_server), then send it again"
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
        dialling = [
            asyncio.create_task(stay_connected(name, partial(self._connect, name, address), self._serve))
            for name, address in self._places.items()
        ]
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
            for one in dialling:
                one.cancel()
            if self._peer is not None:
                self._peer.end("the front end was stopped")
                await self._peer.closed()

    async def _connect(self, name: str, address: Address) -> Peer:
        pings = Pings.within(self._routes.config.heartbeat_timeout_s)
        connection = await dial(f"{name}.address", address, self._keys, pings)
        peer, epoch = await HANDSHAKE.open(connection, address, HANDSHAKE.hello(self.name, self.state))
        if epoch or self._fence is not None or len(self._places) > 1:
            from moe_lora.dist.net.fence import Fence

            self._fence = self._fence or Fence()
            self._fence.admit(peer, epoch)
        self.leader = name
        return peer

    async def _serve(self, peer: Peer) -> None:
        self._peer = peer
        self.num_joins += 1
        if self._is_leaving:
            peer.send(Leaving())
        try:
            async for message in peer.messages():
                self.receive(message)
        finally:
            if self._peer is peer:
                self._peer = None
        logger.warning("lost the controller: %s; requests go on by what it said last", peer.problem)

    def receive(self, message: Message | Asked) -> None:
        if isinstance(message, ClusterState):
            if self.state is None or message.order > self.state.order:
                here = ClusterState(number=0, served=self._instance_registry.served, ranks=self.ranks)
                self._take(message, StateChange.between(here, message))
        elif isinstance(message, StateChange):
            number = None if self.state is None else self.state.number
            if self.state is None or number != message.since:
                reason = f"the controller changes state {message.since}, and state {number} is here"
                raise RefusedError(reason, "restart this front end if this goes on")
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
        self._instance_registry.drains.warmed = dict(state.warmed)
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
    place, keys = cluster.dialled_addresses()[name], keys_of(cluster)
    places = {
        one: parse_address(f"{one}.address", found.address) for one, found in cluster.controllers_at.items()
    }
    registry = InstanceRegistry((), cluster.engine.adapters, heartbeat=Heartbeat.of(cluster.front_end))
    routes = make_routes(cluster)
    watched = cluster.provisioning is not None
    link = ControllerLink(places, keys, name, registry, routes, watched=watched)
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
