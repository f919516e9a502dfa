# SPDX-License-Identifier: Apache-2.0
"""Messages between the controller and the front ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field
from msgspec.structs import replace

from moe_lora.core.records import Outlook, PlacementQuality
from moe_lora.core.request import RequestTiming
from moe_lora.dist.cluster.instances import (
    Holding,
    InstanceRegistry,
    Served,
    ServedVersion,
    changes,
    take_changes,
)
from moe_lora.dist.net.codec import Message
from moe_lora.engine.client.messages import AbortOrder, Alias, DrainOrder

if TYPE_CHECKING:
    from .placement_controller import PlacementController
    from .routes import Routes


_MAPPINGS = ("ranks", "holdings", "drains", "warmed", "aliases", "table", "demand")
_VALUES = ("restarting", "aborts", "ordered", "table_version")
"""The other fields of `ClusterState`."""


class ClusterState(Message, frozen=True, kw_only=True):
    """The controller's decisions.

    number: rises with each change, even over restarts.  epoch: of the leader; 0: an only controller.
    holdings: of instances in the controller's routing.  warmed: see `Drains`; with restarting, dropped by the
    next controller.
    aliases: with removed aliases.  ordered: see `StandingOrders.active`.  table: adapter -> (instance name,
    phi); demand: tokens/s by adapter behind the table.
    """

    number: int
    served: Served = field(default_factory=Served)
    ranks: Mapping[str, int] = field(default_factory=dict)
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    drains: Mapping[str, DrainOrder] = field(default_factory=dict)
    warmed: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    restarting: tuple[str, ...] = ()
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    aborts: tuple[AbortOrder, ...] = ()
    ordered: bool = False
    table: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    table_version: int = 0
    demand: Mapping[str, float] = field(default_factory=dict)
    epoch: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Rises with each state of a cluster."""
        return self.epoch, self.number


class StateChange(Message, frozen=True, kw_only=True):
    """A state by its difference to the state `since`: mappings by `changes`."""

    number: int
    since: int
    adapters: Mapping[str, ServedVersion | None]
    versions: Mapping[str, int | None]
    ranks: Mapping[str, int | None]
    holdings: Mapping[str, Holding | None]
    drains: Mapping[str, DrainOrder | None]
    warmed: Mapping[str, Mapping[str, tuple[str, ...]] | None]
    restarting: tuple[str, ...]
    aliases: Mapping[str, Alias | None]
    aborts: tuple[AbortOrder, ...]
    ordered: bool
    table: Mapping[str, tuple[tuple[str, float], ...] | None]
    table_version: int
    demand: Mapping[str, float | None]

    @staticmethod
    def between(before: ClusterState, now: ClusterState) -> StateChange:
        """From one state to the other."""
        others: dict[str, Any] = {one: getattr(now, one) for one in _VALUES}
        others |= {one: changes(getattr(before, one), getattr(now, one)) for one in _MAPPINGS}
        return StateChange(
            number=now.number,
            since=before.number,
            adapters=changes(before.served.adapters, now.served.adapters),
            versions=changes(before.served.versions, now.served.versions),
            **others,
        )

    def applied_to(self, state: ClusterState) -> ClusterState:
        """The state `number`.  Changes the mappings of `state`, a decoded message."""
        served: Any = state.served
        for mapping, changed in (
            (served.adapters, self.adapters),
            (served.versions, self.versions),
            *((getattr(state, one), getattr(self, one)) for one in _MAPPINGS),
        ):
            take_changes(mapping, changed)
        return replace(state, number=self.number, **{one: getattr(self, one) for one in _VALUES})


@dataclass(frozen=True)
class VisitEvent:
    """An event of a request.  number: unique in the front end."""

    kind: Literal["begin", "start", "refuse", "end"]
    number: int
    adapter: str | None = None
    timing: RequestTiming | None = None


class FrontEndReport(Message, frozen=True):
    """Events of a front end's requests since the last report.  tokens: by adapter."""

    tokens: Mapping[str, int]
    visits: tuple[VisitEvent, ...]
    instances: Mapping[str, str | None] = field(default_factory=dict)


class Leaving(Message, frozen=True):
    """The front end finishes its requests and ends."""


class Taken(Message, frozen=True):
    """The front end routes by this or a later state."""

    number: int


class Figures(Message, frozen=True, kw_only=True):
    """The controller's figures for metrics and status pages."""

    num_tables: int = 0
    num_copies: int = 0
    num_problems: int = 0
    quality: PlacementQuality | None = None
    outlook: Outlook | None = None


class ClusterStateLog:
    """Records decisions, each with a higher number."""

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        routes: Routes,
        placement: PlacementController | None,
        epoch: int = 0,
    ) -> None:
        self._instance_registry = instance_registry
        self._routes = routes
        self._placement = placement
        self.state = ClusterState(number=0, epoch=epoch)

    def write(self) -> StateChange | None:
        """Bring `state` up to date; returns the change, if any."""
        standing = self._instance_registry.standing
        now = ClusterState(
            number=self.state.number,
            epoch=self.state.epoch,
            served=self._instance_registry.served,
            ranks=dict(self._routes.ranks),
            holdings=self._instance_registry.holdings,
            drains=self._instance_registry.drains.orders,
            warmed=self._instance_registry.drains.warmed,
            restarting=tuple(sorted(self._instance_registry.drains.restarting)),
            aliases=dict(self._instance_registry.aliases),
            aborts=self._instance_registry.aborts or (),
            ordered=standing is not None and standing.active,
        )
        router = self._routes.table
        if router is not None and self._placement is not None:
            table, name_of = self.state.table, self._instance_registry.name_of
            if router.version != self.state.table_version:
                table = {
                    name: tuple((name_of(index), phi) for index, phi in row)
                    for name, row in router.table.items()
                }
            now = replace(now, table=table, table_version=router.version, demand=self._placement.demand)
        if now == self.state:
            return None
        before, self.state = self.state, replace(now, number=now.number + 1)
        return StateChange.between(before, self.state)

    def recover(self, state: ClusterState) -> None:
        """Continue from a front end's state of the earlier controller.

        Of adapters, tables and orders the higher number counts.  Numbers continue above all known numbers.
        """
        self._instance_registry.drains.learn(state.drains)
        if state.aliases:
            from moe_lora.dist.cluster.aliases import learn

            learn(self._instance_registry.aliases, state.aliases)
        self.state = replace(self.state, number=max(self.state.number, state.number))
        self._instance_registry.recover(state.served)
        self._routes.ranks.update(state.ranks)
        if state.table_version > self._routes.table_version:
            take_table(state, self._routes, self._instance_registry)
            if self._placement is not None:
                self._placement.resume(state.demand)

    def learn_orders(self, state: ClusterState) -> None:
        """Learn unknown orders, aliases and unloads, even from a late state.

        Otherwise a drained instance would get requests, and a late instance bring an adapter back.
        """
        served, here = state.served, self._instance_registry.adapters
        gone = {one: n for one, n in served.versions.items() if one not in {*served.adapters, *here}}
        self._instance_registry.recover(Served({}, gone))
        drains, aliases = self._instance_registry.drains, self._instance_registry.aliases
        drains.learn({name: order for name, order in state.drains.items() if name not in drains.orders})
        if new := {name: one for name, one in state.aliases.items() if name not in aliases}:
            from moe_lora.dist.cluster.aliases import learn

            learn(aliases, new)

    def count_above(self, state: ClusterState) -> None:
        """Number the state above a late state."""
        self.state = replace(self.state, number=max(self.state.number, state.number) + 1)


def follow_aborts(instance_registry: InstanceRegistry, aborts: tuple[AbortOrder, ...]) -> None:
    """Execute another process's controller's new aborts.  The first state's precede the requests here."""
    known, instance_registry.aborts = instance_registry.aborts, aborts
    for one in aborts:
        if known is not None and one not in known and instance_registry.on_abort is not None:
            instance_registry.on_abort(one.scope)


def take_table(state: ClusterState, routes: Routes, instance_registry: InstanceRegistry) -> None:
    """Route by a state's table, if adapters are divided over instances."""
    if routes.table is not None:
        number_of = instance_registry.number_of
        table = {name: [(number_of(one), phi) for one, phi in row] for name, row in state.table.items()}
        routes.take(table, instance_registry.instances)
        routes.table.version = state.table_version
