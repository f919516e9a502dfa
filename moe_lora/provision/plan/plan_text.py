"""A plan as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from .memory import bytes_text
from .plan import Plan
from .verify import ARRIVALS, Replay


def plan_lines(plan: Plan) -> list[str]:
    """What to deploy, why, what to expect, and what was assumed."""
    lines = [f"{name:<18} {text}" for name, text in (*_deployed(plan), *_sized(plan), *_expected(plan))]
    return [*lines, "", "Assumed:", *(f"- {sentence}" for sentence in plan.assumptions)]


def _deployed(plan: Plan) -> Iterator[tuple[str, str]]:
    given = plan.inputs
    yield "GPUs in all", f"{plan.total_gpus} of {given['hardware']}: {deployment(plan)}"
    for number, one in enumerate(plan.checked):
        yield "" if number else "Simulated", _replay(one)
    source = given["popularity_source"] or "popularity as given"
    held = "" if given["weights"] == "none" else f" held as {given['weights']}"
    yield "Model", f"{given['model']}{held}, {given['num_adapters']} adapters ({source})"
    size = bytes_text(plan.bytes_per_adapter)
    yield "Adapter", f"LoRA rank {ranks_text(plan)}: {size}, {given['adapter_form']} A for gate and up"


def _sized(plan: Plan) -> Iterator[tuple[str, str]]:
    target = plan.inputs["target_iar"]
    using = f"using {plan.expected_active:.1f} adapters (expected)"
    yield "Requests at once", f"{plan.global_batch:.1f}, {using}"
    by_each = f"by the paper's model {plan.capacity_paper}, by the corrected one {plan.capacity_corrected}"
    yield "M*", f"{plan.capacity} adapters for {target:.1%} admitted at once ({by_each})"
    if plan.capacity < plan.expected_active:
        waits = f"who has to wait, waits {plan.mean_wait_s:.2f} s for a slot on average"
        yield "", f"fewer than are active: {waits}; raise --target-iar where that is too long"
    yield "IAR at M*", _rates(plan.iar, plan.iar_corrected)
    held = f"{plan.layout}, holding {plan.slots} adapters"
    yield "LoRA Server", f"{_gpus(plan.lora_server_gpus)} as {held}"
    yield "IAR there", _rates(plan.slots_iar, plan.slots_iar_corrected)
    if plan.slots_iar_corrected < target:
        yield "", "below the target by the corrected model: --estimator corrected sizes by it"
    wait = f", a wait of {plan.load_wait_s * 1e3:.1f} ms before one begins" if plan.loads_per_s else ""
    yield "Loads", f"{plan.loads_per_s:.2f} adapters/s, {plan.loading_share:.0%} of the links' time{wait}"
    needs = ", ".join(f"{name} alone: {gpus}" for name, gpus in plan.gpus_by_constraint.items())
    yield "Bound by", f"{plan.binding_constraint} ({needs or 'by the models none meets them all'})"


def _expected(plan: Plan) -> Iterator[tuple[str, str]]:
    given, ms = plan.inputs, plan.layer_ms
    each = f"{plan.batch_per_instance:.1f} requests each"
    yield "Instances", f"{plan.instances} of {_gpus(plan.instance_gpus)}, {each}"
    slo = f"SLO {given['slo_ttft_s']:g} s"
    if plan.p95_ttft_s is None:
        yield "P95 TTFT", f"not known: fewer than 95 % start at once, so the tail queues ({slo})"
    else:
        predicted = f"{plan.p95_ttft_s * 1e3:.1f} ms predicted"
        yield "P95 TTFT", f"{predicted}, waits for loads included, without prefill ({slo})"
    at_load = f"{plan.tpot_at_load_s * 1e3:.2f} ms at the batch sized for"
    yield "TPOT", f"{plan.tpot_s * 1e3:.2f} ms, {at_load} (SLO {given['slo_tpot_s']:g} s)"
    base = f"attention {ms['attention']:.3f} ms, experts {ms['experts']:.3f} ms"
    served = f"receive {ms['receive']:.3f} + compute {ms['compute']:.3f} + send {ms['send']:.3f} ms"
    yield "A layer", f"{base} beside {served}"
    yield "Budgets", f"SLO_Layer {ms['slo_layer']:.3f} ms, SLO_FFN {ms['slo_ffn']:.3f} ms"
    if plan.serviceable_rate_per_s is not None:
        rate = f"{plan.serviceable_rate_per_s:.1f} requests/s"
        yield "Serviceable rate", f"{rate} ({plan.rate_limited_by} limits)"


def deployment(plan: Plan) -> str:
    """What runs on the GPUs."""
    each = _gpus(plan.instance_gpus)
    instances = f"1 instance of {each}" if plan.instances == 1 else f"{plan.instances} instances of {each}"
    return f"{instances} beside a LoRA Server of {_gpus(plan.lora_server_gpus)} ({plan.layout})"


def ranks_text(plan: Plan) -> str:
    """The ranks, with their shares if there are several."""
    ranks = plan.inputs["lora_ranks"]
    return ", ".join(f"{rank} ({share:.0%})" if len(ranks) > 1 else str(rank) for rank, share in ranks)


def _replay(one: Replay) -> str:
    at_once, ttft_s, tpot_s = one.admitted_at_once, one.p95_ttft_s, one.mean_tpot_s
    if at_once is None or ttft_s is None:
        return f"{ARRIVALS[one.arrivals]}: no request was judged"
    tpot = "" if tpot_s is None else f", TPOT {tpot_s * 1e3:.1f} ms"
    return f"{ARRIVALS[one.arrivals]}: {at_once:.1%} at once, P95 TTFT {ttft_s * 1e3:.0f} ms{tpot}"


def _rates(paper: float, corrected: float) -> str:
    return f"{paper:.2%} by the paper's model, {corrected:.2%} by the corrected one"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


# A plan as the file that `moe-lora serve --config` takes.


PLACEHOLDER_DIR = "MODEL_DIR"


def plan_yaml(
    plan: Plan,
    model_dir: str | None,
    adapters: Sequence[tuple[str, str]] = (),
    engine: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """cluster.yaml for the plan (fields: docs/reference/cluster_file.md).

    model_dir: None writes a placeholder, and a comment that says so.  adapters: (name, directory) pairs;
    others come over HTTP or from --lora-dir.  engine: further settings of instances.
    """
    content = {
        "model_dir": model_dir or PLACEHOLDER_DIR,
        **({"adapters": dict(adapters)} if adapters else {}),
        "engine": {
            "max_num_seqs": plan.max_num_seqs,
            "expert_parallel": plan.instance_gpus,
            "num_instances": plan.instances,
            **engine,
        },
        "lora_server": {
            "layout": plan.layout,
            "capacity": plan.slots,
            "memory_gb": plan.memory_gb_per_rank,
        },
    }
    lines = [
        f"# {plan.total_gpus} GPUs of {plan.inputs['hardware']}: {deployment(plan)}",
        f"# Model: {plan.inputs['model']}.  Adapters: {plan.inputs['num_adapters']} of LoRA rank "
        f"{ranks_text(plan)}, {bytes_text(plan.bytes_per_adapter)} each; name their",
        "# folders under adapters (name: folder), or give --lora-dir, or load them over HTTP.",
        f"# M* = {plan.capacity} for an IAR of {plan.inputs['target_iar']:g}; the server's GPUs hold "
        f"{plan.slots}; bound by {plan.binding_constraint}",
        "# For one host. Over several (docs/reference/cluster_file.md) add certificates,",
        "# lora_server.address, store_dir and transport, front_end.engines_address, and set",
        "# engine.num_instances to the instances of a host.",
    ]
    if model_dir is None:
        lines.append(f"# {PLACEHOLDER_DIR} is a placeholder: put the checkpoint's folder there.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)
