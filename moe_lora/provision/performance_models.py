# SPDX-License-Identifier: Apache-2.0
"""Performance models fitted to measured steps: nonnegative least squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from scipy.optimize import nnls

from moe_lora.config.json_file import FileContent, checked, read_object
from moe_lora.core.errors import ConfigError
from moe_lora.timing.step_model import PHASES, Row, StepModel, feature_names, features


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Time of a batch's steps."""

    phase: str
    rows: tuple[Row, ...]
    seconds: float
    held_out: bool
    """Not for fitting."""
    samples_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FitQuality:
    """R^2 = 1 - sum (t - t')^2 / sum (t - mean t)^2 of fitted and of held-out steps; None for equal times."""

    num_fitted: int
    num_held_out: int
    r2_fitted: float | None
    r2_held_out: float | None
    mean_error: float
    """Mean |t - t'| / t of held-out steps."""


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """A model and its fit quality by phase."""

    model: StepModel
    quality: Mapping[str, FitQuality]


def fit_model(steps: Sequence[MeasuredStep], *, kernel: str, form: str, expert_share: float) -> FittedModel:
    """argmin over c >= 0 of sum ((t - c . features) / t)^2, separately for decode and prefill steps.

    Raises ConfigError if a phase has fewer fitted steps than coefficients, no held-out step, or a time <= 0.
    """
    coefficients, quality = {}, {}
    for phase in PHASES:
        names = feature_names(kernel, form, phase)
        fitted = [step for step in steps if step.phase == phase and not step.held_out]
        held_out = [step for step in steps if step.phase == phase and step.held_out]
        check_enough([*fitted, *held_out], kernel, form, phase)
        bad = next((step for step in (*fitted, *held_out) if not 0 < step.seconds < float("inf")), None)
        if bad is not None:
            raise ConfigError(
                f"a {phase} step of {len(bad.rows)} requests took {bad.seconds} s; measure again"
            )
        values, times = _matrix(fitted, names, expert_share)
        found, _ = nnls(values / times[:, None], np.ones(len(times)))
        coefficients[phase] = {name: float(value) for name, value in zip(names, found, strict=True)}
        other_values, other_times = _matrix(held_out, names, expert_share)
        predicted = other_values @ found
        quality[phase] = FitQuality(
            num_fitted=len(fitted),
            num_held_out=len(held_out),
            r2_fitted=r_squared(times, values @ found),
            r2_held_out=r_squared(other_times, predicted),
            mean_error=float(np.mean(np.abs(other_times - predicted) / other_times)),
        )
    model = StepModel(
        kernel=kernel,
        form=form,
        expert_share=expert_share,
        decode_s=coefficients["decode"],
        prefill_s=coefficients["prefill"],
    )
    return FittedModel(model=model, quality=quality)


def r_squared(times: NDArray[np.float64], predicted: NDArray[np.float64]) -> float | None:
    """1 - sum (t - t')^2 / sum (t - mean t)^2; None for equal times."""
    spread = float(np.sum((times - times.mean()) ** 2))
    return 1.0 - float(np.sum((times - predicted) ** 2)) / spread if spread > 0 else None


def _matrix(
    steps: Sequence[MeasuredStep], names: Sequence[str], expert_share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = []
    for step in steps:
        found = features(step.rows, expert_share)
        rows.append([found[name] for name in names])
    return np.array(rows), np.array([step.seconds for step in steps])


def check_enough(batches: Sequence[Batch | MeasuredStep], kernel: str, form: str, phase: str) -> None:
    """Raise ConfigError for fewer fitted batches than coefficients, and for none held out."""
    needed, held_out = len(feature_names(kernel, form, phase)), sum(one.held_out for one in batches)
    fitted = len(batches) - held_out
    if fitted < needed or not held_out:
        raise ConfigError(
            f"{fitted} {phase} steps to fit {needed} coefficients to, and {held_out} held out to judge by; "
            "measure more batches or ranks"
        )


FORMAT = "moe-lora performance models"


def file_content(
    fitted: Sequence[FittedModel],
    steps: Mapping[str, Sequence[MeasuredStep]],
    *,
    model: str,
    settings: Mapping[str, Any],
    env: Mapping[str, Any],
    weights: str = "none",
) -> dict[str, Any]:
    """The file's fields.  steps: by kernel."""
    return {
        "format": FORMAT,
        "kind": "measured",
        "model": model,
        "weights": weights,
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


def read_step_model(
    path: str | Path, *, kernel: str | None = None, form: str = "full", weights: str | None = None
) -> StepModel:
    """The model from a file of `moe-lora profile-steps`.

    kernel: None: the only kernel.  form: "full", or "toppings" for equation 2.  weights: required format;
    None: any.  Raises ConfigError with the fault.
    """
    content = read_object(path, "moe-lora profile-steps MODEL_DIR --out FILE")
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path}: format is not {FORMAT!r}; give a file of `moe-lora profile-steps`")
    found = content.get("weights", "none")
    if weights not in (None, found):
        raise ConfigError(
            f"{path} was measured with weights held as {found!r}, and this engine holds them as {weights!r}; "
            "measure again with the same --quantize"
        )
    listed: list[_Listed] = checked(path, _File, content).models
    try:
        return _choose([StepModel(**one.model_dump(exclude={"quality"})) for one in listed], kernel, form)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Listed(FileContent):
    kernel: str
    form: str
    expert_share: float
    decode_s: dict[str, float]
    prefill_s: dict[str, float]
    quality: Any = None


class _File(BaseModel):
    models: list[_Listed]


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


HELD_OUT_SHARE = 0.25
MAX_PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests with a common start: a prefill, then decode steps."""

    rows: tuple[Row, ...]
    held_out: bool


class TimedEngine(Protocol):
    """Runs batches and reads a clock."""

    def run(self, rows: Sequence[Row]) -> tuple[float, list[float]]:
        """Seconds of the prefill step, and of decode steps."""
        ...


def adapter_names(ranks: Sequence[int], num_adapters: int) -> dict[str, int]:
    """num_adapters names for each rank: name -> rank."""
    return {f"rank{rank}-{index}": rank for rank in ranks for index in range(num_adapters)}


def batches_to_time(
    ranks: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    num_adapters: int,
    num_mixed: int,
    max_tokens: int,
    seed: int = 0,
) -> list[Batch]:
    """Batches that show every term of a performance model.

    Each (rank, batch size) with all adapters and with one; num_mixed random batches; each size without
    adapters.  Holds out a random quarter.  Raises ConfigError for no ranks or sizes, and for more requests
    than max_tokens.
    """
    if not ranks or not batch_sizes:
        raise ConfigError("no ranks or no batch sizes were given; give one or more of each")
    if max(batch_sizes) > max_tokens:
        raise ConfigError(
            f"batch size {max(batch_sizes)} is more than the {max_tokens} tokens of a step; allow more tokens"
        )
    rng = np.random.default_rng(seed)
    names = adapter_names(ranks, num_adapters)
    chosen: list[list[tuple[str | None, int]]] = [[(None, 0)] * size for size in batch_sizes]
    for rank in ranks:
        own = [name for name, lora_rank in names.items() if lora_rank == rank]
        for size in batch_sizes:
            chosen.append([(own[i % len(own)], rank) for i in range(size)])
            if size > 1 and len(own) > 1:
                chosen.append([(own[0], rank)] * size)
    everything = list(names.items())
    for _ in range(num_mixed):
        size = int(rng.integers(1, max(batch_sizes) + 1))
        pool = rng.choice(len(everything), size=int(rng.integers(1, len(everything) + 1)), replace=False)
        chosen.append([everything[int(i)] for i in rng.choice(pool, size=size)])
    held_out = rng.permutation(len(chosen)) < HELD_OUT_SHARE * len(chosen)
    return [
        Batch(rows=_with_prompts(one, max_tokens, rng), held_out=bool(out))
        for one, out in zip(chosen, held_out, strict=True)
    ]


def measure(
    clocks: Mapping[str, TimedEngine],
    batches: Sequence[Batch],
    num_rounds: int,
    *,
    quantile: float = 0.5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[MeasuredStep]]:
    """By kernel: a prefill and a decode step of each batch, after a warm-up round.

    Kernels take turns.  quantile: of samples.  Raises ConfigError outside [0, 1].
    """
    if not 0 <= quantile <= 1:
        raise ConfigError(f"quantile={quantile} must lie between 0 and 1 (0.5: the median)")
    prefill: dict[tuple[str, int], list[float]] = {}
    decode: dict[tuple[str, int], list[float]] = {}
    total = (num_rounds + 1) * len(batches)
    for number in range(-1, num_rounds):
        order = list(clocks)[:: 1 if number % 2 else -1]
        for index, batch in enumerate(batches):
            for kernel in order:
                prefill_s, decode_s = clocks[kernel].run(batch.rows)
                if number >= 0:
                    prefill.setdefault((kernel, index), []).append(prefill_s)
                    decode.setdefault((kernel, index), []).extend(decode_s)
            on_progress((number + 1) * len(batches) + index + 1, total)
    return {
        kernel: [_step("prefill", batch, prefill[kernel, i], quantile) for i, batch in enumerate(batches)]
        + [_step("decode", batch, decode[kernel, i], quantile) for i, batch in enumerate(batches)]
        for kernel in clocks
    }


def _step(phase: str, batch: Batch, samples_s: Sequence[float], quantile: float) -> MeasuredStep:
    return MeasuredStep(
        phase=phase,
        rows=batch.rows if phase == "prefill" else tuple(Row(r.adapter, r.lora_rank) for r in batch.rows),
        seconds=float(np.quantile(samples_s, quantile)),
        held_out=batch.held_out,
        samples_s=tuple(samples_s),
    )


def _with_prompts(
    rows: Sequence[tuple[str | None, int]], max_tokens: int, rng: np.random.Generator
) -> tuple[Row, ...]:
    longest = min(MAX_PROMPT_TOKENS, max_tokens // len(rows))
    lengths = rng.integers(1, longest + 1, size=len(rows))
    return tuple(Row(name, rank, int(n)) for (name, rank), n in zip(rows, lengths, strict=True))
