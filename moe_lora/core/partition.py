# SPDX-License-Identifier: Apache-2.0
"""Owners of adapters, layers and experts among LoRA Server ranks.

EPx-PPy cuts experts into x parts and layers into y stages, DPm cuts adapters (InfiniLoRA section 4.1, figure
8).  Server rank = stage * x + ep_rank.

A rank of P ranks with tensor parallelism asks for the deltas of the rank's part of a site (`core.shard`) with
D inputs and N outputs.  Values a row: D + N/P with divided outputs, D/P + N with divided inputs, in one
message and one answer.  No answer waits for another rank, and the rank can compute the part without a server.
Inputs joined at the server would save D - D/P values with divided outputs, and break both promises.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard

_FORMS = "EPx-PPy (such as EP2-PP1), EPx, PPy or DPm"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """EPx-PPy or DPm; DPm is for comparison only (table 1).

    Raises ConfigError for a mixed layout and for a count below 1.
    """

    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if min(self.ep, self.pp, self.dp) < 1 or (self.dp > 1 and self.ep * self.pp > 1):
            raise ConfigError(
                f"lora_server: ep={self.ep}, pp={self.pp}, dp={self.dp} is no layout; choose {_FORMS} "
                "with counts of 1 or more"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout written as EPx-PPy, EPx, PPy or DPm.  Raises ConfigError."""
        found = re.fullmatch(r"(?:EP(?P<ep>[0-9]+))?(?:(?(ep)-)PP(?P<pp>[0-9]+))?|DP(?P<dp>[0-9]+)", text)
        counts = {name: int(count) for name, count in found.groupdict().items() if count} if found else {}
        if not counts or min(counts.values()) < 1:
            raise ConfigError(f"lora_server={text!r} is no layout; choose {_FORMS} with counts of 1 or more")
        return cls(**counts)

    def __str__(self) -> str:
        return f"DP{self.dp}" if self.dp > 1 else f"EP{self.ep}-PP{self.pp}"

    @property
    def num_ranks(self) -> int:
        """Ranks of the server: m = x * y."""
        return self.ranks_per_stage * self.pp

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that share a layer's work: x, or m under data parallelism."""
        return self.ep * self.dp


class Partition:
    """The owner of every (layer, site, expert).

    Layer l belongs to stage l mod y, so stages load first layers at once (section 5.3). Rank i of x holds the
    experts [i*E/x, (i+1)*E/x); rank c of an instance [c*E/p, (c+1)*E/p).  x divides p or p divides x (section
    4.1).  A site without experts belongs to EP rank (site index mod x) of the layer's stage; every instance
    rank sends rows there.

    expert_parallel: p.  sites: "all", "experts", or "auto": "experts" for a model with experts.  shards: by
    instance rank; empty unless tensor parallelism divides sites of the server.  Raises ConfigError if numbers
    don't divide, or stages exceed layers.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        expert_parallel: int,
        *,
        sites: str = "all",
        tensor_parallel: int = 1,
    ) -> None:
        self.shape = shape
        self._experts_only = sites == "experts" or (sites == "auto" and shape.num_experts > 0)
        self.layout = layout
        self.expert_parallel, self.tensor_parallel = expert_parallel, tensor_parallel
        self.client_ranks = max(expert_parallel, tensor_parallel)
        self._check_layout()
        self._check_clients()
        self.shards = self._divided_shards() if tensor_parallel > 1 else ()

    def serves(self, site_index: int) -> bool:
        """True if the server computes this site."""
        return not self._experts_only or self.shape.sites[site_index].num_experts > 0

    def stage_of(self, layer: int) -> int:
        return layer % self.layout.pp

    def stage_leader(self, stage: int) -> int:
        """The stage's first rank, which orders the stage's turns (section 5.1)."""
        return stage * self.layout.ranks_per_stage

    def ranks_of_stage(self, stage: int) -> range:
        first = self.stage_leader(stage)
        return range(first, first + self.layout.ranks_per_stage)

    def layers_of(self, server_rank: int) -> range:
        return range(server_rank // self.layout.ranks_per_stage, self.shape.num_layers, self.layout.pp)

    def experts_of(self, server_rank: int) -> range:
        """Experts of this server rank in each layer."""
        ep_rank = server_rank % self.layout.ranks_per_stage // self.layout.dp
        return _part(self.shape.num_experts, ep_rank, self.layout.ep)

    def local_experts(self, client_rank: int) -> range:
        """Experts with base weights on this instance rank."""
        return _part(self.shape.num_experts, client_rank % self.expert_parallel, self.expert_parallel)

    def shape_of(self, client_rank: int) -> ModelShape:
        """Sizes of sites on this instance rank."""
        return self.shards[client_rank].shape if self.shards else self.shape

    def _divided_shards(self) -> tuple[ModelShard, ...]:
        numbers = self.tensor_parallel, self.expert_parallel
        shards = tuple(ModelShard(self.shape, *numbers, rank) for rank in range(self.tensor_parallel))
        sites = zip(self.shape.sites, shards[0].shape.sites, strict=True)
        return shards if any(self.serves(i) and a != b for i, (a, b) in enumerate(sites)) else ()

    def owner(
        self, layer: int, site_index: int, expert: int | None = None, *, slot: int | None = None
    ) -> int:
        """Server rank with the LoRA matrices of this place.

        site_index: in `shape.sites`.  expert: None at a site without experts.  slot: under data parallelism
        rank slot mod m holds the whole adapter.
        """
        leader = self.stage_leader(self.stage_of(layer))
        num_experts = self.shape.sites[site_index].num_experts
        assert (expert is None) == (num_experts == 0), "an expert is named at expert sites, and only there"
        if self.layout.dp > 1:
            assert slot is not None, "under data parallelism the owner depends on the adapter's slot"
            return leader + slot % self.layout.dp
        if expert is None:
            return leader + site_index % self.layout.ep
        return leader + expert * self.layout.ep // num_experts

    def servers_of_client(self, client_rank: int, layer: int, site_index: int) -> tuple[int, ...]:
        """Server ranks, ascending, to which this instance rank sends activations of the site."""
        ranks = self.ranks_of_stage(self.stage_of(layer))
        if self.layout.dp > 1:
            return tuple(ranks)
        if self.shape.sites[site_index].num_experts == 0:
            return (self.owner(layer, site_index),)
        local = self.local_experts(client_rank)
        return tuple(rank for rank in ranks if _overlap(self.experts_of(rank), local))

    def clients_of_server(self, server_rank: int, site_index: int | None = None) -> tuple[int, ...]:
        """Instance ranks, ascending, that send to this server rank at a site (None: at any)."""
        layer = self.layers_of(server_rank)[0]
        sites = range(len(self.shape.sites)) if site_index is None else (site_index,)
        return tuple(
            client
            for client in range(self.client_ranks)
            if any(server_rank in self.servers_of_client(client, layer, site) for site in sites)
        )

    def _check_layout(self) -> None:
        if self._experts_only and not self.shape.num_experts:
            raise ConfigError(
                "lora_server.sites='experts': this model has no experts; choose 'all' or 'auto'"
            )
        setting, shape, layout = f"lora_server='{self.layout}'", self.shape, self.layout
        if shape.mla is not None:
            raise ConfigError(
                f"{setting}: {shape.family} has Multi-head Latent Attention, and only an instance computes "
                "the deltas of kv_b_proj; leave lora_server out"
            )
        if shape.num_experts and shape.num_experts % layout.ep:
            raise ConfigError(f"{setting}: {_not_a_divisor(layout.ep, shape.num_experts)}")
        if not shape.num_experts and layout.ep > len(shape.sites):
            raise ConfigError(
                f"{setting}: a model without experts has {len(shape.sites)} LoRA sites a layer to share "
                f"among EP ranks; choose 1 to {len(shape.sites)}"
            )
        if layout.pp > shape.num_layers:
            raise ConfigError(
                f"{setting}: {layout.pp} stages are more than num_layers={shape.num_layers}; "
                f"choose 1 to {shape.num_layers}"
            )

    def _check_clients(self) -> None:
        clients, num_experts, ep = self.expert_parallel, self.shape.num_experts, self.layout.ep
        if clients < 1:
            raise ConfigError(f"expert_parallel={clients} must be 1 or more")
        if num_experts % clients:
            raise ConfigError(f"expert_parallel={clients}: {_not_a_divisor(clients, num_experts)}")
        if num_experts and clients % ep and ep % clients:
            fitting = [n for n in _divisors(num_experts) if n % clients == 0 or clients % n == 0]
            raise ConfigError(
                f"lora_server='{self.layout}': expert ranges of 1/{ep} and of 1/{clients} "
                f"(expert_parallel={clients}) overlap in part, so that ranks would share experts; "
                f"choose EP {_either(fitting)}"
            )


def _part(total: int, index: int, parts: int) -> range:
    size = total // parts
    return range(index * size, (index + 1) * size)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _not_a_divisor(given: int, num_experts: int) -> str:
    return f"{given} does not divide num_experts={num_experts}; choose {_either(_divisors(num_experts))}"


def _either(numbers: list[int]) -> str:
    head = ", ".join(str(n) for n in numbers[:-1])
    return f"{head} or {numbers[-1]}" if head else str(numbers[-1])


@dataclass(frozen=True, kw_only=True)
class CommunicationMetrics:
    """Table 1's metrics for one expert site and one instance's batch.

    peer_volume: mean activations per pair of peers.  servers_per_client, clients_per_server: maxima.
    compute_volume: mean activations per server rank.  sync_scope: server ranks with one order of instances.
    """

    peer_volume: float
    servers_per_client: int
    clients_per_server: int
    compute_volume: float
    sync_scope: int


def communication_metrics(
    partition: Partition, expert_ids: Sequence[Sequence[int]], slots: Sequence[int], layer: int = 0
) -> CommunicationMetrics:
    """Count a batch's activations: (row, expert) pairs.  expert_ids: [b][k], slots: [b], by row."""
    counts = activation_counts(partition, expert_ids, slots, layer)
    site = _expert_site(partition)
    workers = partition.ranks_of_stage(partition.stage_of(layer))
    clients = range(partition.client_ranks)
    servers = {client: partition.servers_of_client(client, layer, site) for client in clients}
    num_pairs = sum(len(ranks) for ranks in servers.values())
    owners = {
        partition.owner(layer, site, expert, slot=slot)
        for expert in range(partition.shape.num_experts)
        for slot in range(partition.layout.num_ranks)
    }
    return CommunicationMetrics(
        peer_volume=counts.total() / num_pairs,
        servers_per_client=max(len(ranks) for ranks in servers.values()),
        clients_per_server=max(len(partition.clients_of_server(rank, site)) for rank in workers),
        compute_volume=counts.total() / len(owners),
        sync_scope=len(owners),
    )


def activation_counts(
    partition: Partition, expert_ids: Sequence[Sequence[int]], slots: Sequence[int], layer: int = 0
) -> Counter[tuple[int, int]]:
    """Activations by (client rank, server rank) at an expert site."""
    site = _expert_site(partition)
    holder = {e: client for client in range(partition.client_ranks) for e in partition.local_experts(client)}
    return Counter(
        (holder[expert], partition.owner(layer, site, expert, slot=slot))
        for row, slot in zip(expert_ids, slots, strict=True)
        for expert in row
    )


def uniform_routing(
    num_rows: int, top_k: int, num_experts: int, num_slots: int
) -> tuple[list[list[int]], list[int]]:
    """(expert_ids, slots) with experts in turn and equal runs of rows."""
    expert_ids = [[(row * top_k + k) % num_experts for k in range(top_k)] for row in range(num_rows)]
    return expert_ids, [row * num_slots // num_rows for row in range(num_rows)]


def _expert_site(partition: Partition) -> int:
    return next(index for index, site in enumerate(partition.shape.sites) if site.num_experts)
