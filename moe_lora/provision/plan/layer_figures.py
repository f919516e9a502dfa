"""What a plan says of one layer: times, budgets, communication."""

from __future__ import annotations

from dataclasses import asdict

from moe_lora.dist.lora_server.protocol.communication import communication_metrics, uniform_routing
from moe_lora.dist.lora_server.protocol.partition import Layout, Partition

from .candidate import Candidate
from .cluster_size import MS, Cluster
from .inputs import PlanInputs


def layer_ms(cluster: Cluster, chosen: Candidate) -> dict[str, float]:
    """Times and budgets of one layer, in ms."""
    stages, served, batch = cluster.stages, chosen.round, chosen.batch
    times_s = {
        "slo_layer": cluster.layer_budget_s,
        "slo_ffn": cluster.ffn_budget_s(batch),
        "attention": stages.attention_s(batch),
        "experts": stages.experts_s(batch),
        "receive": served.receive_s,
        "compute": served.compute_s,
        "send": served.send_s,
    }
    return {name: time_s * MS for name, time_s in times_s.items()}


def table_1_metrics(inputs: PlanInputs, layout: Layout, batch: float) -> dict[str, float] | None:
    """Table 1's metrics of a batch whose rows choose experts evenly; None for a model without experts."""
    shape = inputs.shape
    if not shape.num_experts:
        return None
    partition = Partition(shape, layout, inputs.instance_gpus, sites="auto")
    routing = uniform_routing(max(1, round(batch)), shape.num_experts_per_token, shape.num_experts, 1)
    return asdict(communication_metrics(partition, *routing))
