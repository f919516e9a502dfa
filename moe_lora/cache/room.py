"""Pages for what needs them now, at the cost of what the policy values least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .clearing import Clearing
from .flags import HAS_DEVICE_PAGES
from .node import Node
from .ranking import Kind, Ranking
from .windows import blocked_rows, evict, idle_pages, row_costs


@dataclass(frozen=True)
class Limits:
    """Upper bounds on the device: pages of KV (cached ones included) and of adapters, adapters with pages."""

    kv_pages: int
    adapter_pages: int
    num_adapters: int


class Room:
    """Takes pages, evicting at once and without copies where too few are free.

    partitioned: KV gives way to KV only.  saves: see `Clearing`.  A run of pages is found whenever some
    window of that length has no blocked page (`blocked_rows`).
    """

    def __init__(self, ranking: Ranking, limits: Limits, *, partitioned: bool, saves: bool) -> None:
        self.ranking = ranking
        self.residence = ranking.residence
        self.limits = limits
        self._partitioned = partitioned
        self._clearing = Clearing(ranking, saves=saves)

    def take_kv(self, num_pages: int, owner: int, now_s: float) -> list[int] | None:
        """Device pages for KV; None, and nothing evicted, if pinned nodes are in the way."""
        device = self.residence.device
        over = device.num_kv + num_pages - self.limits.kv_pages
        if num_pages > device.num_free or over > 0:
            kind = Kind.KV if self._partitioned else Kind.ANY
            if not (
                self._can_reclaim(over, Kind.KV) and self._can_reclaim(num_pages - device.num_free, kind)
            ):
                return None
            self._reclaim(over, Kind.KV, now_s)
            self._reclaim(num_pages - device.num_free, kind, now_s)
        return device.take(num_pages, owner)

    def take_adapter(self, node: Node, now_s: float) -> list[int] | None:
        """Device pages for an adapter, a run per layer; None if that can't be had now."""
        assert node.layer_pages is not None
        if not self._could_take_adapter(node):
            return None
        device, limits = self.residence.device, self.limits
        while (
            self.residence.num_device_adapters >= limits.num_adapters
            or device.num_adapter + node.num_pages > limits.adapter_pages
        ):
            if not self._evict_adapter(now_s):
                return None
        pages = device.take_runs(node.layer_pages, node.row)
        return self._clearing.take_runs(node, now_s) if pages is None else pages

    def take_free_runs(self, node: Node) -> list[int] | None:
        """As `take_adapter`, evicting nothing."""
        assert node.layer_pages is not None
        device, limits = self.residence.device, self.limits
        if device.num_adapter + node.num_pages > limits.adapter_pages:
            return None
        if self.residence.num_device_adapters >= limits.num_adapters:
            return None
        return device.take_runs(node.layer_pages, node.row)

    def _can_reclaim(self, num_pages: int, kind: Kind) -> bool:
        """Whether so many pages may leave; looks at all nodes only if the victims at hand are too few."""
        return (
            num_pages <= 0
            or self.ranking.has_victims(kind, num_pages)
            or num_pages <= idle_pages(self.ranking, only_kv=kind is Kind.KV)
        )

    def _reclaim(self, num_pages: int, kind: Kind, now_s: float) -> None:
        """Drop device leaves until so many pages are free; of the last one only the end, if it is KV."""
        while num_pages > 0:
            victim = self.ranking.victim(kind, now_s)
            assert victim is not None
            if not victim.is_adapter and victim.num_pages > num_pages:
                head = self.residence.split(victim, victim.num_pages - num_pages)
                self.ranking.put_back(head, kind)
            num_pages -= victim.num_pages
            self.residence.drop(victim)

    def _evict_adapter(self, now_s: float) -> bool:
        """Evict the adapter of least value per page, with its KV where that can't be there without it."""
        columns = self.ranking.columns
        rows = columns.where(HAS_DEVICE_PAGES)
        rows = rows[columns.is_adapter[rows] & (columns.pages[rows] > 0)]
        rows = rows[~blocked_rows(self.ranking)[rows]]
        if not rows.size:
            return False
        victim = columns.nodes[int(rows[np.argmin(row_costs(self.ranking, now_s)[rows])])]
        assert victim is not None
        evict(self.ranking, victim)
        return True

    def _could_take_adapter(self, node: Node) -> bool:
        """Whether evicting all that may leave would do, wherever its pages lie; if not, nothing should."""
        columns, limits = self.ranking.columns, self.limits
        blocked = blocked_rows(self.ranking)
        stay = columns.where(HAS_DEVICE_PAGES)
        stay = stay[columns.is_adapter[stay] & (columns.pages[stay] > 0) & blocked[stay]]
        return (
            len(stay) < limits.num_adapters
            and int(columns.pages[stay].sum()) + node.num_pages <= limits.adapter_pages
            and self.residence.device.num_free + idle_pages(self.ranking) >= node.num_pages
        )
