"""From a load and two SLOs to a cluster: how many GPUs, in which layout, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_lora.dist.lora_server.communication import communication_metrics, uniform_routing
from moe_lora.dist.lora_server.partition import Layout, Partition

from .admitted import ADMITTED, Admitted, rates_at, smallest_capacity_of
from .assumptions import assumptions
from .budget import check_budget, check_instances
from .cluster import MS, Candidate, Cluster, most_rows
from .iar import expected_active
from .inputs import ESTIMATORS, PlanInputs
from .sizing import ServerSize, fewest_instances, minimum_server
from .split import Split, best_split
from .stages import StageTimes

TAIL = 0.95


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cluster, and the numbers that led to it.

    capacity: M*, adapters that must be resident at once, by the estimator of the inputs; capacity_paper,
    capacity_corrected: by each.  iar, iar_corrected: admitted at once with M*, by the paper's model and the
    corrected one.  slots: adapters that the server's GPUs hold (>= M*), with
    slots_iar and slots_iar_corrected.  max_num_seqs: all that an instance can run within
    the TPOT SLO, so that bursts need not wait.  binding_constraint: what asked for the number of server GPUs,
    of gpus_by_constraint.  p95_ttft_s: decode TTFT; None where requests would
    queue.  tpot_s: at the batch that it keeps running; tpot_at_load_s, layer_ms, metrics: at the global batch
    that was sized for.
    serviceable_rate_per_s: the highest rate that the budget holds; None without one.  metrics: table 1's.
    """

    capacity: int
    capacity_paper: int
    capacity_corrected: int
    iar: float
    iar_corrected: float
    expected_active: float
    lora_server_gpus: int
    layout: str
    instances: int
    bytes_per_adapter: float
    binding_constraint: str
    gpus_by_constraint: Mapping[str, int]
    slots: int
    slots_iar: float
    slots_iar_corrected: float
    total_gpus: int
    instance_gpus: int
    global_batch: float
    batch_per_instance: float
    max_num_seqs: int
    p95_ttft_s: float | None
    tpot_s: float
    tpot_at_load_s: float
    serviceable_rate_per_s: float | None
    layer_ms: Mapping[str, float]
    metrics: Mapping[str, float] | None
    assumptions: tuple[str, ...]
    inputs: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Every field, by name."""
        return asdict(self)


def make_plan(inputs: PlanInputs) -> Plan:
    """The smallest cluster for the load, or the best split of `inputs.gpus`.

    Raises SloError if none holds the SLOs, ConfigError for what can't be sized, ValueError for popularity
    that is none.
    """
    cluster = cluster_of(inputs)
    capacity = smallest_capacity_of(
        inputs.estimator, inputs.probabilities, inputs.adapter_load, inputs.target_iar
    )
    split = None
    if inputs.gpus is not None:
        split = best_split(cluster, inputs.probabilities, inputs.target_iar, inputs.gpus, _admitted(inputs))
        check_budget(inputs, split)
        num_instances = split.num_instances
        server = minimum_server(
            cluster, capacity, num_instances, inputs.load / num_instances, split.layout.num_ranks
        )
    elif inputs.instances is not None:
        num_instances = inputs.instances
        check_instances(inputs, cluster)
        server = minimum_server(cluster, capacity, num_instances, inputs.load / num_instances)
    else:
        num_instances, server = fewest_instances(cluster, capacity, inputs.load)
    return _plan(inputs, cluster, capacity, num_instances, server, split)


def cluster_of(inputs: PlanInputs) -> Cluster:
    """What the inputs ask to size."""
    stages = StageTimes(
        inputs.profile,
        inputs.shape,
        inputs.mix.mean_rank,
        inputs.instance_gpus,
        inputs.context_tokens,
        inputs.probabilities,
    )
    return Cluster(
        shape=inputs.shape,
        mix=inputs.mix,
        gpu=inputs.profile.gpu,
        stages=stages,
        instance_gpus=inputs.instance_gpus,
        slo_ttft_s=inputs.slo_ttft_s,
        slo_tpot_s=inputs.slo_tpot_s,
        fixed_batch=inputs.global_batch is not None,
        context_tokens=inputs.context_tokens,
    )


def _admitted(inputs: PlanInputs) -> Admitted:
    """IAR at a global batch of which only a share asks for adapters."""
    admitted, share = ADMITTED[inputs.estimator], inputs.adapter_share
    return lambda probabilities, batch, capacity: admitted(probabilities, batch * share, capacity)


def _plan(
    inputs: PlanInputs,
    cluster: Cluster,
    capacity: int,
    num_instances: int,
    server: ServerSize,
    split: Split | None,
) -> Plan:
    chosen, load = server.chosen, inputs.load
    batch, layout = load / num_instances, chosen.layout
    slots = min(chosen.slots, len(inputs.probabilities))
    at_capacity, at_slots = (
        rates_at(inputs.probabilities, inputs.adapter_load, size) for size in (capacity, slots)
    )
    needed = {
        name: smallest_capacity_of(name, inputs.probabilities, inputs.adapter_load, inputs.target_iar)
        for name in ESTIMATORS
    }
    return Plan(
        capacity=capacity,
        capacity_paper=needed["paper"],
        capacity_corrected=needed["corrected"],
        iar=at_capacity["paper"],
        iar_corrected=at_capacity["corrected"],
        expected_active=expected_active(inputs.probabilities, inputs.adapter_load),
        lora_server_gpus=layout.num_ranks,
        layout=str(layout),
        instances=num_instances,
        bytes_per_adapter=inputs.mix.adapter_bytes(inputs.shape),
        binding_constraint=server.binding,
        gpus_by_constraint=server.gpus_by_constraint,
        slots=slots,
        slots_iar=at_slots["paper"],
        slots_iar_corrected=at_slots["corrected"],
        total_gpus=layout.num_ranks + num_instances * inputs.instance_gpus,
        instance_gpus=inputs.instance_gpus,
        global_batch=load,
        batch_per_instance=batch,
        max_num_seqs=most_rows(cluster, layout, num_instances, batch),
        p95_ttft_s=sum(cluster.first_token_s(layout, batch)) if at_slots["corrected"] >= TAIL else None,
        tpot_s=cluster.steady_tpot_s(layout, batch),
        tpot_at_load_s=cluster.shape.num_layers * cluster.stages.layer_s(layout.ep, batch),
        serviceable_rate_per_s=None if split is None else inputs.rate_of(split.global_batch),
        layer_ms=_layer_ms(cluster, chosen, batch),
        metrics=_metrics(inputs, layout, batch),
        assumptions=assumptions(inputs),
        inputs=inputs.to_json(),
    )


def _layer_ms(cluster: Cluster, chosen: Candidate, batch: float) -> dict[str, float]:
    """Times and budgets of one layer."""
    stages, served = cluster.stages, chosen.round
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


def _metrics(inputs: PlanInputs, layout: Layout, batch: float) -> dict[str, float] | None:
    """Table 1's metrics of a batch whose rows choose experts evenly; None for a model without experts."""
    shape = inputs.shape
    if not shape.num_experts:
        return None
    partition = Partition(shape, layout, inputs.instance_gpus, sites="auto")
    routing = uniform_routing(max(1, round(batch)), shape.num_experts_per_token, shape.num_experts, 1)
    return asdict(communication_metrics(partition, *routing))
