# SPDX-License-Identifier: Apache-2.0
"""Records of controller, registry and LoRA Server."""

from __future__ import annotations

from dataclasses import dataclass

READY, BROKEN, REMOVED = "ready", "broken", "removed"


@dataclass(frozen=True, kw_only=True)
class RegisteredAdapter:
    """One version of an adapter.

    lora_rank: largest of the config.  num_bytes, content_hash: of the files.  path: folder to serve; source:
    original folder.  state: ready; broken (files lost or altered); or removed.  created_s: Unix time.
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
    """Current counts, then loads and evictions since the start.  Bytes are of used and of loaded pages."""

    num_resident: int
    num_leases: int
    num_waiting: int
    num_loads: int
    num_evictions: int
    resident_bytes: int
    loaded_bytes: int


@dataclass(frozen=True, kw_only=True)
class ServerState(LeaseStats):
    """capacity: most resident adapters.

    max_capacity: by memory and registered adapters; None without adapters.  incarnation: of the leader.
    ranks: joins of each rank with this leader; 0: absent.  unlinked: per rank, processes of instances without
    a link.
    """

    capacity: int
    max_capacity: int | None
    num_instances: int = 0
    incarnation: int = 0
    ranks: tuple[int, ...] = ()
    unlinked: tuple[int, ...] = ()

    @property
    def num_away(self) -> int:
        """Absent ranks."""
        return self.ranks.count(0)

    @property
    def num_unlinked(self) -> int:
        """Missing links between instances and ranks."""
        return sum(self.unlinked)

    @property
    def is_whole(self) -> bool:
        return not self.num_away and not self.num_unlinked


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The model's view of a demand at a capacity.

    predicted_iar: by the corrected model; predicted_iar_paper: by InfiniLoRA's equation 4.  measured_iar:
    None without an ended request.
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
        """True if the capacity reaches the target."""
        return self.predicted_iar >= self.target_iar


@dataclass(frozen=True, kw_only=True)
class PlacementQuality:
    """Quality of a table.

    Loads are shares of a server's capacity.  target_utilisation: mean load.  worst_load: at true ranks.
    worst_padded_load: at the server's highest rank.  rank_mixing: padded over own load.
    """

    target_utilisation: float
    worst_load: float
    worst_padded_load: float
    rank_mixing: float
    most_held: int
    mean_held: float
    copied_bytes: float
    num_copies: int
