# SPDX-License-Identifier: Apache-2.0
"""Values of cached nodes, as pure functions over columns.

N: valued nodes, one entry per column each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

EDGES_S: Floats = 0.1 * np.sqrt(2.0) ** np.arange(34)
"""[B - 1]: edges of the bins of age, 0.1 s to 2.6 h."""
NUM_BINS = len(EDGES_S) + 1
NUM_LEVELS = 6
"""1, 2 to 3, ... and 32 or more uses: widely shared nodes have another rhythm than dialogues."""
DEPTHS = (64, 256, 1024, 4096)
"""Tokens of the whole prefix: short prompts return less often."""
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
    """per_s [C, B]: most uses per second of keeping a node, by class and age."""

    per_s: Floats

    def of(self, uses: Floats, depth: NDArray[np.int64], idle_s: Floats) -> Floats:
        """[N]: by classes (`classes_of`) and idle time."""
        return self.per_s[classes_of(uses, depth), bins_of(idle_s)]


def rates_from(hits: Floats, time_s: Floats) -> ReuseRates:
    """per_s[c, b] = max over e >= b of (1 + hits) / (end of bin e + time), sums over the bins b to e.

    The Gittins index of keeping a node, with a prior.
    hits [C, B]: uses at this age.  time_s [C, B]: nodes' time at this age.
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
    """Nodes to be valued.  All [N].

    is_adapter bool; pages int64; visits float64: total; recent float64: decayed visits (0 for KV); idle_s
    float64: since the last use; backed bool: on the host; first_token, num_tokens int64: place in the
    prompt (0 for adapters); turn int64: earlier nodes of the dialogue (0 for adapters); wanted int64:
    queued requests that need the node; adapter_ready bool: the adapter is on this device or the LoRA
    Server.
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
    """The whole cache at the moment of a decision.

    num_queries: requests so far, the denominator of probabilities.  adapter_visits [A]: by adapter.
    batch_size: mean of 5 s.  num_adapters: on the device.  reuse: learned reuse of KV by age, or None.
    """

    num_queries: int
    adapter_visits: NDArray[np.float64]
    batch_size: float
    num_adapters: int
    reuse: ReuseRates = NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A policy's traits besides values.

    keeps_dependencies: KV is on the device only with the adapter.  keeps_history: KV of finished requests
    stays.  uses_host_for_kv: evicted history goes to the host.  swaps_in: `tick` prefetches.  backs_up:
    `tick` copies history ahead of need.  looks_ahead: queued requests count.  learns_reuse: needs
    `CacheLoad.reuse`.  exchanges: `tick` replaces less valued nodes.  values_per_page: `values` are per
    page. drops_backed_first: backed nodes are evicted first.  adapter_share: part of the device for
    adapters only; None: no partition.  keeps_idle_adapters: adapters without requests stay.  needs_visits:
    a node without visits has no value.
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
        """[N], >= 0: loss without the node on the device, from its own row and `load` alone."""
        ...

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        """[N], >= 0: loss without the node on the host."""
        ...

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        """True to copy host KV to the device for a request, False to recompute."""
        ...


BEYOND, REST, WITHIN = range(3)
"""In which order nodes give way: beyond their tenant's share; others of such a tenant; within shares."""
NOBODY, FIRST = 0, 1
"""Numbers of tenants: of what no tenant has asked for, and of the first tenant."""


class Asker(NamedTuple):
    """A tenant, and its weight among those that fill an arena."""

    tenant: str = ""
    share: float = 1.0


ANYBODY = Asker()
"""Where there are no tenants."""


def ascending(rows: NDArray[np.int64], values: Floats, count: int) -> NDArray[np.int64]:
    """The `count` rows of least value, in order, ties by position; all if fewer."""
    if len(rows) > count:
        kept = np.sort(np.argpartition(values, count)[:count])
        rows, values = rows[kept], values[kept]
    return rows[np.argsort(values, kind="stable")]
