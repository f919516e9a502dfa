# SPDX-License-Identifier: Apache-2.0
"""Caching policies by setting name: LRU systems, FastLibra and its ablations, and cost_aware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moe_lora.timing.host_times import Amount, CacheCosts

from .caching import CacheLoad, CachingPolicy, Floats, NodeColumns, Traits


@dataclass(frozen=True, kw_only=True)
class Recency:
    """value = 1 / (1 + idle_s): the most recently used stays, of any kind."""

    traits: Traits = field(default_factory=Traits)
    adapter_recent_s: float = 60.0

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return 1 / (1 + nodes.idle_s)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return self.values(nodes, load)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True


def lru() -> Recency:
    """One pool, independent adapters and KV, moved on demand."""
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False))


def fastlibra_wos() -> Recency:
    """FastLibra-WOS: tree and thresholds without the cost model (section 6.7)."""
    return Recency(traits=Traits(keeps_dependencies=True))


def static_partition(adapter_share: float = 0.2) -> Recency:
    """vLLM in FastLibra's comparison: a fixed part of the device for adapters, LRU in both parts, LRU offload
    to the host, loads on demand (sections 2.2 and 6.1).
    """
    if not 0 < adapter_share < 1:
        raise ValueError(f"adapter_share={adapter_share} must lie between 0 and 1")
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False, adapter_share=adapter_share))


def slora() -> Recency:
    """S-LoRA: one pool; KV goes with the request, adapters load on demand and leave when idle (section
    6.1).
    """
    return Recency(
        traits=Traits(
            keeps_dependencies=False,
            keeps_history=False,
            keeps_idle_adapters=False,
            uses_host_for_kv=False,
            swaps_in=False,
        )
    )


MAX_EXPONENT = 700.0
"""Limit against overflow of exp; such old nodes are worth nothing."""


def required_adapters(load: CacheLoad) -> float:
    """Low_lora = sum over adapters of 1 - (1 - prob_i)^BS, prob_i = visits_i / queries (equation 3)."""
    probability = np.minimum(load.adapter_visits / load.num_queries, 1.0)
    return float((1 - (1 - probability) ** load.batch_size).sum())


def adapter_reward(load: CacheLoad) -> float:
    """LoRA_Eval = max(1, Low_lora / Now_lora) (equation 4), with Now_lora >= 1."""
    return max(1.0, required_adapters(load) / max(1, load.num_adapters))


@dataclass(frozen=True, kw_only=True)
class FastLibra:
    """Eval_i = LoRA_Eval_i x cost_i x prob_i x (1 - sigmoid(t_i / time_unit_s)) (equations 5 and 6).

    cost: seconds to copy the node from the host; prob: visits per query since creation; t: time since the
    last use, in an unspecified unit in the paper.  LoRA_Eval is 1 for KV.  rewards_adapters False:
    FastLibra-WOL.  keeps_dependencies False: FastLibra-WOM.  Source: FastLibra, sections 5.1, 5.2
    (equations 3 to 6), 6.6 to 6.8.
    """

    costs: CacheCosts
    time_unit_s: float = 60.0
    rewards_adapters: bool = True
    keeps_dependencies: bool = True
    adapter_recent_s: float = 60.0

    @property
    def traits(self) -> Traits:
        return Traits(keeps_dependencies=self.keeps_dependencies, needs_visits=True)

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        probability = np.minimum(nodes.visits / load.num_queries, 1.0)
        decay = 1 / (1 + np.exp(np.minimum(nodes.idle_s / self.time_unit_s, MAX_EXPONENT)))
        values = self.costs.move_s(nodes.pages) * probability * decay
        if self.rewards_adapters:
            values[nodes.is_adapter] *= adapter_reward(load)
        return values

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return self.values(nodes, load)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class CostAware:
    """value = uses per second x seconds that a request loses without the node / pages.

    Uses: learned by kind and idle time (`policies.caching.caching`); plus one within queue_s per queued
    request.  Seconds, on the device: a copy from the host or a load, or a recomputation if faster, times 1
    + behind_per_s x length for queued requests (M/G/1), plus wait_s, the missed step.  unready_share:
    weight of KV without the adapter.  Seconds, on the host: the excess of computing or loading over
    copying. behind_per_s: default for 6 requests/s at utilisation 0.8.
    """

    costs: CacheCosts
    adapter_recent_s: float = 120.0
    queue_s: float = 2.0
    unready_share: float = 0.5
    behind_per_s: float = 30.0

    @property
    def traits(self) -> Traits:
        return Traits(
            backs_up=True,
            looks_ahead=True,
            learns_reuse=True,
            exchanges=True,
            values_per_page=True,
            drops_backed_first=False,
        )

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        wait_s, move_s = self.costs.wait_s, self.costs.move_s(nodes.pages)
        load_s = np.where(nodes.backed, move_s, self.costs.load_s(nodes.pages))
        compute_s = self._compute_s(nodes.first_token, nodes.num_tokens)
        history_s = np.where(nodes.backed, np.minimum(move_s, compute_s), compute_s)
        history_s *= np.where(nodes.adapter_ready, 1.0, self.unready_share)
        share = nodes.num_tokens / np.maximum(nodes.first_token + nodes.num_tokens, 1)
        lost_s = np.where(nodes.is_adapter, load_s + wait_s, history_s + share * wait_s)
        return self._uses_per_s(nodes, load) * lost_s / np.maximum(nodes.pages, 1)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        compute_s = self._compute_s(nodes.first_token, nodes.num_tokens)
        otherwise_s = np.where(nodes.is_adapter, self.costs.load_s(nodes.pages), compute_s)
        saved_s = np.maximum(otherwise_s - self.costs.move_s(nodes.pages), 0.0)
        return self._uses_per_s(nodes, load) * saved_s / np.maximum(nodes.pages, 1)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return self.costs.move_s(num_pages) < self._compute_s(first_token, num_tokens)

    def _compute_s(self, first_token: Amount, num_tokens: Amount) -> Amount:
        alone_s = self.costs.recompute_s(first_token, num_tokens)
        return alone_s * (1 + self.behind_per_s * alone_s)

    def _uses_per_s(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        uses = np.where(nodes.is_adapter, nodes.recent, np.maximum(nodes.visits, nodes.turn))
        depth = nodes.first_token + nodes.num_tokens
        learned = np.where(uses > 0, load.reuse.of(uses, depth, nodes.idle_s), 0.0)
        return learned + nodes.wanted / self.queue_s


CACHING_POLICIES: dict[str, Callable[[CacheCosts], CachingPolicy]] = {
    "cost-aware": lambda costs: CostAware(costs=costs),
    "fastlibra": lambda costs: FastLibra(costs=costs),
    "fastlibra-wom": lambda costs: FastLibra(costs=costs, keeps_dependencies=False),
    "fastlibra-wos": lambda costs: fastlibra_wos(),
    "fastlibra-wol": lambda costs: FastLibra(costs=costs, rewards_adapters=False),
    "lru": lambda costs: lru(),
    "static": lambda costs: static_partition(),
    "slora": lambda costs: slora(),
}


def make_caching_policy(name: str, costs: CacheCosts) -> CachingPolicy:
    """The named policy at its defaults.  Raises ValueError for an unknown name."""
    if name not in CACHING_POLICIES:
        raise ValueError(f"cache policy {name!r} is unknown; choose one of {', '.join(CACHING_POLICIES)}")
    return CACHING_POLICIES[name](costs)
