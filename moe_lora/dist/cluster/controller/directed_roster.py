"""The roster of a front end whose adapters a controller looks after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lora.core.errors import EngineDeadError

from moe_lora.engine.client.client import EngineClient
from moe_lora.dist.cluster.instances import Instance, Roster
from moe_lora.dist.cluster.served import Holding, Served, ServedAdapter


class DirectedRoster(Roster):
    """Instances take part as they are; one is no candidate for adapters of which it lacks what is served."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._holdings: Mapping[str, Holding] = {}
        self.directed = False
        """Whether the controller has said what is served; until then it is what instances have."""

    def join_as_it_is(
        self, instance: Instance, client: EngineClient, have: dict[str, ServedAdapter], incarnation: str
    ) -> None:
        """Put an instance into routing whose adapters a controller looks after.

        It is no candidate for those of which `have` lacks what is served, unless the controller, which may
        have brought them meanwhile, says that it holds them.  Raises EngineDeadError if the fleet was closed.
        """
        if self.closed.is_set():
            raise EngineDeadError("the instances were closed")
        if not self.directed:
            self.recover(Served.of(have))
        holding = self._holdings.get(instance.name)
        if holding is not None and holding.incarnation == incarnation:
            missing = set(holding.missing)
        else:
            missing = self.served.lacking(have)
        self._route_to(instance, client, missing, incarnation)

    def follow(self, served: Served, holdings: Mapping[str, Holding]) -> None:
        """From now on this is served, as a controller says, and its instances hold that.

        One that the controller does not see did not get what is new.
        """
        self.directed = True
        new = served.lacking(self._adapters)
        self._adapters, self._versions = dict(served.adapters), dict(served.versions)
        self._holdings = holdings
        for instance in self.instances:
            holding = holdings.get(instance.name)
            if holding is not None and holding.incarnation == instance.incarnation:
                instance.missing = set(holding.missing)
            else:
                instance.missing |= new
