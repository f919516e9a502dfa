# SPDX-License-Identifier: Apache-2.0
"""The cheaper of coupled instances and of instances beside a LoRA Server, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moe_lora.core.errors import SloError
from moe_lora.provision.admission.admitted import rates_at
from moe_lora.provision.admission.corrected import corrected_wait
from moe_lora.provision.admission.iar import expected_active
from moe_lora.provision.device_profile import MissingRateError
from moe_lora.workload.traces.records import Trace

from .checked import PATIENCE, PlaceSearch, checked_server_plan, replaced, searched_loads
from .cluster_size import MS, Cluster
from .coupled import Coupled
from .coupled_search import CoupledSearch
from .evidence import evidence
from .inputs import PlanInputs, SizedCluster
from .plan import CHECK, TAIL, Plan, assumptions

MOST = 4
"""Models size a LoRA Server up to this factor of the coupled GPUs."""


def checked_plan(inputs: PlanInputs, trace: Trace) -> Plan:
    """The cheaper kind of cluster; the plan holds in replays of the trace and of Poisson arrivals.

    If another device computes prompts, sizes only a LoRA Server (InfiniLoRA).  Raises SloError if neither
    kind holds, ConfigError for inputs without a size.
    """
    if inputs.prompts is None:
        return checked_server_plan(inputs, trace)
    cluster = Cluster(inputs)
    cluster.check_prompts()
    coupled, refused = _coupled(cluster, trace)
    if coupled is None:
        return _server_only(inputs, trace, refused)
    return _cheaper(cluster, coupled, trace)


def _coupled(cluster: Cluster, trace: Trace) -> tuple[Plan | None, Exception | None]:
    search = CoupledSearch(cluster, lambda rate_per_s: searched_loads(cluster.inputs, rate_per_s, trace))
    try:
        place = search.smallest()
        return replace(coupled_plan(cluster, place), checked=tuple(search.replayed(place))), None
    except (SloError, MissingRateError) as refused:
        return None, refused


def _server_only(inputs: PlanInputs, trace: Trace, refused: Exception | None) -> Plan:
    try:
        plan = checked_server_plan(inputs, trace)
    except (SloError, MissingRateError) as error:
        if isinstance(error, MissingRateError) and isinstance(refused, MissingRateError):
            raise refused from error
        raise SloError(f"{refused}. Nor does a LoRA Server: {error}") from error
    return replace(plan, compared=f"a LoRA Server, as coupled instances do not hold the load: {refused}")


def _cheaper(cluster: Cluster, coupled: Plan, trace: Trace) -> Plan:
    inputs = cluster.inputs
    if inputs.global_batch is not None or inputs.gpus is not None or inputs.instances is not None:
        return _of_given(inputs, coupled, trace)
    assert inputs.rate_per_s is not None
    rate_per_s = inputs.rate_per_s * (1 + inputs.load_margin)
    try:
        search = PlaceSearch(cluster, searched_loads(inputs, rate_per_s, trace))
        if not search.of(coupled.total_gpus - 1):
            return replace(coupled, compared=_coupled_wins(cluster, coupled, search))
        place = _server_below(search, coupled.total_gpus)
    except (SloError, MissingRateError) as refused:
        return replace(coupled, compared=f"coupled; a LoRA Server was not compared: {refused}")
    if place is None:
        return replace(coupled, compared=_coupled_wins(cluster, coupled, search))
    plan = replace(replaced(cluster, place, None), checked=tuple(search.replayed(place)))
    fewer = coupled.total_gpus - plan.total_gpus
    return replace(
        plan,
        compared="a LoRA Server, as it holds adapters once for all instances: coupled instances take "
        f"{fewer} GPUs more ({coupled.total_gpus})",
    )


def _of_given(inputs: PlanInputs, coupled: Plan, trace: Trace) -> Plan:
    try:
        plan = checked_server_plan(inputs, trace)
    except (SloError, MissingRateError) as refused:
        return replace(coupled, compared=f"coupled, as a LoRA Server does not hold this: {refused}")
    more = plan.total_gpus - coupled.total_gpus
    if more >= 0:
        return replace(
            coupled,
            compared=f"coupled: a LoRA Server takes {plan.total_gpus} GPUs, {more} more ({plan.layout})",
        )
    return replace(
        plan, compared=f"a LoRA Server: coupled instances take {coupled.total_gpus} GPUs, {-more} more"
    )


def _server_below(search: PlaceSearch, limit: int) -> SizedCluster | None:
    low = _first(lambda number: bool(search.of(number)), 1, limit - 1) or limit
    tried = range(limit - 1, max(low, limit - PATIENCE) - 1, -1)
    found = next(filter(None, map(search.holding, tried)), None)
    if found is None:
        return None
    place, high, low = found, found.num_gpus(search.instance_gpus), low - 1
    while high - low > 1:
        middle = (high + low) // 2
        found = search.holding(middle)
        place, high, low = (place, high, middle) if found is None else (found, middle, low)
    return _walked_down(search, place)


def _walked_down(search: PlaceSearch, place: SizedCluster) -> SizedCluster:
    """Tries fewer GPUs past misses, as many numbers as an instance has GPUs."""
    number, missed = place.num_gpus(search.instance_gpus) - 1, 0
    while missed < max(PATIENCE, search.instance_gpus) and number >= 1:
        found = search.holding(number)
        place, missed = (place, missed + 1) if found is None else (found, 0)
        number -= 1
    return place


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _coupled_wins(cluster: Cluster, coupled: Plan, search: PlaceSearch) -> str:
    total = coupled.total_gpus
    number, by = _first(lambda gpus: bool(search.of(gpus, 1.0)), total, MOST * total), " by the models"
    if number == total:
        number, by = _replayed_from(search, total), ""
    if number is None:
        far = f"a LoRA Server takes more than {(MOST if by else 2) * total} GPUs{by}"
    elif number == total:
        far = "a LoRA Server takes as many GPUs"
    else:
        far = f"a LoRA Server takes {number} GPUs{by}, {number - total} more"
    return f"coupled: {far}; {_server_cost(cluster)}"


def _replayed_from(search: PlaceSearch, number: int) -> int | None:
    most = 2 * number
    while number <= most:
        if search.holding(number) is not None:
            return number
        number += max(1, number // 4)
    return None


def _server_cost(cluster: Cluster) -> str:
    """Bytes of a prompt token beside a LoRA Server."""
    shape = cluster.inputs.shape
    chosen, width, inner = max(1, shape.num_experts_per_token), shape.hidden_size, shape.intermediate_size
    values = shape.num_layers * chosen * (2 * width + 3 * inner)
    return f"each of its rows, prompts too, moves {values * shape.dtype_bytes / 1e6:.1f} MB over the network"


_NO_SERVER: dict[str, Any] = {
    "lora_server_gpus": 0,
    "layout": "",
    "metrics": None,
    "gpus_by_constraint": {},
    "rate_limited_by": None,
    "serviceable_rate_per_s": None,
}


def coupled_plan(cluster: Cluster, place: SizedCluster) -> Plan:
    """The plan of a place from the simulated search.  Counts of adapters are per instance."""
    inputs, coupled = cluster.inputs, Coupled(cluster)
    num_instances, probabilities = place.num_instances, inputs.probabilities
    batch = coupled.batch(num_instances)
    running = batch / (1 + cluster.margin)
    tpot_s, at_load_s = coupled.tpot_s(running), coupled.tpot_s(batch)
    queue = coupled.queue(place, running, tpot_s)
    rate_per_s = inputs.rate_per_s
    if rate_per_s is None or inputs.global_batch is not None:
        rate_per_s = running * num_instances / (inputs.output_tokens * tpot_s)
    shown = evidence(inputs, place, rate_per_s)
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
        **_NO_SERVER,
        instances=num_instances,
        bytes_per_adapter=inputs.adapter_bytes,
        memory_gb_per_rank=place.slots * inputs.adapter_bytes / inputs.instance_gpus / 1e9,
        binding_constraint=CHECK,
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
        layer_ms=_layer_ms(cluster, batch),
        assumptions=assumptions(inputs, batch * num_instances, coupled=True),
        inputs=inputs.to_json(),
        **shown,
    )


def _kv_bytes(cluster: Cluster, place: SizedCluster) -> float:
    inputs = cluster.inputs
    context = inputs.shape.kv_bytes_per_token() * inputs.context_tokens
    return Coupled(cluster).kv_requests(place.slots) * context


def _layer_ms(cluster: Cluster, batch: float) -> dict[str, float]:
    stages = cluster.stages
    times_s = {
        "slo_layer": cluster.layer_budget_s,
        "attention": stages.attention_s(batch),
        "experts": stages.experts_s(batch),
        "deltas": stages.local_deltas_s(stages.prompts.step(batch)),
    }
    return {name: time_s * MS for name, time_s in times_s.items()}
