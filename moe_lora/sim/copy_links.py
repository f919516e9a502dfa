# SPDX-License-Identifier: Apache-2.0
"""The links between a simulated instance's host and its device, as a cache's orders use them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moe_lora.cache.orders import Copy, LoadAdapter, Namespace, Order

from .events import EventQueue


class CopyLinks:
    """One link towards the device, one away from it; each carries out one order at a time.

    Orders that a request waits for overtake those that were made ahead of need.  Adapters' files lie in main
    memory, so that loading one takes as long as copying it from the host arena.

    load_pages: pages of an adapter's order.  on_done: called with the copy id when its bytes are there.
    """

    def __init__(
        self,
        events: EventQueue,
        bytes_per_s: float,
        page_bytes: int,
        load_pages: Callable[[Namespace], int],
        on_done: Callable[[int], None],
        *,
        latency_s: float = 20e-6,
    ) -> None:
        self._events = events
        self._page_s = page_bytes / bytes_per_s
        self._latency_s = latency_s
        self._load_pages = load_pages
        self._on_done = on_done
        self._urgent: tuple[deque[Order], deque[Order]] = (deque(), deque())
        self._ahead: tuple[deque[Order], deque[Order]] = (deque(), deque())
        self._busy = [False, False]
        self.busy_s = [0.0, 0.0]

    def submit(self, orders: list[Order], *, urgent: bool) -> None:
        """Carry the orders out.  urgent: before those that are not."""
        for order in orders:
            (self._urgent if urgent else self._ahead)[_direction(order)].append(order)
        for direction in (0, 1):
            self._begin(direction)

    def hurry(self, namespace: Namespace) -> None:
        """A request waits for what is on its way of this adapter: let it overtake the rest."""
        ahead = self._ahead[0]
        needed = [order for order in ahead if order.namespace == namespace]
        for order in needed:
            ahead.remove(order)
            self._urgent[0].append(order)

    def _begin(self, direction: int) -> None:
        queue = self._urgent[direction] or self._ahead[direction]
        if self._busy[direction] or not queue:
            return
        order = queue.popleft()
        pages = (
            self._load_pages(order.namespace) if isinstance(order, LoadAdapter) else len(order.device_pages)
        )
        copy_s = self._latency_s + pages * self._page_s
        self._busy[direction] = True
        self.busy_s[direction] += copy_s
        self._events.at(self._events.now_s() + copy_s, lambda: self._end(direction, order.copy_id))

    def _end(self, direction: int, copy_id: int) -> None:
        self._busy[direction] = False
        self._on_done(copy_id)
        self._begin(direction)


def _direction(order: Order) -> int:
    """0: towards the device, 1: away from it."""
    return 0 if isinstance(order, LoadAdapter) or (isinstance(order, Copy) and order.to_device) else 1
