"""Performance models in a JSON file: what was measured, where, what was fitted to it and how well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError
from moe_lora.policies.step_model import StepModel

from .performance_models import FittedModel, MeasuredStep
from moe_lora.provision.profile_fields import Section, file_fields

FORMAT = "moe-lora performance models"


def file_content(
    fitted: Sequence[FittedModel],
    steps: Mapping[str, Sequence[MeasuredStep]],
    *,
    model: str,
    settings: Mapping[str, Any],
    env: Mapping[str, Any],
) -> dict[str, Any]:
    """The file's fields.  steps: by kernel; settings, env: what it was measured with and on."""
    return {
        "format": FORMAT,
        "kind": "measured",
        "model": model,
        "settings": dict(settings),
        "env": dict(env),
        "models": [
            {**asdict(one.model), "quality": {phase: asdict(found) for phase, found in one.quality.items()}}
            for one in fitted
        ],
        "steps": [
            {
                "kernel": kernel,
                "phase": step.phase,
                "adapters": [row.adapter for row in step.rows],
                "lora_ranks": [row.lora_rank for row in step.rows],
                "num_tokens": [row.num_tokens for row in step.rows],
                "seconds": step.seconds,
                "samples_s": list(step.samples_s),
                "held_out": step.held_out,
            }
            for kernel, measured in steps.items()
            for step in measured
        ],
    }


def read_step_model(path: str | Path, *, kernel: str | None = None, form: str = "full") -> StepModel:
    """The model of this kernel and form in a file of `moe-lora profile-steps`.

    kernel: None = the file's only one.  form: "full", or "toppings" for equation 2 alone.  Raises ConfigError
    naming the file and what is wrong with it.
    """
    with file_fields(path, "moe-lora profile-steps MODEL_DIR --out FILE") as top:
        return _choose(_models(top), kernel, form)


def _models(top: Section) -> list[StepModel]:
    if not top.has("format") or top.text("format") != FORMAT:
        raise ConfigError(f"format is not {FORMAT!r}; give a file of `moe-lora profile-steps`")
    return [_model(section) for section in top.list_of_sections("models")]


def _choose(models: Sequence[StepModel], kernel: str | None, form: str) -> StepModel:
    kernels = sorted({model.kernel for model in models})
    if kernel is None:
        if len(kernels) != 1:
            raise ConfigError(f"it has models of {', '.join(kernels) or 'no kernel'}; name one of them")
        kernel = kernels[0]
    for model in models:
        if (model.kernel, model.form) == (kernel, form):
            return model
    known = ", ".join(f"{model.kernel} ({model.form})" for model in models)
    raise ConfigError(f"it has no {form} model of kernel {kernel!r}; it has {known or 'none'}")


def _model(section: Section) -> StepModel:
    section.only("kernel", "form", "expert_share", "decode_s", "prefill_s", "quality")
    return StepModel(
        kernel=section.text("kernel"),
        form=section.text("form"),
        expert_share=section.number("expert_share", most=1.0),
        decode_s=_coefficients(section.section("decode_s")),
        prefill_s=_coefficients(section.section("prefill_s")),
    )


def _coefficients(section: Section) -> dict[str, float]:
    return {key: section.number(key, zero=True) for key, _ in section.items()}
