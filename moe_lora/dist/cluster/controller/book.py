"""The state that the controller gives to its front ends, and gets back from them when it starts anew."""

from __future__ import annotations

from msgspec.structs import replace

from moe_lora.dist.cluster.instances import Roster
from moe_lora.policies.phi_routing import PhiRouting
from .placement_controller import PlacementController
from .routes import Routes

from .cluster_state import ClusterState


class StateBook:
    """Writes down what is decided, each time with a higher number.

    placement: None if adapters are not divided over instances.
    """

    def __init__(self, roster: Roster, routes: Routes, placement: PlacementController | None) -> None:
        self._roster = roster
        self._routes = routes
        self._placement = placement
        self.state = ClusterState(number=0)
        self._table: dict[str, tuple[tuple[str, float], ...]] = {}
        self._table_version = 0

    def write(self) -> bool:
        """Bring `state` up to date; whether that changed it."""
        now = ClusterState(
            number=self.state.number,
            served=self._roster.served,
            ranks=dict(self._routes.ranks),
            holdings=self._roster.holdings,
        )
        router = self._routes.router
        if isinstance(router, PhiRouting) and self._placement is not None:
            if router.version != self._table_version:
                self._table = {
                    adapter: tuple((self._roster.name_of(index), phi) for index, phi in row)
                    for adapter, row in router.table.items()
                }
                self._table_version = router.version
            demand = self._placement.demand
            now = replace(now, table=self._table, table_version=router.version, demand=demand)
        if now == self.state:
            return False
        self.state = replace(now, number=now.number + 1)
        return True

    def recover(self, state: ClusterState) -> None:
        """Go on from what a front end had from the controller before this one.

        Of each adapter the higher version counts, as `Served.joined` says; of tables the one with the higher
        number, with the demand that it was made for.  Numbers go on above all that were heard of.
        """
        self.state = replace(self.state, number=max(self.state.number, state.number))
        self._roster.recover(state.served)
        self._routes.ranks.update(state.ranks)
        router = self._routes.router
        if isinstance(router, PhiRouting) and state.table_version > router.version:
            number_of = self._roster.number_of
            router.swap(
                {name: [(number_of(one), phi) for one, phi in row] for name, row in state.table.items()}
            )
            router.version = state.table_version
            if self._placement is not None:
                self._placement.resume(state.demand)

    def count_above(self, state: ClusterState) -> None:
        """Give the state a higher number than one that came too late to be recovered."""
        self.state = replace(self.state, number=max(self.state.number, state.number) + 1)
