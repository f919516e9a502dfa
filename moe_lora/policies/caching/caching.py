# SPDX-License-Identifier: Apache-2.0
"""Values of N cached nodes, over columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_lora.timing.host_times import Amount, CacheCosts

Floats = NDArray[np.floating]

EDGES_S: Floats = 0.1 * np.sqrt(2.0) ** np.arange(34)
"""[B - 1]: edges of age bins, 0.1 s to 2.6 h."""
NUM_BINS = len(EDGES_S) + 1
NUM_LEVELS = 6
"""Levels by uses: 1, 2 to 3, ... and 32 or more.  Widely shared nodes have another rhythm than dialogues."""
DEPTHS = (64, 256, 1024, 4096)
"""Bounds on tokens of the whole prefix.  Short prompts return less often."""
NUM_CLASSES = NUM_LEVELS * (len(DEPTHS) + 2)
"""Levels of adapters by recent visits, then of KV by uses, for each depth."""
STARTS_S: Floats = np.concatenate(([0.0], EDGES_S))
WIDTHS_S: Floats = np.diff(np.concatenate((STARTS_S, [2 * EDGES_S[-1]])))


def classes_of(uses: Floats, depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N]: class of nodes by uses and depth in tokens (0: adapters)."""
    levels = np.minimum(np.log2(np.maximum(uses, 1)).astype(np.int64), NUM_LEVELS - 1)
    return levels + NUM_LEVELS * ((depth > 0) + np.searchsorted(DEPTHS, depth))


def bins_of(age_s: Floats) -> NDArray[np.int64]:
    """[N]: bin of each age."""
    return np.searchsorted(EDGES_S, age_s, side="right")


@dataclass(frozen=True)
class ReuseRates:
    """per_s [C, B]: most uses per second, by class and age."""

    per_s: Floats

    def of(self, uses: Floats, depth: NDArray[np.int64], idle_s: Floats) -> Floats:
        """[N]: by class and idle time."""
        return self.per_s[classes_of(uses, depth), bins_of(idle_s)]


def rates_from(hits: Floats, time_s: Floats) -> ReuseRates:
    """per_s[c, b] = max over e >= b of (1 + hits) / (end of bin e + time), sums over the bins b to e.

    The Gittins index of keeping a node, with a prior.  hits [C, B]: uses at this age.  time_s [C, B]: nodes'
    time at this age.
    """
    best = np.zeros_like(hits)
    ends_s = STARTS_S + WIDTHS_S
    for first in range(hits.shape[1]):
        gained = 1 + np.cumsum(hits[:, first:], axis=1)
        best[:, first] = (gained / (ends_s[first:] + np.cumsum(time_s[:, first:], axis=1))).max(axis=1)
    return ReuseRates(best)


NOTHING_KNOWN = rates_from(np.zeros((NUM_CLASSES, NUM_BINS)), np.zeros((NUM_CLASSES, NUM_BINS)))


@dataclass(frozen=True)
class NodeColumns:
    """Nodes to be valued, all [N].

    is_adapter bool; pages int64; visits float64; recent float64: decayed visits (0 for KV); idle_s float64;
    backed bool: on the host; first_token, num_tokens int64: place in the prompt (0 for adapters); turn int64:
    earlier nodes of the dialogue (0 for adapters); wanted int64: queued requests; adapter_ready bool: the
    adapter is on this device or the LoRA Server.
    """

    is_adapter: NDArray[np.bool_]
    pages: NDArray[np.int64]
    visits: NDArray[np.float64]
    recent: NDArray[np.float64]
    idle_s: NDArray[np.float64]
    backed: NDArray[np.bool_]
    first_token: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    wanted: NDArray[np.int64]
    turn: NDArray[np.int64]
    adapter_ready: NDArray[np.bool_]


@dataclass(frozen=True)
class CacheLoad:
    """The whole cache at a decision.

    num_queries: so far.  adapter_visits [A].  batch_size: mean of 5 s.  num_adapters: on the device.
    """

    num_queries: int
    adapter_visits: NDArray[np.float64]
    batch_size: float
    num_adapters: int
    reuse: ReuseRates = NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A policy's traits besides values.

    keeps_dependencies: device KV only with the adapter.  uses_host_for_kv: evicted history goes to the host.
    swaps_in: `tick` prefetches.  backs_up: `tick` copies history ahead of need.  exchanges: `tick` replaces
    less valued nodes.  adapter_share: part of the device for adapters only.  needs_visits: a node without
    visits has no value.
    """

    keeps_dependencies: bool = True
    keeps_history: bool = True
    keeps_idle_adapters: bool = True
    uses_host_for_kv: bool = True
    swaps_in: bool = True
    backs_up: bool = False
    looks_ahead: bool = False
    learns_reuse: bool = False
    exchanges: bool = False
    values_per_page: bool = False
    drops_backed_first: bool = True
    adapter_share: float | None = None
    needs_visits: bool = False


class CachingPolicy(Protocol):
    """Values nodes: higher values stay longer.  No state, no effects."""

    @property
    def traits(self) -> Traits: ...

    @property
    def adapter_recent_s(self) -> float:
        """Time constant of `NodeColumns.recent`."""
        ...

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        """[N], >= 0: loss without the node on the device, from its row and `load` alone."""
        ...

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        """[N], >= 0: loss without the node on the host."""
        ...

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        """True to copy host KV to the device, False to recompute."""
        ...


BEYOND, REST, WITHIN = range(3)
"""Eviction order: beyond the tenant's share, others of such a tenant, within shares."""
NOBODY, FIRST = 0, 1
"""Tenant numbers: of no tenant, and of the first."""


class Asker(NamedTuple):
    """A tenant, and its weight in an arena."""

    tenant: str = ""
    share: float = 1.0


ANYBODY = Asker()
"""Without tenants."""


def ascending(rows: NDArray[np.int64], values: Floats, count: int) -> NDArray[np.int64]:
    """The `count` rows of least value, in order, ties by position."""
    if len(rows) > count:
        kept = np.sort(np.argpartition(values, count)[:count])
        rows, values = rows[kept], values[kept]
    return rows[np.argsort(values, kind="stable")]


@dataclass(frozen=True, kw_only=True)
class Recency:
    """value = 1 / (1 + idle_s)."""

    traits: Traits = field(default_factory=Traits)
    adapter_recent_s: float = 60.0

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return 1 / (1 + nodes.idle_s)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return self.values(nodes, load)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True


def lru() -> Recency:
    """One pool, independent adapters and KV."""
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False))


def fastlibra_wos() -> Recency:
    """FastLibra-WOS: without the cost model (section 6.7)."""
    return Recency(traits=Traits(keeps_dependencies=True))


def static_partition(adapter_share: float = 0.2) -> Recency:
    """vLLM in FastLibra's comparison: a fixed part for adapters, LRU in both parts (sections 2.2 and 6.1)."""
    if not 0 < adapter_share < 1:
        raise ValueError(f"adapter_share={adapter_share} must lie between 0 and 1")
    return Recency(traits=Traits(keeps_dependencies=False, swaps_in=False, adapter_share=adapter_share))


def slora() -> Recency:
    """S-LoRA: one pool; KV goes with the request, adapters load on demand and leave when idle."""
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
"""Against overflow of exp."""


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

    cost: seconds to copy the node from the host; prob: visits per query; t: since the last use (no unit in
    the paper).  LoRA_Eval is 1 for KV.  rewards_adapters False: FastLibra-WOL. keeps_dependencies False:
    FastLibra-WOM.  Source: FastLibra, sections 5.1, 5.2, 6.6 to 6.8.
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

    Uses: learned by kind and idle time; plus one within queue_s per queued request.  Seconds, on the device:
    a copy, load or faster recomputation, times 1 + behind_per_s x length for queued requests (M/G/1), plus
    wait_s, the missed step; on the host: the excess of computing or loading over copying.  unready_share:
    weight of KV without the adapter.
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
    """The named policy at its defaults.  Raises ValueError."""
    if name not in CACHING_POLICIES:
        raise ValueError(f"cache policy {name!r} is unknown; choose one of {', '.join(CACHING_POLICIES)}")
    return CACHING_POLICIES[name](costs)
