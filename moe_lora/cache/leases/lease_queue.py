# SPDX-License-Identifier: Apache-2.0
"""The queue of instances for leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from moe_lora.policies.admission.admission import admissible

from .lease_shares import Standing
from .residency import ServedAdapter


@dataclass(frozen=True, eq=False)
class Waiter:
    """An instance in the queue for an adapter since arrival_s, for a tenant's request."""

    instance: str
    adapter: ServedAdapter
    arrival_s: float
    tenant: int

    @property
    def adapter_uid(self) -> tuple[int, int]:
        return self.adapter.uid, self.tenant  # for another tenant others may leave

    @property
    def takes_nothing(self) -> bool:
        """The adapter is already in use."""
        return self.adapter.num_running > 0

    def turn(self, standing: Standing[ServedAdapter]) -> float:
        return standing.turn(self.tenant, self.adapter.room)


class LeaseQueue:
    """First come first served over all instances; skips adapters without a place.  After starvation_s a
    waiter stops younger waiters.

    With several tenants, adapters in use are not stopped, and tenants within shares come first
    (`Standing.turn`).  standing: None for a single tenant.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._waiters: dict[tuple[str, str], Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    def get(self, instance: str, adapter_id: str) -> Waiter | None:
        return self._waiters.get((instance, adapter_id))

    def put(self, waiter: Waiter) -> None:
        """Append, or replace the instance's waiter for the same adapter."""
        key = waiter.instance, waiter.adapter.adapter_id
        if key not in self._waiters:
            waiter.adapter.num_waiting += 1
        self._waiters[key] = waiter

    def remove(self, waiter: Waiter) -> None:
        del self._waiters[waiter.instance, waiter.adapter.adapter_id]
        waiter.adapter.num_waiting -= 1

    def admissible(
        self,
        can_be_resident: Callable[[Waiter], bool],
        standing: Standing[ServedAdapter] | None,
        now_s: float,
    ) -> Iterator[Waiter]:
        """Waiters that may get a lease, in order; see `policies.admission.admission.admissible`."""
        queue = list(self)
        if standing is not None:
            queue.sort(key=partial(Waiter.turn, standing=standing))
        keeps = None if standing is None else attrgetter("takes_nothing")
        return admissible(queue, can_be_resident, now_s, self._starvation_s, keeps)

    def stops(self, waiter: Waiter, standing: Standing[ServedAdapter] | None, now_s: float) -> bool:
        """True if a starving waiter stops the youngest."""
        for older in self:
            if now_s - older.arrival_s <= self._starvation_s:
                return False
            if standing is None:
                return True
            if not waiter.takes_nothing and older.turn(standing) <= waiter.turn(standing):
                return True
        return False
