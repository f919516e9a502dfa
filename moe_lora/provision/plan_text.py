"""A plan as lines for a person."""

from __future__ import annotations

import math

from .memory import bytes_text
from .plan import Plan


def plan_lines(plan: Plan) -> list[str]:
    """What to deploy, why, what to expect, and what was assumed."""
    ms = plan.layer_ms
    rows = [
        ("Model", f"{plan.inputs['model']}, {plan.inputs['num_adapters']} adapters ({_source(plan)})"),
        (
            "Adapter",
            f"{bytes_text(plan.bytes_per_adapter)}, {plan.inputs['adapter_form']} A for gate and up",
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
        ("GPUs in all", str(plan.total_gpus)),
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
    if plan.serviceable_rate_per_s is not None:
        rows.append(
            (
                "Serviceable rate",
                f"{plan.serviceable_rate_per_s:.1f} requests/s ({plan.rate_limited_by} limits)",
            )
        )
    if plan.slots_iar_corrected < plan.inputs["target_iar"]:
        rows.insert(7, ("", "below the target by the corrected model: --estimator corrected sizes by it"))
    if plan.capacity < plan.expected_active:
        rows.insert(
            5,
            (
                "",
                f"fewer than are active: who has to wait, waits {plan.mean_wait_s:.2f} s for a slot on "
                "average; raise --target-iar where that is too long",
            ),
        )
    lines = [f"{name:<18} {text}" for name, text in rows]
    return [*lines, "", "Assumed:", *(f"- {sentence}" for sentence in plan.assumptions)]


def _source(plan: Plan) -> str:
    return plan.inputs["popularity_source"] or "popularity as given"


def _rates(paper: float, corrected: float) -> str:
    return f"{paper:.2%} by the paper's model, {corrected:.2%} by the corrected one"


def _needs(plan: Plan) -> str:
    return ", ".join(f"{name} alone: {gpus}" for name, gpus in plan.gpus_by_constraint.items())


def _queue(plan: Plan) -> str:
    if math.isinf(plan.load_wait_s):
        return ": by the model they can't be kept up with; simulated, they are"
    return f", a wait of {plan.load_wait_s * 1e3:.1f} ms before one begins" if plan.loads_per_s else ""


def _ttft(plan: Plan) -> str:
    slo = f"SLO {plan.inputs['slo_ttft_s']:g} s"
    if plan.p95_ttft_s is None:
        return f"not known: fewer than 95 % start at once, so the tail queues ({slo})"
    return f"{plan.p95_ttft_s * 1e3:.1f} ms without prefill: first layer's load and three steps ({slo})"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
