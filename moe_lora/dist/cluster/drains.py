# SPDX-License-Identifier: Apache-2.0
"""Which instances get no requests while others take some: by an operator, or to be started again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moe_lora.engine.client.messages import DrainOrder

MAX_UNDRAINED = 256
"""Of undrained instances the latest orders that are kept."""


class Drains:
    """What was said of each instance, by its name.

    The controller keeps it, and the only front end where there is no other controller.  It tells front ends
    (`ClusterState`) and instances (`messages.Hello`), which remember it for a controller that knows less; of
    two accounts of an instance the order with the higher number counts.

    An order to undrain is kept since a front end or an instance that missed it may still tell of the drain
    before it, and nobody knows when the last of them is gone.  So the latest `MAX_UNDRAINED` are kept: who
    was away for more may bring an old drain back, until it is undrained again.  Drains are all kept, since
    an instance may come back at any time: undrain those that are gone for good.

    on_drained: called with the names of those that are drained from now on.
    """

    def __init__(self, on_drained: Callable[[frozenset[str]], None] = lambda names: None) -> None:
        self.orders: Mapping[str, DrainOrder] = {}
        """The last order to each instance that had one, but for the oldest undrained ones."""
        self.restarting: frozenset[str] = frozenset()
        """Those that get no requests until they are started again."""
        self.names: frozenset[str] = frozenset()
        """Both kinds."""
        self._on_drained = on_drained

    @property
    def by_operator(self) -> frozenset[str]:
        """Those that get no requests until they are undrained."""
        return frozenset(name for name, order in self.orders.items() if order.drained)

    def order(self, name: str, *, drained: bool) -> DrainOrder:
        """An operator's order from now on, later than all that were heard of."""
        number = 1 + max((order.number for order in self.orders.values()), default=0)
        order = DrainOrder(drained, number)
        self.follow({**self.orders, name: order}, self.restarting)
        return order

    def restart(self, names: Iterable[str]) -> None:
        """From now on these, and no others, get no requests until they are started again."""
        self.follow(self.orders, names)

    def learn(self, orders: Mapping[str, DrainOrder]) -> None:
        """Take over what others remember, as far as it is later than what is known here."""
        never = DrainOrder()
        later = {
            name: one for name, one in orders.items() if one.number > self.orders.get(name, never).number
        }
        self.follow({**self.orders, **later}, self.restarting)

    def follow(self, orders: Mapping[str, DrainOrder], restarting: Iterable[str]) -> None:
        """From now on all is as the controller says."""
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
