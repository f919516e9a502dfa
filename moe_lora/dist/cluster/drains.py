# SPDX-License-Identifier: Apache-2.0
"""Drained instances: no requests while other instances serve, by an operator or for a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moe_lora.engine.client.messages import DrainOrder

MAX_UNDRAINED = 256
"""Kept orders of undrained instances, latest first."""


class Drains:
    """Orders for each instance, by name.

    Front ends (`ClusterState`) and instances (`messages.InstanceFacts`) remember the controller's orders for
    a later controller; the higher number counts.

    Undrain orders are kept, since a process that missed the order may still report the drain before; only
    the latest `MAX_UNDRAINED`: after a longer absence an old drain may come back.  All drains are kept,
    since an instance may return at any time: undrain instances gone for good.

    on_drained: called with the names of newly drained instances.
    """

    def __init__(self, on_drained: Callable[[frozenset[str]], None] = lambda names: None) -> None:
        self.orders: Mapping[str, DrainOrder] = {}
        """Last order to each instance, without the oldest undrains."""
        self.restarting: frozenset[str] = frozenset()
        """Instances without requests until a restart."""
        self.names: frozenset[str] = frozenset()
        """Both kinds."""
        self._on_drained = on_drained

    @property
    def by_operator(self) -> frozenset[str]:
        """Instances without requests until an undrain."""
        return frozenset(name for name, order in self.orders.items() if order.drained)

    def order(self, name: str, *, drained: bool) -> DrainOrder:
        """A new order of an operator, later than all known orders."""
        number = 1 + max((order.number for order in self.orders.values()), default=0)
        order = DrainOrder(drained, number)
        self.follow({**self.orders, name: order}, self.restarting)
        return order

    def restart(self, names: Iterable[str]) -> None:
        """Set the instances under restart."""
        self.follow(self.orders, names)

    def learn(self, orders: Mapping[str, DrainOrder]) -> None:
        """Learn later orders from others."""
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
        if self.names - before:
            self._on_drained(self.names - before)


def _latest(orders: Mapping[str, DrainOrder]) -> dict[str, DrainOrder]:
    """All drains, and the latest `MAX_UNDRAINED` other orders."""
    undrained = sorted((one.number, name) for name, one in orders.items() if not one.drained)
    forgotten = {name for _, name in undrained[:-MAX_UNDRAINED]}
    return {name: one for name, one in orders.items() if name not in forgotten}
