"""Placements made while requests come, as the front end's controller makes them, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_lora.policies.token_meter import TokenMeter
from moe_lora.policies.phi_routing import PhiRouting

from .system_config import PlacementConfig
from .events import EventQueue
from .local_adapters import LocalAdapters
from .requests import SimRequest


class SimPlacement:
    """Asks a planner every interval, routes by its table, and tells hosts what to keep.

    Tokens count when their request is done; placing takes no time.  An adapter that comes to an instance is
    fetched when it is first used there.  goes_on: whether there is another interval.
    held: adapters of each instance by each table.
    """

    def __init__(
        self,
        config: PlacementConfig,
        router: PhiRouting,
        sources: Sequence[LocalAdapters],
        events: EventQueue,
        goes_on: Callable[[], bool],
    ) -> None:
        self.held: list[list[int]] = []
        self._planner = config.planner()
        self._interval_s = config.interval_s
        self._router = router
        self._sources = sources
        self._events = events
        self._goes_on = goes_on
        self._meter = TokenMeter()

    def begin(self) -> None:
        """The first table; hosts have what it says."""
        for source, names in zip(self._sources, self._place(0.0), strict=True):
            source.begin_with(names)
        self._events.at(self._interval_s, self._step)

    def count(self, request: SimRequest) -> None:
        """The request is done."""
        self._meter.add(request.adapter, request.num_tokens)

    def _step(self) -> None:
        if not self._goes_on():
            return
        for source, names in zip(self._sources, self._place(self._interval_s), strict=True):
            source.keep(names)
        self._events.at(self._events.now_s() + self._interval_s, self._step)

    def _place(self, length_s: float) -> list[set[str]]:
        table = {name: list(row) for name, row in self._planner(self._meter.take(), length_s).items()}
        self._router.swap(table)
        names: list[set[str]] = [set() for _ in self._sources]
        for name, row in table.items():
            for index, _ in row:
                names[index].add(name)
        self.held.append([len(here) for here in names])
        return names
