"""What a layout costs in communication, counted on the partition itself (InfiniLoRA section 4.1, table 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .partition import Partition


@dataclass(frozen=True, kw_only=True)
class CommunicationMetrics:
    """The metrics of table 1 for one expert site of one layer and one instance's batch.

    peer_volume: activations per (client rank, server rank) pair that may talk to each other, on average.
    servers_per_client: the most server ranks a client rank talks to ("comm peer count" of the table).
    clients_per_server: the most client ranks a server rank hears from ("comm peer count" of the text).
    compute_volume: activations per server rank that works on this layer, on average.
    sync_scope: server ranks that have to agree on the order of instances for this layer.
    """

    peer_volume: float
    servers_per_client: int
    clients_per_server: int
    compute_volume: float
    sync_scope: int


def communication_metrics(
    partition: Partition, expert_ids: Sequence[Sequence[int]], slots: Sequence[int], layer: int = 0
) -> CommunicationMetrics:
    """Walk a batch through the partition's owners and peers and count.

    expert_ids: [b][k], the experts of each row.  slots: [b], the slot of each row's adapter.  One
    activation is one (row, expert): the paper's unit, b * k of them a layer.
    Source: InfiniLoRA section 4.1, table 1.
    """
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
    """Activations that go from each client rank to each server rank at one expert site of the layer."""
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
    """(expert_ids, slots) of a batch in which experts take turns and each slot has one run of rows."""
    expert_ids = [[(row * top_k + k) % num_experts for k in range(top_k)] for row in range(num_rows)]
    return expert_ids, [row * num_slots // num_rows for row in range(num_rows)]


def _expert_site(partition: Partition) -> int:
    return next(index for index, site in enumerate(partition.shape.sites) if site.num_experts)
