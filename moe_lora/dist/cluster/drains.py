# SPDX-License-Identifier: Apache-2.0
"""Drained instances: no requests while other instances serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from moe_lora.engine.client.messages import DrainOrder

MAX_UNDRAINED = 256
"""Most remembered undrain orders."""
Warmed: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Adapters of instances that leave -> instances that have or load them, by the leaving name."""


class Drains:
    """The last order to each instance, by name; the higher number counts.

    Front ends and instances remember orders for a later controller.  Undrain orders are kept, since a process
    may still report the drain before; beyond `MAX_UNDRAINED` orders an old drain may come back.
    """

    def __init__(self, on_drained: Callable[[frozenset[str]], None] = lambda names: None) -> None:
        self.orders: Mapping[str, DrainOrder] = {}
        """Without the oldest undrains."""
        self.restarting: frozenset[str] = frozenset()
        """Instances under restart."""
        self.names: frozenset[str] = frozenset()
        """Both kinds."""
        self.warmed: Warmed = {}
        self._on_drained = on_drained

    @property
    def by_operator(self) -> frozenset[str]:
        """Instances drained by an operator."""
        return frozenset(name for name, order in self.orders.items() if order.drained)

    def order(self, name: str, *, drained: bool) -> DrainOrder:
        """An operator's new order, the latest."""
        number = 1 + max((order.number for order in self.orders.values()), default=0)
        order = DrainOrder(drained, number)
        self.follow({**self.orders, name: order}, self.restarting)
        return order

    def restart(self, names: Iterable[str]) -> None:
        """Set the instances under restart."""
        self.follow(self.orders, names)

    def warm(self, warmed: Warmed) -> None:
        """Note the places of adapters; the order to leave follows at once."""
        self.warmed = {**self.warmed, **warmed}

    def learn(self, orders: Mapping[str, DrainOrder]) -> None:
        """Learn later orders."""
        never = DrainOrder()
        later = {
            name: one for name, one in orders.items() if one.number > self.orders.get(name, never).number
        }
        self.follow({**self.orders, **later}, self.restarting)

    def follow(self, orders: Mapping[str, DrainOrder], restarting: Iterable[str]) -> None:
        """Follow the controller's orders."""
        before = self.names
        self.orders, self.restarting = _latest(orders), frozenset(restarting)
        self.names = self.by_operator | self.restarting
        if over := before - self.names:
            self.warmed = {name: places for name, places in self.warmed.items() if name not in over}
        if self.names - before:
            self._on_drained(self.names - before)


def _latest(orders: Mapping[str, DrainOrder]) -> dict[str, DrainOrder]:
    """All drains, and the latest `MAX_UNDRAINED` undrains."""
    undrained = sorted((one.number, name) for name, one in orders.items() if not one.drained)
    forgotten = {name for _, name in undrained[:-MAX_UNDRAINED]}
    return {name: one for name, one in orders.items() if name not in forgotten}
