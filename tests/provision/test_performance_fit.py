# SPDX-License-Identifier: Apache-2.0
"""Fits where the truth is known, batches that tell the terms apart, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lora.config import PERFORMANCE_FORMS
from moe_lora.core.errors import ConfigError
from moe_lora.provision.performance_models import (
    MeasuredStep,
    adapter_names,
    batches_to_time,
    file_content,
    fit_model,
    measure,
    r_squared,
    read_step_model,
)
from moe_lora.timing.step_model import Row, StepModel, feature_names

SECONDS = {
    "step": 5e-3,
    "tokens": 1e-4,
    "experts": 2e-3,
    "padded_ranks": 3e-6,
    "ranks": 1e-6,
    "adapter_ranks": 4e-6,
    "expert_ranks": 8e-6,
}
SHARE = 0.25


def truth(kernel: str, form: str) -> StepModel:
    decode, prefill = (
        {name: SECONDS[name] for name in feature_names(kernel, form, phase)}
        for phase in ("decode", "prefill")
    )
    return StepModel(kernel=kernel, form=form, expert_share=SHARE, decode_s=decode, prefill_s=prefill)


class ModelClock:
    """A machine that takes exactly the time of a model, but for noise."""

    def __init__(self, model: StepModel, noise: float = 0.0) -> None:
        self._model, self._noise = model, noise
        self._rng = np.random.default_rng(0)

    def run(self, rows: Sequence[Row]) -> tuple[float, list[float]]:
        factors = 1 + self._noise * self._rng.standard_normal(5)
        prefill_s, decode_s = self._model.prefill_step_s(rows), self._model.decode_step_s(rows)
        return prefill_s * factors[0], [decode_s * factor for factor in factors[1:]]


def batches() -> list[Any]:
    return batches_to_time(
        (8, 16, 32, 64), (1, 2, 4, 8, 16, 32), num_adapters=6, num_mixed=40, max_tokens=512
    )


def steps_of(model: StepModel, noise: float = 0.0) -> list[MeasuredStep]:
    return measure({model.kernel: ModelClock(model, noise)}, batches(), 3)[model.kernel]


@pytest.mark.parametrize("kernel", ["sgmv", "bgmv", "mbgmv"])
@pytest.mark.parametrize("form", PERFORMANCE_FORMS)
def test_coefficients_are_recovered(kernel: str, form: str) -> None:
    known = truth(kernel, form)
    fitted = fit_model(steps_of(known), kernel=kernel, form=form, expert_share=SHARE)
    for phase in ("decode_s", "prefill_s"):
        assert getattr(fitted.model, phase) == pytest.approx(getattr(known, phase), rel=1e-5)
    for quality in fitted.quality.values():
        assert quality.r2_held_out == pytest.approx(1.0)
        assert quality.mean_error == pytest.approx(0.0, abs=1e-9)


def test_noise_lowers_r2_but_leaves_the_model_near_the_truth() -> None:
    known = truth("sgmv", "full")
    fitted = fit_model(steps_of(known, 0.05), kernel="sgmv", form="full", expert_share=SHARE)
    decode = fitted.quality["decode"]
    assert 0.9 < decode.r2_held_out < 1
    rows = [Row("a", 8), Row("b", 64), Row("a", 8)]
    assert fitted.model.decode_step_s(rows) == pytest.approx(known.decode_step_s(rows), rel=0.05)


def test_padded_times_are_not_told_by_true_ranks() -> None:
    steps = steps_of(truth("bgmv", "toppings"))
    right = fit_model(steps, kernel="bgmv", form="toppings", expert_share=SHARE)
    wrong = fit_model(steps, kernel="mbgmv", form="toppings", expert_share=SHARE)
    assert wrong.quality["decode"].r2_held_out < right.quality["decode"].r2_held_out - 0.02


def test_a_term_that_would_be_negative_is_zero() -> None:
    steps = [
        MeasuredStep(phase=phase, rows=(Row(None, 0, 1),) * count, seconds=1 / count, held_out=count % 3 == 0)
        for phase in ("decode", "prefill")
        for count in range(1, 12)
    ]
    fitted = fit_model(steps, kernel="bgmv", form="toppings", expert_share=1.0)
    assert fitted.model.prefill_s["tokens"] == 0


def test_r_squared_by_hand() -> None:
    assert r_squared(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])) == pytest.approx(0.5)
    assert r_squared(np.array([2.0, 2.0]), np.array([2.0, 2.0])) is None


def test_too_few_steps_are_refused() -> None:
    some = [step for step in steps_of(truth("sgmv", "full")) if not step.held_out]
    with pytest.raises(ConfigError, match="0 held out to judge by; measure more"):
        fit_model(some, kernel="sgmv", form="full", expert_share=SHARE)


def test_a_step_of_no_time_is_refused() -> None:
    steps = steps_of(truth("bgmv", "toppings"))
    bad = [MeasuredStep(phase="decode", rows=(Row("a", 8),), seconds=0.0, held_out=False), *steps]
    with pytest.raises(ConfigError, match=r"took 0\.0 s; measure again"):
        fit_model(bad, kernel="bgmv", form="toppings", expert_share=SHARE)


def test_batches_fit_into_a_step_and_a_quarter_is_held_out() -> None:
    found = batches()
    assert all(sum(row.num_tokens for row in batch.rows) <= 512 for batch in found)
    held_out = sum(batch.held_out for batch in found)
    assert held_out == -(-len(found) // 4)
    assert any(len({row.lora_rank for row in batch.rows}) > 2 for batch in found)
    assert found == batches()


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch size 9 is more than the 8 tokens"):
        batches_to_time((8,), (9,), num_adapters=1, num_mixed=0, max_tokens=8)
    with pytest.raises(ConfigError, match="no ranks"):
        batches_to_time((), (9,), num_adapters=1, num_mixed=0, max_tokens=8)


def test_contestants_take_turns_and_the_quantile_is_of_all_rounds() -> None:
    calls: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        def run(self, rows: Sequence[Row]) -> tuple[float, list[float]]:
            calls.append(self.name)
            self.count += 1
            return float(self.count), [10.0 * self.count, 20.0 * self.count]

    (batch, *_) = batches()
    found = measure({"a": Counting("a"), "b": Counting("b")}, [batch], 2, quantile=0.0)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    prefill, decode = found["a"]
    assert (prefill.seconds, decode.seconds) == (2.0, 20.0)
    assert decode.samples_s == (20.0, 40.0, 30.0, 60.0)
    with pytest.raises(ConfigError, match="quantile=2"):
        measure({}, [], 1, quantile=2)


def test_adapters_of_each_rank() -> None:
    assert list(adapter_names((8, 16), 2).values()) == [8, 8, 16, 16]


def written(path: Path, *kernels: str) -> Path:
    steps = {kernel: steps_of(truth(kernel, "full")) for kernel in kernels}
    fitted = [
        fit_model(steps[kernel], kernel=kernel, form=form, expert_share=SHARE)
        for kernel in kernels
        for form in PERFORMANCE_FORMS
    ]
    content = file_content(fitted, steps, model="m", settings={"rounds": 3}, env={})
    path.write_text(json.dumps(content, allow_nan=False))
    return path


def test_a_file_gives_back_the_models(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", "sgmv", "bgmv")
    read = read_step_model(path, kernel="bgmv", weights="none")
    with pytest.raises(ConfigError, match=r"measured with weights held as 'none', and this engine .* 'int8'"):
        read_step_model(path, kernel="bgmv", weights="int8")
    assert (read.kernel, read.form) == ("bgmv", "full")
    assert read.decode_s == pytest.approx(truth("bgmv", "full").decode_s, rel=1e-5)
    assert read_step_model(path, kernel="sgmv", form="toppings").form == "toppings"
    content = json.loads(path.read_text())
    assert content["kind"] == "measured"
    path.write_text(json.dumps(content | {"weights": "int8"}))
    assert read_step_model(path, kernel="bgmv", weights="int8") == read
    assert len(content["steps"]) == 2 * 2 * len(batches())


def test_bad_files_are_refused(tmp_path: Path) -> None:
    both = written(tmp_path / "p.json", "sgmv", "bgmv")
    with pytest.raises(ConfigError, match="it has models of bgmv, sgmv; name one"):
        read_step_model(both)
    with pytest.raises(ConfigError, match="no full model of kernel 'mbgmv'"):
        read_step_model(both, kernel="mbgmv")
    with pytest.raises(ConfigError, match="profile-steps MODEL_DIR"):
        read_step_model(tmp_path / "absent.json")
    for text, words in (
        ("[]", "must be a JSON object"),
        ("{", "not a JSON object"),
        ('{"format": "other"}', "format is not"),
        ('{"kernel": "bgmv", "decode": {"alpha_s": 1e-6}}', "format is not .*profile-steps"),
        (json.dumps({**json.loads(both.read_text()), "models": {}}), r"models=\{\}: .* valid list"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_step_model(bad)
