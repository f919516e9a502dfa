"""What a plan takes for granted, in sentences that are printed with it."""

from __future__ import annotations

from dataclasses import replace

from .known_models import KNOWN_MODELS

from .inputs import PlanInputs
from .memory import bytes_text

_FORMS = {
    "separate": "gate and up of an expert with an A each",
    "shared": "one A for gate and up of an expert (PEFT's fused form)",
}


def assumptions(inputs: PlanInputs, global_batch: float) -> tuple[str, ...]:
    """One sentence each: adapter form, load, popularity, hardware, model."""
    shape, mix = inputs.shape, inputs.mix
    other = "shared" if mix.form == "separate" else "separate"
    other_bytes = replace(mix, form=other).adapter_bytes(shape)
    sites = "adapters on every expert, none on attention" if shape.num_experts else "adapters on all sites"
    usual = {model.name: model.lora_rank for model in KNOWN_MODELS}.get(inputs.model)
    ranks = ", ".join(f"{rank} of {share:.0%} of the requests" for rank, share in mix.ranks)
    if mix.ranks == ((usual, 1.0),):
        ranks = f"{usual}, the usual one of {inputs.model} (table 3 of InfiniLoRA); --lora-rank for another"
    elif len(mix.ranks) == 1:
        ranks = f"{mix.ranks[0][0]}, as given"
    said = [
        f"LoRA rank {ranks}",
        f"{sites}; {_FORMS[mix.form]}: {bytes_text(mix.adapter_bytes(shape))} each "
        f"({other}: {bytes_text(other_bytes)})",
        _load(inputs, global_batch),
        "requests arrive independently of each other; service times do not depend on the adapter",
        f"times and memory by profile {inputs.profile.name}; deltas are computed beside the base GEMMs; "
        "experts are chosen evenly; waiting at the server for other instances is in the simulated times, not "
        "in the predicted TPOT; instances are at layers of all stages evenly (equation 6)",
    ]
    if inputs.adapter_share < 1:
        said.append(f"{1 - inputs.adapter_share:.1%} of the requests ask for the base model and take no slot")
    if len(mix.ranks) > 1:
        said.append(
            "adapters of mean size stand for the mix of ranks: in memory the mean over requests or over "
            "adapters, whichever is larger; in computation the one over requests"
        )
    notes = {model.name: model.note for model in KNOWN_MODELS}
    if notes.get(inputs.model):
        said.append(f"{inputs.model}: {notes[inputs.model]}")
    return tuple(said)


def _load(inputs: PlanInputs, global_batch: float) -> str:
    if inputs.global_batch is not None:
        return f"global batch {global_batch:g} as given"
    return (
        f"global batch {global_batch:.1f} = {inputs.rate_per_s:.4g} requests/s x {inputs.output_tokens:.4g} "
        "output tokens x the predicted TPOT (Little's law)"
        + (f", and {inputs.load_margin:.0%} more" if inputs.load_margin else "")
    )
