"""The plan of coupled instances."""

from __future__ import annotations

import math

from moe_lora.provision.admission.admitted import rates_at
from moe_lora.provision.admission.corrected import corrected_wait
from moe_lora.provision.admission.iar import expected_active

from .cluster_size import MS, Cluster
from .coupled import Coupled
from .evidence import bound_of, check_bound, never_ran, ran
from .place import SizedCluster
from .plan import CHECK, TAIL, Plan, assumptions


def coupled_plan(cluster: Cluster, place: SizedCluster) -> Plan:
    """Of a place that was chosen in the simulator.  Counts of adapters are of one instance."""
    inputs, coupled = cluster.inputs, Coupled(cluster)
    num_instances, probabilities = place.num_instances, inputs.probabilities
    batch = coupled.batch(num_instances)
    running = batch / (1 + cluster.margin)
    tpot_s, at_load_s = coupled.tpot_s(running), coupled.tpot_s(batch)
    queue = coupled.queue(place, running, tpot_s)
    rate_per_s = inputs.rate_per_s
    if rate_per_s is None or inputs.global_batch is not None:
        rate_per_s = running * num_instances / (inputs.output_tokens * tpot_s)
    bound = check_bound(bound_of(inputs, rate_per_s), place, inputs)
    in_service = batch * inputs.adapter_share * cluster.in_service
    needed = {name: capacity(batch * cluster.in_service) for name, capacity in cluster.capacity_of.items()}
    own = needed[inputs.estimator]
    at_capacity, at_slots = (rates_at(probabilities, in_service, size) for size in (own, place.slots))
    decode_s = coupled.p95_ttft_s(place, tpot_s, queue) - cluster.prefill_s(None, tpot_s)
    queues = at_slots["corrected"] < TAIL
    return Plan(
        kind="coupled",
        kv_gb_per_rank=_kv_bytes(cluster, place) / inputs.instance_gpus / 1e9,
        capacity=own,
        capacity_paper=needed["paper"],
        capacity_corrected=needed["corrected"],
        iar=at_capacity["paper"],
        iar_corrected=at_capacity["corrected"],
        expected_active=expected_active(probabilities, in_service),
        mean_wait_s=corrected_wait(probabilities, in_service, own) * inputs.output_tokens * tpot_s,
        loads_per_s=queue.loads_per_s * num_instances,
        loading_share=queue.utilisation,
        load_wait_s=queue.wait_s if math.isfinite(queue.wait_s) else 0.0,
        lora_server_gpus=0,
        layout="",
        instances=num_instances,
        bytes_per_adapter=inputs.adapter_bytes,
        memory_gb_per_rank=place.slots * inputs.adapter_bytes / inputs.instance_gpus / 1e9,
        binding_constraint=CHECK,
        rate_limited_by=None,
        gpus_by_constraint={},
        slots=place.slots,
        slots_iar=at_slots["paper"],
        slots_iar_corrected=at_slots["corrected"],
        total_gpus=place.num_gpus(inputs.instance_gpus),
        instance_gpus=inputs.instance_gpus,
        rate_per_s=rate_per_s,
        global_batch=batch * num_instances,
        requests_in_service=batch * num_instances * cluster.in_service,
        batch_per_instance=batch,
        running_per_instance=running,
        max_num_seqs=coupled.most_rows(place),
        p95_ttft_s=None if queues else decode_s + cluster.prefill_s(None, tpot_s),
        p95_decode_ttft_s=None if queues else decode_s,
        prompt_share=coupled.prompt_share(num_instances),
        max_num_batched_tokens=cluster.step_tokens(None, batch),
        tpot_s=tpot_s,
        tpot_at_load_s=at_load_s,
        serviceable_rate_per_s=None,
        layer_ms=_layer_ms(cluster, batch),
        metrics=None,
        assumptions=assumptions(inputs, batch * num_instances, coupled=True),
        inputs=inputs.to_json(),
        lower_bound=bound,
        ran=ran(inputs, place),
        never_ran=never_ran(inputs, place),
    )


def _kv_bytes(cluster: Cluster, place: SizedCluster) -> float:
    """Of an instance."""
    inputs = cluster.inputs
    context = inputs.shape.kv_bytes_per_token() * inputs.context_tokens
    return Coupled(cluster).kv_requests(place.slots) * context


def _layer_ms(cluster: Cluster, batch: float) -> dict[str, float]:
    """Times of one layer of a mean step, in ms."""
    stages = cluster.stages
    times_s = {
        "slo_layer": cluster.layer_budget_s,
        "attention": stages.attention_s(batch),
        "experts": stages.experts_s(batch),
        "deltas": stages.local_deltas_s(stages.prompts.step(batch)),
    }
    return {name: time_s * MS for name, time_s in times_s.items()}
