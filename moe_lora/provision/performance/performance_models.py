"""Performance models fitted to measured steps: least squares without negative coefficients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from moe_lora.core.errors import ConfigError
from moe_lora.policies.step_model import PHASES, StepModel, feature_names
from moe_lora.policies.step_work import Row, features


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The time of one batch's steps.  samples_s: those that `seconds` stands for.  held_out: not fitted to,
    but judged by.
    """

    phase: str
    rows: tuple[Row, ...]
    seconds: float
    held_out: bool
    samples_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FitQuality:
    """R^2 = 1 - sum (t - t')^2 / sum (t - mean t)^2 of the steps fitted to, and of those held out.

    mean_error: mean |t - t'| / t of those held out.  R^2 is None of steps that all take the same time.
    """

    num_fitted: int
    num_held_out: int
    r2_fitted: float | None
    r2_held_out: float | None
    mean_error: float


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """A model and how well it tells the times of each phase."""

    model: StepModel
    quality: Mapping[str, FitQuality]


def fit_model(steps: Sequence[MeasuredStep], *, kernel: str, form: str, expert_share: float) -> FittedModel:
    """argmin over c >= 0 of sum ((t - c . features) / t)^2, for decode and for prefill steps by themselves.

    Errors count relative to the step's time, so that short steps are told as well as long ones.  steps: of
    this kernel.  Raises ConfigError if a phase has fewer steps to fit to than coefficients, none held out, or
    a time that is not positive.
    """
    coefficients, quality = {}, {}
    for phase in PHASES:
        names = feature_names(kernel, form, phase)
        fitted = [step for step in steps if step.phase == phase and not step.held_out]
        held_out = [step for step in steps if step.phase == phase and step.held_out]
        _check_enough(phase, len(names), fitted, held_out)
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
    """1 - sum (t - t')^2 / sum (t - mean t)^2; None where all times are equal."""
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


def _check_enough(
    phase: str, num_coefficients: int, fitted: Sequence[MeasuredStep], held_out: Sequence[MeasuredStep]
) -> None:
    if len(fitted) < num_coefficients or not held_out:
        raise ConfigError(
            f"{len(fitted)} {phase} steps to fit {num_coefficients} coefficients to, and {len(held_out)} "
            "held out to judge by; measure more batches or ranks"
        )
    bad = next((step for step in (*fitted, *held_out) if not 0 < step.seconds < float("inf")), None)
    if bad is not None:
        raise ConfigError(f"a {phase} step of {len(bad.rows)} requests took {bad.seconds} s; measure again")
