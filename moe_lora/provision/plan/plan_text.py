"""A plan as lines for a person."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from .memory import bytes_text
from .plan import Plan
from .verify import ARRIVALS, Replay


def plan_lines(plan: Plan) -> list[str]:
    """What to deploy, why, what to expect, and what was assumed."""
    ms = plan.layer_ms
    rows = [
        ("GPUs in all", f"{plan.total_gpus} of {plan.inputs['hardware']}: {deployment(plan)}"),
        *(("Simulated" if number == 0 else "", _replay(one)) for number, one in enumerate(plan.checked)),
        ("Model", f"{plan.inputs['model']}, {plan.inputs['num_adapters']} adapters ({_source(plan)})"),
        (
            "Adapter",
            f"LoRA rank {ranks_text(plan)}: {bytes_text(plan.bytes_per_adapter)}, "
            f"{plan.inputs['adapter_form']} A for gate and up",
        ),
        (
            "Requests at once",
            f"{plan.global_batch:.1f}, using {plan.expected_active:.1f} adapters (expected)",
        ),
        (
            "M*",
            f"{plan.capacity} adapters for {plan.inputs['target_iar']:.1%} admitted at once "
            f"(by the paper's model {plan.capacity_paper}, by the corrected one {plan.capacity_corrected})",
        ),
        ("IAR at M*", _rates(plan.iar, plan.iar_corrected)),
        ("LoRA Server", f"{_gpus(plan.lora_server_gpus)} as {plan.layout}, holding {plan.slots} adapters"),
        ("IAR there", _rates(plan.slots_iar, plan.slots_iar_corrected)),
        (
            "Loads",
            f"{plan.loads_per_s:.2f} adapters/s, {plan.loading_share:.0%} of the links' time{_queue(plan)}",
        ),
        ("Bound by", f"{plan.binding_constraint} ({_needs(plan)})"),
        (
            "Instances",
            f"{plan.instances} of {_gpus(plan.instance_gpus)}, {plan.batch_per_instance:.1f} requests each",
        ),
        ("P95 TTFT", _ttft(plan)),
        (
            "TPOT",
            f"{plan.tpot_s * 1e3:.2f} ms, {plan.tpot_at_load_s * 1e3:.2f} ms at the batch sized for "
            f"(SLO {plan.inputs['slo_tpot_s']:g} s)",
        ),
        (
            "A layer",
            f"attention {ms['attention']:.3f} ms, experts {ms['experts']:.3f} ms beside receive "
            f"{ms['receive']:.3f} + compute {ms['compute']:.3f} + send {ms['send']:.3f} ms",
        ),
        ("Budgets", f"SLO_Layer {ms['slo_layer']:.3f} ms, SLO_FFN {ms['slo_ffn']:.3f} ms"),
    ]

    def place(name: str) -> int:
        return [first for first, _ in rows].index(name)

    if plan.serviceable_rate_per_s is not None:
        rows.append(
            (
                "Serviceable rate",
                f"{plan.serviceable_rate_per_s:.1f} requests/s ({plan.rate_limited_by} limits)",
            )
        )
    if plan.slots_iar_corrected < plan.inputs["target_iar"]:
        rows.insert(
            place("IAR there") + 1,
            ("", "below the target by the corrected model: --estimator corrected sizes by it"),
        )
    if plan.capacity < plan.expected_active:
        rows.insert(
            place("M*") + 1,
            (
                "",
                f"fewer than are active: who has to wait, waits {plan.mean_wait_s:.2f} s for a slot on "
                "average; raise --target-iar where that is too long",
            ),
        )
    lines = [f"{name:<18} {text}" for name, text in rows]
    return [*lines, "", "Assumed:", *(f"- {sentence}" for sentence in plan.assumptions)]


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


def _source(plan: Plan) -> str:
    return plan.inputs["popularity_source"] or "popularity as given"


def _rates(paper: float, corrected: float) -> str:
    return f"{paper:.2%} by the paper's model, {corrected:.2%} by the corrected one"


def _needs(plan: Plan) -> str:
    if not plan.gpus_by_constraint:
        return "by the models none meets them all"
    return ", ".join(f"{name} alone: {gpus}" for name, gpus in plan.gpus_by_constraint.items())


def _queue(plan: Plan) -> str:
    return f", a wait of {plan.load_wait_s * 1e3:.1f} ms before one begins" if plan.loads_per_s else ""


def _ttft(plan: Plan) -> str:
    slo = f"SLO {plan.inputs['slo_ttft_s']:g} s"
    if plan.p95_ttft_s is None:
        return f"not known: fewer than 95 % start at once, so the tail queues ({slo})"
    return f"{plan.p95_ttft_s * 1e3:.1f} ms predicted, waits for loads included, without prefill ({slo})"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


# A plan as the file that `moe-lora serve --config` takes.


PLACEHOLDER_DIR = "MODEL_DIR"


def plan_yaml(plan: Plan, model_dir: str | None, adapters: Sequence[tuple[str, str]] = ()) -> str:
    """cluster.yaml for the plan (fields: docs/reference/cluster_file.md).

    model_dir: None writes a placeholder, and a comment that says so.  adapters: (name, directory) pairs;
    others come over HTTP or from --lora-dir.
    """
    content = {
        "model_dir": model_dir or PLACEHOLDER_DIR,
        **({"adapters": dict(adapters)} if adapters else {}),
        "engine": {
            "max_num_seqs": plan.max_num_seqs,
            "expert_parallel": plan.instance_gpus,
            "num_instances": plan.instances,
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
