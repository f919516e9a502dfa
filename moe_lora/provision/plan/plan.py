"""From a load and two SLOs to a cluster: how many GPUs, in which layout, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_lora.config.plan import ESTIMATORS
from moe_lora.dist.lora_server.protocol.partition import Layout
from moe_lora.workload.popularity.probabilities import checked_probabilities

from moe_lora.provision.admission.admitted import ADMITTED, Admitted, rates_at
from .assumptions import assumptions
from .budget import check_budget, check_instances
from .candidate import Candidate, candidate, candidates, most_rows
from .cluster_size import Cluster
from moe_lora.provision.admission.corrected import corrected_wait
from moe_lora.provision.admission.iar import expected_active
from .inputs import PlanInputs
from .layer_figures import layer_ms, table_1_metrics
from moe_lora.provision.admission.load_range import NeededCapacity
from .loading import AdapterLoads
from .memory import server_bytes
from .verify import Replay
from .sizing import ServerSize, server_size, smallest_cluster, smallest_server
from .split import Split, best_split
from .stages import StageTimes

TAIL = 0.95
BUDGET, CHECK = "budget: highest rate", "simulated check"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cluster, and the numbers that led to it.

    capacity: M*, adapters that must be resident at once, by the estimator of the inputs; capacity_paper,
    capacity_corrected: by each; for the global batch and all smaller ones.  iar, iar_corrected: admitted at
    once with M*, by the paper's model and the corrected one.  slots: adapters that the server's GPUs hold
    (>= M*), with slots_iar and slots_iar_corrected.  mean_wait_s: of the requests that don't start at once,
    with M*.  loads_per_s: of adapters, with all slots; loading_share: of the time of the server's links;
    load_wait_s: mean time until a load begins.  Times have the waits for loads in them.  max_num_seqs: all
    that an instance can run within the TPOT SLO, so that bursts need not wait.
    binding_constraint: what asked for the number of server GPUs, of gpus_by_constraint, or the budget;
    rate_limited_by: what stops a budget's rate.  p95_ttft_s: decode TTFT; None where requests would queue.
    rate_per_s: requests.  running_per_instance, tpot_s: what keeps running at that rate, and its TPOT.
    global_batch, batch_per_instance, tpot_at_load_s, layer_ms, metrics (table 1's): with the margin.
    serviceable_rate_per_s: the highest rate that the budget holds; None without one.
    checked: the replays that it was chosen by.
    """

    capacity: int
    capacity_paper: int
    capacity_corrected: int
    iar: float
    iar_corrected: float
    expected_active: float
    mean_wait_s: float
    loads_per_s: float
    loading_share: float
    load_wait_s: float
    lora_server_gpus: int
    layout: str
    instances: int
    bytes_per_adapter: float
    memory_gb_per_rank: float
    binding_constraint: str
    rate_limited_by: str | None
    gpus_by_constraint: Mapping[str, int]
    slots: int
    slots_iar: float
    slots_iar_corrected: float
    total_gpus: int
    instance_gpus: int
    rate_per_s: float
    global_batch: float
    batch_per_instance: float
    running_per_instance: float
    max_num_seqs: int
    p95_ttft_s: float | None
    tpot_s: float
    tpot_at_load_s: float
    serviceable_rate_per_s: float | None
    layer_ms: Mapping[str, float]
    metrics: Mapping[str, float] | None
    assumptions: tuple[str, ...]
    inputs: Mapping[str, Any]
    checked: tuple[Replay, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Every field, by name."""
        return asdict(self)


def make_plan(inputs: PlanInputs) -> Plan:
    """The smallest cluster for the load, or the best split of `inputs.gpus`.

    Raises SloError if none holds the SLOs, ConfigError for what can't be sized, ValueError for popularity
    that is none.
    """
    cluster = cluster_of(inputs)
    checked_probabilities(inputs.probabilities)
    capacity_of, split = _needed(inputs, inputs.estimator), None
    if inputs.gpus is not None:
        split = best_split(cluster, inputs.probabilities, inputs.target_iar, inputs.gpus, _admitted(inputs))
        check_budget(inputs, split)
        num_instances, num_ranks = split.num_instances, split.layout.num_ranks
        found = candidates(cluster, capacity_of, num_instances)
        server = smallest_server(cluster, found, num_instances, num_ranks)
    elif inputs.instances is not None:
        num_instances = inputs.instances
        check_instances(inputs, cluster)
        server = smallest_server(cluster, candidates(cluster, capacity_of, num_instances), num_instances)
    else:
        num_instances, server = smallest_cluster(cluster, capacity_of)
    return _plan(inputs, cluster, num_instances, server, split)


def plan_of(inputs: PlanInputs, cluster: Cluster, num_instances: int, layout: Layout) -> Plan:
    """The plan of a cluster that was chosen otherwise, whatever the models say of it."""
    found = candidates(cluster, _needed(inputs, inputs.estimator), num_instances)
    batch = cluster.batch(layout.ep, num_instances, layout)
    if batch > cluster.max_batch[0]:
        batch = cluster.batch(layout.ep, num_instances)
    capacity = _needed(inputs, inputs.estimator)(batch * num_instances)
    chosen = candidate(cluster, layout, capacity, num_instances, batch)
    return _plan(inputs, cluster, num_instances, server_size(chosen, found), None)


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
        loads=AdapterLoads(
            probabilities=inputs.probabilities,
            adapter_share=inputs.adapter_share,
            output_tokens=inputs.output_tokens,
        ),
        instance_gpus=inputs.instance_gpus,
        slo_ttft_s=inputs.slo_ttft_s,
        slo_tpot_s=inputs.slo_tpot_s,
        context_tokens=inputs.context_tokens,
        tokens_per_s=inputs.tokens_per_s,
        global_batch=inputs.global_batch,
        load_margin=inputs.load_margin,
    )


def _needed(inputs: PlanInputs, estimator: str) -> NeededCapacity:
    return NeededCapacity(estimator, inputs.probabilities, inputs.target_iar, inputs.adapter_share)


def _admitted(inputs: PlanInputs) -> Admitted:
    """IAR at a global batch of which only a share asks for adapters."""
    admitted, share = ADMITTED[inputs.estimator], inputs.adapter_share
    return lambda probabilities, batch, capacity: admitted(probabilities, batch * share, capacity)


def _plan(
    inputs: PlanInputs, cluster: Cluster, num_instances: int, server: ServerSize, split: Split | None
) -> Plan:
    chosen, layout = server.chosen, server.chosen.layout
    load = chosen.batch * num_instances
    running = cluster.steady_rows(layout.ep, num_instances, layout)
    if running > chosen.batch:  # the loads' model has no solution, the simulator had
        running = cluster.steady_rows(layout.ep, num_instances)
    tpot_s, queue = cluster.step_s(layout, num_instances, running)
    p95_ttft_s = cluster.first_token_s(layout, tpot_s)[0] + queue.p95_ttft_s(tpot_s, num_instances)
    rate_per_s = inputs.rate_per_s
    if rate_per_s is None or inputs.global_batch is not None:
        rate_per_s = running * num_instances / (inputs.output_tokens * tpot_s)
    return Plan(
        **_admission(inputs, chosen, load, tpot_s, p95_ttft_s),
        loads_per_s=queue.loads_per_s,
        loading_share=queue.utilisation,
        load_wait_s=queue.wait_s,
        lora_server_gpus=layout.num_ranks,
        layout=str(layout),
        instances=num_instances,
        bytes_per_adapter=inputs.mix.adapter_bytes(inputs.shape),
        memory_gb_per_rank=round(server_bytes(cluster.gpu) / 1e9, 9),
        binding_constraint=server.binding if split is None else BUDGET,
        rate_limited_by=None if split is None else split.binding,
        gpus_by_constraint=server.gpus_by_constraint,
        total_gpus=layout.num_ranks + num_instances * inputs.instance_gpus,
        instance_gpus=inputs.instance_gpus,
        rate_per_s=rate_per_s,
        global_batch=load,
        batch_per_instance=chosen.batch,
        running_per_instance=running,
        max_num_seqs=most_rows(cluster, layout, num_instances),
        tpot_s=tpot_s,
        tpot_at_load_s=chosen.step_s,
        serviceable_rate_per_s=None if split is None else split.tokens_per_s / inputs.output_tokens,
        layer_ms=layer_ms(cluster, chosen),
        metrics=table_1_metrics(inputs, layout, chosen.batch),
        assumptions=assumptions(inputs, load),
        inputs=inputs.to_json(),
    )


def _admission(
    inputs: PlanInputs, chosen: Candidate, load: float, tpot_s: float, p95_ttft_s: float
) -> dict[str, Any]:
    """Fields of a plan on adapters that are resident, and on requests that find theirs so."""
    probabilities, batch, capacity = inputs.probabilities, load * inputs.adapter_share, chosen.capacity
    slots = min(chosen.slots, len(probabilities))
    at_capacity, at_slots = (rates_at(probabilities, batch, size) for size in (capacity, slots))
    by_name = {name: _needed(inputs, name)(load) for name in ESTIMATORS}
    return {
        "capacity": capacity,
        "capacity_paper": by_name["paper"],
        "capacity_corrected": by_name["corrected"],
        "iar": at_capacity["paper"],
        "iar_corrected": at_capacity["corrected"],
        "expected_active": expected_active(probabilities, batch),
        "mean_wait_s": corrected_wait(probabilities, batch, capacity) * inputs.output_tokens * tpot_s,
        "slots": slots,
        "slots_iar": at_slots["paper"],
        "slots_iar_corrected": at_slots["corrected"],
        "p95_ttft_s": p95_ttft_s if at_slots["corrected"] >= TAIL else None,
    }
