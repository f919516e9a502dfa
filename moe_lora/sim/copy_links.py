# SPDX-License-Identifier: Apache-2.0
"""Links between a simulated instance's host and device, for a cache's orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moe_lora.cache.orders import Copy, LoadAdapter, Namespace, Order

from .events import EventQueue


class CopyLinks:
    """One link to the device, one from the device; each carries out one order at a time.

    Orders with a waiting request overtake prefetches.  Adapter files are in main memory, so a load takes as
    long as a copy from the host arena.

    load_pages: pages of an adapter's order.  on_done: called with the copy id at the end of a copy.
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
        """Queue the orders.  urgent: before the rest."""
        for order in orders:
            (self._urgent if urgent else self._ahead)[_direction(order)].append(order)
        for direction in (0, 1):
            self._begin(direction)

    def hurry(self, namespace: Namespace) -> None:
        """A request waits for this adapter: its orders overtake the rest."""
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
    """0: to the device, 1: from the device."""
    return 0 if isinstance(order, LoadAdapter) or (isinstance(order, Copy) and order.to_device) else 1
