# SPDX-License-Identifier: Apache-2.0
"""Records that the controller, its registry and the LoRA Server give to front ends."""

from __future__ import annotations

from dataclasses import dataclass

READY, BROKEN, REMOVED = "ready", "broken", "removed"


@dataclass(frozen=True, kw_only=True)
class RegisteredAdapter:
    """One version of an adapter.

    lora_rank: the largest of its config; alpha: the config's lora_alpha.  targets: modules and parameters
    as the config names them.  num_bytes: of its files.  content_hash: of its files (`ContentStore`).
    base_hash: see `base_model_hash`.  path: the folder to serve it from.  source: where it was added from.
    state: ready; broken, its files were found lost or altered; or removed.  created_s: Unix time.
    """

    name: str
    version: int
    lora_rank: int
    alpha: float
    targets: tuple[str, ...]
    num_bytes: int
    content_hash: str
    base_hash: str
    source: str
    owner: str
    state: str
    created_s: float
    path: str


@dataclass(frozen=True, kw_only=True)
class LeaseStats:
    """Now: adapters resident, leases held, acquires waiting, bytes of the pages taken.  Since the start:
    adapters loaded and evicted, bytes of the pages loaded.
    """

    num_resident: int
    num_leases: int
    num_waiting: int
    num_loads: int
    num_evictions: int
    resident_bytes: int
    loaded_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServerState(LeaseStats):
    """capacity: adapters resident at once.  max_capacity: the most that the ranks' memory holds, as far as
    the registered adapters tell; None if there is none.  num_instances: that are linked.  incarnation: of the
    leader.  ranks: of each rank how often it has joined this leader; 0: it is not there.  unlinked: of each
    rank, how many processes of these instances send it rows when they can, but have no link to it now.
    """

    capacity: int
    max_capacity: int | None
    num_instances: int = 0
    incarnation: int = 0
    ranks: tuple[int, ...] = ()
    unlinked: tuple[int, ...] = ()

    @property
    def num_away(self) -> int:
        """Ranks that are not there."""
        return self.ranks.count(0)

    @property
    def num_unlinked(self) -> int:
        """Links that are missing between instances and ranks."""
        return sum(self.unlinked)

    @property
    def is_whole(self) -> bool:
        return not self.num_away and not self.num_unlinked


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the model says of a demand at a capacity.

    expected_active: adapters that at least one request uses, in the mean.  predicted_iar: share of requests
    that the capacity admits at once, by the corrected model, which is what simulation agrees with;
    predicted_iar_paper: by InfiniLoRA's equation 4, too high while requests wait.  measured_iar: the share
    that was, None if no request ended.  needed_capacity: the smallest one whose predicted_iar reaches
    target_iar.
    """

    num_requests: int
    num_adapters: int
    global_batch: float
    expected_active: float
    capacity: int
    predicted_iar: float
    predicted_iar_paper: float
    measured_iar: float | None
    target_iar: float
    needed_capacity: int

    @property
    def suffices(self) -> bool:
        """Whether the capacity reaches the target."""
        return self.predicted_iar >= self.target_iar


@dataclass(frozen=True, kw_only=True)
class PlacementQuality:
    """Of one table under one demand.  Loads are shares of a server's capacity.

    target_utilisation: mean load, a lower bound on both worst loads.  worst_load: of a server, each adapter
    at its own rank's operating point (kernels that compute true ranks).  worst_padded_load: of a server, all
    its tokens at its highest rank's point (kernels that pad).  rank_mixing: padded over own load, of all
    servers together; 1 = no rank is served beside a higher one.  most_held, mean_held: adapters per server.
    copied_bytes, num_copies: what servers get that they did not have, of adapters that were anywhere.
    """

    target_utilisation: float
    worst_load: float
    worst_padded_load: float
    rank_mixing: float
    most_held: int
    mean_held: float
    copied_bytes: float
    num_copies: int
