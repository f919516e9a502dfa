"""This project's policy: time saved per page and second, from all that is known about the next requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .caching import CacheCosts, CacheLoad, Floats, NodeColumns, Traits


@dataclass(frozen=True, kw_only=True)
class CostAware:
    """value = uses per second x seconds to have the node back / pages.

    Back: an adapter is copied from the host, or loaded from its files; KV is computed anew, or copied from
    the host where it is there and that is faster.  A short prefix is cheap to compute, a block deep in a
    long one is not, since its tokens attend to all before them.
    Uses: visits decayed with recent_s, per recent_s (adapters: adapter_recent_s; a conversation goes on soon
    or not at all, the popularity of adapters lasts), and for each queued request that needs the node one
    more within queue_s.  KV of an adapter that is not ready counts unready_share of that: its request waits
    for the adapter meanwhile anyway.
    """

    costs: CacheCosts
    recent_s: float = 20.0
    adapter_recent_s: float = 120.0
    queue_s: float = 2.0
    unready_share: float = 0.5

    @property
    def traits(self) -> Traits:
        return Traits(backs_up=True, looks_ahead=True, values_per_page=True, learns_reuse=True, exchanges=True, drops_backed_first=False)

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        move_s = self.costs.move_s(nodes.pages)
        load_s = np.where(nodes.backed, move_s, self.costs.load_s(nodes.pages))
        compute_s = self.costs.recompute_s(nodes.first_token, nodes.num_tokens)
        history_s = np.where(nodes.backed, np.minimum(move_s, compute_s), compute_s)
        history_s *= np.where(nodes.adapter_ready, 1.0, self.unready_share)
        share = nodes.num_tokens / np.maximum(nodes.first_token + nodes.num_tokens, 1)
        back_s = np.where(nodes.is_adapter, load_s + self.costs.wait_s, history_s + share * self.costs.wait_s)
        return self._uses_per_s(nodes, load) * back_s / np.maximum(nodes.pages, 1)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        move_s = self.costs.move_s(nodes.pages)
        compute_s = self.costs.recompute_s(nodes.first_token, nodes.num_tokens)
        load_s = self.costs.load_s(nodes.pages)
        saved_s = np.maximum(np.where(nodes.is_adapter, load_s, compute_s) - move_s, 0.0)
        return self._uses_per_s(nodes, load) * saved_s / np.maximum(nodes.pages, 1)

    def _uses_per_s(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        uses = np.where(nodes.is_adapter, nodes.recent, np.maximum(nodes.visits, nodes.turn))
        depth = nodes.first_token + nodes.num_tokens
        return load.reuse.of(uses, depth, nodes.idle_s) + nodes.wanted / self.queue_s

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return self.costs.move_s(num_pages) < self.costs.recompute_s(first_token, num_tokens)
