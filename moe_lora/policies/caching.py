"""What to keep on the device: values of cached nodes, as pure functions over columns.

N: nodes asked about, one entry per column each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .reuse import NOTHING_KNOWN, ReuseRates

Floats = NDArray[np.floating]
Amount = TypeVar("Amount", float, NDArray[Any])
"""One number, or a column of them."""


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """What it takes to have bytes or KV back.

    page_bytes; transfer_bytes_per_s: host to device; transfer_s: latency of one copy; disk_bytes_per_s: an
    adapter's files to the device; prefill_tokens_per_s: computing KV at the start of a prompt;
    attention_s_per_token2: more of it per token and token before it.  wait_s: what a request loses besides
    if anything it needs is missing: the others' step that begins without it.
    """

    page_bytes: int
    transfer_bytes_per_s: float = 20e9
    transfer_s: float = 20e-6
    disk_bytes_per_s: float = 2e9
    prefill_tokens_per_s: float = 10_000.0
    attention_s_per_token2: float = 1e-9
    wait_s: float = 0.02

    def move_s(self, pages: Amount) -> Amount:
        """Seconds to copy that many pages from host to device."""
        return self.transfer_s + pages * (self.page_bytes / self.transfer_bytes_per_s)

    def load_s(self, pages: Amount) -> Amount:
        """Seconds to load an adapter of that many pages from its files."""
        return self.transfer_s + pages * (self.page_bytes / self.disk_bytes_per_s)

    def recompute_s(self, first_token: Amount, num_tokens: Amount) -> Amount:
        """Seconds to compute KV anew: num_tokens of them after first_token others."""
        attended = num_tokens * (first_token + num_tokens / 2.0)
        return num_tokens / self.prefill_tokens_per_s + self.attention_s_per_token2 * attended


@dataclass(frozen=True)
class NodeColumns:
    """Nodes to be valued.  All [N].

    is_adapter bool; pages int64; visits float64: since the node was made, not decayed; recent float64:
    visits decayed by exp(-t / `adapter_recent_s`) up to the last one (0 for KV); idle_s float64: since the
    last use;
    backed bool: the host has it; first_token, num_tokens int64: where in its prompt a KV node lies (0
    for adapters); turn int64: nodes of its dialogue up to it, or the uses of what had
    been dropped in its place and one more (0 for adapters); wanted int64: queued requests
    that need it; adapter_ready bool: its adapter (itself, for an adapter) is on this device or the LoRA
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

    num_queries: requests so far, the denominator of probabilities.  adapter_visits [A]: visits of every
    adapter.  batch_size: mean of the last 5 s.  num_adapters: now on the device.  reuse: how soon KV of an
    age is used again, for policies that learn it.
    """

    num_queries: int
    adapter_visits: NDArray[np.float64]
    batch_size: float
    num_adapters: int
    reuse: ReuseRates = NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a policy does besides valuing.

    keeps_dependencies: KV stays on the device only while its adapter does.  keeps_history: KV of finished
    requests stays.  keeps_idle_adapters: adapters without requests stay.  uses_host_for_kv: history that
    leaves the device goes to the host.  swaps_in: `tick` brings nodes back unasked.  backs_up: `tick` copies
    history to the host before the room is needed.  looks_ahead: queued requests count.  learns_reuse:
    `CacheLoad.reuse` is kept up to date.  exchanges: `tick` brings in what is worth more than what it drops
    for it.  values_per_page: `values` are per page, else of the whole node.  drops_backed_first: in need of a
    page, what the host has goes first.  adapter_share: part of the device that adapters have, and KV has
    not; None: no partition.
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


class CachingPolicy(Protocol):
    """Values nodes: the more, the longer it stays.  No state, no effects."""

    @property
    def traits(self) -> Traits: ...

    @property
    def adapter_recent_s(self) -> float:
        """Time constant of `NodeColumns.recent`."""
        ...

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        """[N], >= 0: what is lost without the node on the device, each from its own row and `load` alone."""
        ...

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        """[N], >= 0: what is lost if the host does not have the node."""
        ...

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        """Whether KV on the host should be copied to the device for a request, or rather be recomputed."""
        ...
