# SPDX-License-Identifier: Apache-2.0
"""From a load and two SLOs to a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from moe_lora.core.errors import SloError
from moe_lora.core.partition import Layout, Partition, communication_metrics, uniform_routing
from moe_lora.provision.admission.admitted import rates_at
from moe_lora.provision.admission.corrected import corrected_wait
from moe_lora.provision.admission.iar import checked_probabilities, expected_active
from moe_lora.provision.device_profile import Profile, RooflineProfile
from moe_lora.provision.lower_bound import LowerBound

from .cluster_size import MS, Cluster
from .coupled import Coupled
from .evidence import evidence
from .inputs import PlanInputs, SizedCluster
from .memory import BLOCK_TOKENS, KNOWN_MODELS, LoadQueue, bytes_text, server_bytes
from .sizing import (
    Candidate,
    ServerSize,
    Split,
    best_split,
    candidates,
    fewest_instances,
    loaded,
    most_rows,
    server_size,
    smallest_cluster,
    smallest_server,
    with_capacity,
)
from .verify import Replay


def check_budget(inputs: PlanInputs, split: Split) -> None:
    """Raise SloError if the best split holds less than the load."""
    if inputs.global_batch is not None:
        held, asked, unit = float(split.global_batch), inputs.global_batch, "requests at once"
    else:
        assert inputs.rate_per_s is not None
        held, asked, unit = split.tokens_per_s / inputs.output_tokens, inputs.rate_per_s, "requests/s"
    if asked <= held:
        return
    raise SloError(
        f"--gpus {inputs.gpus} hold {held:.1f} {unit} at best ({split.num_instances} instances and "
        f"{split.layout}), the load is {asked:.1f}, {asked - held:.1f} more; {split.binding} limits it; "
        "give more --gpus or loosen the SLOs"
    )


def check_instances(cluster: Cluster, num_instances: int) -> None:
    """Raise SloError with the sufficient number if too small."""
    most, limit = cluster.max_batch
    least = fewest_instances(cluster)
    if num_instances >= least:
        return
    batch = min(cluster.batch(layout, num_instances, loads=False) for layout in cluster.layouts)
    why = "fit beside the weights" if limit == "kv" else "the base model decodes within the TPOT SLO"
    raise SloError(
        f"--instances {num_instances}: {batch:.1f} requests each or more, {batch - most:.1f} more than "
        f"the {most:g} that {why}; give {least} or more"
    )


_FORMS = {
    "separate": "gate and up of an expert with an A each",
    "shared": "one A for gate and up of an expert (PEFT's fused form)",
}


_BESIDE = (
    "deltas are computed beside the base GEMMs; experts are chosen evenly; waiting at the server for other "
    "instances is in the simulated times, not in the predicted TPOT; instances are at layers of all stages "
    "evenly (equation 6)"
)
_COUPLED = (
    "deltas are computed after the base GEMMs; experts are chosen evenly; the default router spreads "
    "requests over instances"
)


def assumptions(inputs: PlanInputs, global_batch: float, *, coupled: bool = False) -> tuple[str, ...]:
    """A plan's assumptions, one sentence each."""
    shape, mix = inputs.shape, inputs.mix
    other = "shared" if mix.form == "separate" else "separate"
    other_bytes = replace(mix, form=other).adapter_bytes(shape)
    known = next((model for model in KNOWN_MODELS if model.name == inputs.model), None)
    sites = "adapters on every expert, none on attention" if shape.num_experts else "adapters on all sites"
    ranks = ", ".join(f"{rank} of {share:.0%} of the requests" for rank, share in mix.ranks)
    if known is not None and mix.ranks == ((known.lora_rank, 1.0),):
        usual = f"the usual one of {inputs.model} (table 3 of InfiniLoRA)"
        ranks = f"{known.lora_rank}, {usual}; --lora-rank for another"
    elif len(mix.ranks) == 1:
        ranks = f"{mix.ranks[0][0]}, as given"
    said = [
        f"LoRA rank {ranks}",
        f"{sites}; {_FORMS[mix.form]}: {bytes_text(mix.adapter_bytes(shape))} each "
        f"({other}: {bytes_text(other_bytes)})",
        _load(inputs, global_batch),
        "requests arrive independently of each other; service times do not depend on the adapter",
        f"times and memory by profile {inputs.profile.name}; {_COUPLED if coupled else _BESIDE}",
    ]
    said += [] if coupled else _unmeasured_network(inputs.profile)
    if inputs.prompts is not None:
        said.append("times of prompts are operations at the share of the FLOP rate that the profile reaches")
    if inputs.adapter_share < 1:
        said.append(f"{1 - inputs.adapter_share:.1%} of the requests ask for the base model and take no slot")
    if len(mix.ranks) > 1:
        said.append(
            "adapters of mean size stand for the mix of ranks: in memory the mean over requests or over "
            "adapters, whichever is larger; in computation the one over requests"
        )
    if inputs.weights.name != "none":
        said.append(
            f"weights held as {inputs.weights.name}: their bytes, at the rates that the profile reaches with "
            "unquantised ones"
        )
    if known is not None and known.note:
        said.append(f"{known.name}: {known.note}")
    return tuple(said)


def _unmeasured_network(profile: Profile) -> list[str]:
    """The defaults of a roofline's network; empty if the profile has all values."""
    if not isinstance(profile, RooflineProfile):
        return []
    fixed, net = ("receive", "send", "sync_per_rank"), profile.efficiency.net
    zeros = [f"fixed_us.{name}=0" for name in fixed if not getattr(profile.fixed_us, name)]
    found = [*zeros, *([] if net is not None else ["efficiency.net=1"])]
    return [f"profile {profile.name} lacks network times: {', '.join(found)}"] if found else []


def _load(inputs: PlanInputs, global_batch: float) -> str:
    if inputs.global_batch is not None:
        return f"global batch {global_batch:g} as given"
    return (
        f"global batch {global_batch:.1f} = {inputs.rate_per_s:.4g} requests/s x {inputs.output_tokens:.4g} "
        "output tokens x the predicted TPOT (Little's law)"
        + (f", and {inputs.load_margin:.0%} more" if inputs.load_margin else "")
    )


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
    """Table 1's metrics with an even choice of experts; None without experts."""
    shape = inputs.shape
    if not shape.num_experts:
        return None
    partition = Partition(shape, layout, inputs.instance_gpus, sites="auto")
    routing = uniform_routing(max(1, round(batch)), shape.num_experts_per_token, shape.num_experts, 1)
    return asdict(communication_metrics(partition, *routing))


TAIL = 0.95
BUDGET, CHECK = "budget: highest rate", "simulated check"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cluster, and its derivation."""

    capacity: int
    """M* for the global batch and all smaller."""
    capacity_paper: int
    capacity_corrected: int
    iar: float
    """Share of immediate starts with M*."""
    iar_corrected: float
    expected_active: float
    mean_wait_s: float
    """Of requests without an immediate start."""
    loads_per_s: float
    loading_share: float
    """Busy share of the server's links."""
    load_wait_s: float
    lora_server_gpus: int
    layout: str
    instances: int
    bytes_per_adapter: float
    memory_gb_per_rank: float
    binding_constraint: str
    """Reason for the number of the server's GPUs."""
    rate_limited_by: str | None
    """Limit of a budget's rate."""
    gpus_by_constraint: Mapping[str, int]
    slots: int
    """Adapters on the server, or on each coupled instance."""
    slots_iar: float
    """IAR with `slots`."""
    slots_iar_corrected: float
    total_gpus: int
    instance_gpus: int
    rate_per_s: float
    global_batch: float
    """With the margin."""
    requests_in_service: float
    batch_per_instance: float
    """With the margin."""
    running_per_instance: float
    """At rate_per_s."""
    parallel: Mapping[str, int]
    kv_gb_per_rank: float
    max_model_len: int | None
    """None: the model's."""
    max_num_seqs: int
    """Most requests of an instance within the TPOT SLO."""
    p95_ttft_s: float | None
    """None if requests would queue for adapters."""
    p95_decode_ttft_s: float | None
    prompt_share: float | None
    """Of an instance's time."""
    max_num_batched_tokens: int | None
    """None if another device computes prompts."""
    tpot_s: float
    """At rate_per_s."""
    tpot_at_load_s: float
    """With the margin."""
    serviceable_rate_per_s: float | None
    layer_ms: Mapping[str, float]
    """With the margin."""
    metrics: Mapping[str, float] | None
    """Table 1's, with the margin."""
    assumptions: tuple[str, ...]
    inputs: Mapping[str, Any]
    lower_bound: LowerBound | None
    """GPUs at peak rates."""
    ran: tuple[str, ...]
    """Parts with a run on this hardware."""
    never_ran: tuple[str, ...]
    """Parts without a run here."""
    kind: str = "lora_server"
    """lora_server, or coupled: adapters beside the weights."""
    compared: str = ""
    """Reason for this kind."""
    prefill_instances: int = 0
    """Instances for prompts alone."""
    prefill_slots: int = 0
    """Adapters on each of them beside a LoRA Server."""
    prefill_loads_per_s: float = 0.0
    """On all of them, beside the server's loads_per_s."""
    full_steps: bool = False
    """Steps of prompt tokens may exceed the TPOT SLO; the mean keeps it."""
    apart: str = ""
    """Reason for prompts together or apart."""
    checked: tuple[Replay, ...] = ()
    """Replays behind the choice."""


def make_plan(inputs: PlanInputs) -> Plan:
    """The smallest cluster for the load, or the best split of `inputs.gpus`.

    Raises SloError if no cluster holds, ConfigError for inputs without a size, ValueError for a bad
    popularity.
    """
    checked_probabilities(inputs.probabilities)
    cluster, split = Cluster(inputs), None
    if inputs.gpus is not None:
        split = best_split(cluster)
        check_budget(inputs, split)
        found = candidates(cluster, split.num_instances)
        server = smallest_server(cluster, found, split.layout.num_ranks)
    elif inputs.instances is not None:
        check_instances(cluster, inputs.instances)
        server = smallest_server(cluster, candidates(cluster, inputs.instances))
    else:
        server = smallest_cluster(cluster)
    return _plan(cluster, server, split)


def plan_of(cluster: Cluster, num_instances: int, layout: Layout) -> Plan:
    """The plan of a given cluster, without the models' consent."""
    chosen = loaded(cluster, layout, num_instances)
    chosen = with_capacity(chosen, cluster.needed(chosen.batch * num_instances))
    return _plan(cluster, server_size(chosen, candidates(cluster, num_instances)), None)


def _plan(cluster: Cluster, server: ServerSize, split: Split | None) -> Plan:
    inputs, chosen, layout = cluster.inputs, server.chosen, server.chosen.layout
    num_instances, load = chosen.num_instances, chosen.batch * chosen.num_instances
    running = cluster.steady_rows(layout, num_instances, loads=True)
    if running > chosen.batch:
        running = cluster.steady_rows(layout, num_instances, loads=False)
    tpot_s, queue = cluster.step_s(layout, num_instances, running)
    decode_s = cluster.first_token_s(layout, tpot_s)[0] + queue.p95_ttft_s(tpot_s, num_instances)
    p95_ttft_s = decode_s + cluster.prefill_s(layout.ep, tpot_s)
    place = SizedCluster(layout, num_instances, min(chosen.slots, len(inputs.probabilities)))
    active = load * inputs.adapter_share * cluster.in_service
    shared = shared_fields(cluster, place, chosen.batch, running, tpot_s, (chosen.capacity, active), queue)
    has_room = shared["slots_iar_corrected"] >= TAIL
    return Plan(
        capacity_paper=cluster.capacity_of["paper"](load),
        capacity_corrected=cluster.capacity_of["corrected"](load),
        loads_per_s=queue.loads_per_s,
        load_wait_s=queue.wait_s,
        lora_server_gpus=layout.num_ranks,
        layout=str(layout),
        memory_gb_per_rank=round(server_bytes(inputs.profile.gpu) / 1e9, 9),
        binding_constraint=server.binding if split is None else BUDGET,
        rate_limited_by=None if split is None else split.binding,
        gpus_by_constraint=server.gpus_by_constraint,
        max_num_seqs=most_rows(cluster, layout, num_instances),
        p95_ttft_s=p95_ttft_s if has_room else None,
        p95_decode_ttft_s=decode_s if has_room else None,
        **_of_prompts(cluster, layout, num_instances, shared["rate_per_s"]),
        tpot_at_load_s=chosen.step_s,
        serviceable_rate_per_s=None if split is None else split.tokens_per_s / inputs.output_tokens,
        layer_ms=layer_ms(cluster, chosen),
        metrics=table_1_metrics(inputs, layout, chosen.batch),
        assumptions=assumptions(inputs, load),
        **shared,
    )


def shared_fields(
    cluster: Cluster,
    place: SizedCluster,
    batch: float,
    running: float,
    tpot_s: float,
    needed: tuple[int, float],
    queue: LoadQueue,
) -> dict[str, Any]:
    """Fields of a plan of either kind.

    batch, running: of an instance, with and without the margin.  needed: capacity, and requests in service.
    """
    inputs, (capacity, active) = cluster.inputs, needed
    rate_per_s, load = inputs.rate_per_s, batch * place.num_decoding
    if rate_per_s is None or inputs.global_batch is not None:
        rate_per_s = running * place.num_decoding / (inputs.output_tokens * tpot_s)
    at_capacity, at_slots = (rates_at(inputs.probabilities, active, size) for size in (capacity, place.slots))
    waits = corrected_wait(inputs.probabilities, active, capacity)
    return {
        "capacity": capacity,
        "iar": at_capacity["paper"],
        "iar_corrected": at_capacity["corrected"],
        "expected_active": expected_active(inputs.probabilities, active),
        "mean_wait_s": waits * inputs.output_tokens * tpot_s,
        "loading_share": queue.utilisation,
        "instances": place.num_instances,
        "bytes_per_adapter": inputs.adapter_bytes,
        "slots": place.slots,
        "slots_iar": at_slots["paper"],
        "slots_iar_corrected": at_slots["corrected"],
        "total_gpus": place.num_gpus(inputs.instance_gpus),
        "instance_gpus": inputs.instance_gpus,
        **_memory(cluster, place),
        "rate_per_s": rate_per_s,
        "global_batch": load,
        "requests_in_service": load * cluster.in_service,
        "batch_per_instance": batch,
        "running_per_instance": running,
        "tpot_s": tpot_s,
        "inputs": inputs.to_json(),
        **evidence(inputs, place, rate_per_s),
    }


def _memory(cluster: Cluster, place: SizedCluster) -> dict[str, Any]:
    inputs, shard = cluster.inputs, cluster.inputs.shard
    coupled = place.layout is None
    requests = Coupled(cluster).kv_requests(place.slots) if coupled else cluster.kv_requests
    token_bytes = shard.shape.kv_bytes_per_token()
    kv_gb = round(requests * inputs.context_tokens * token_bytes / 1e9 * 0.999, 3)
    tokens = int(kv_gb * 1e9 / token_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    return {
        "parallel": {"tensor_parallel": shard.tensor_parallel, "expert_parallel": shard.expert_parallel},
        "kv_gb_per_rank": kv_gb,
        "max_model_len": tokens if tokens < shard.shape.max_position else None,
    }


def _of_prompts(cluster: Cluster, layout: Layout, num_instances: int, rate_per_s: float) -> dict[str, Any]:
    prompts = cluster.inputs.prompts
    if prompts is None:
        return {"prompt_share": None, "max_num_batched_tokens": None}
    rows = cluster.batch(layout, num_instances, loads=True)
    share = rate_per_s / num_instances * prompts.computed_tokens * cluster.token_s(layout.ep)
    return {"prompt_share": share, "max_num_batched_tokens": cluster.step_tokens(layout.ep, rows)}
