# SPDX-License-Identifier: Apache-2.0
"""Features of a batch by hand, and times from them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError
from moe_lora.timing.step_model import FEATURES, Row, StepModel, StepWork, feature_names, features

MIXED = [Row("a", 8), Row("b", 32), Row("a", 8), Row(None, 0)]


def model(**changes: object) -> StepModel:
    fields = {
        "kernel": "bgmv",
        "form": "toppings",
        "expert_share": 1.0,
        "decode_s": {"step": 0.01, "padded_ranks": 1e-4},
        "prefill_s": {"step": 0.02, "tokens": 1e-3, "padded_ranks": 1e-5},
    }
    return StepModel(**{**fields, **changes})


def test_features_of_a_mixed_batch_by_hand() -> None:
    found = features(MIXED, 0.25)
    assert found["tokens"] == 4
    assert found["padded_ranks"] == 4 * 32
    assert found["ranks"] == 8 + 32 + 8
    assert found["adapter_ranks"] == 8 + 32
    assert found["experts"] == pytest.approx(1 - 0.75**4)
    assert found["expert_ranks"] == pytest.approx(8 * (1 - 0.75**2) + 32 * 0.25)
    assert set(found) == set(FEATURES)


def test_prompts_count_by_their_tokens() -> None:
    found = features([Row("a", 8, 10), Row("b", 16, 3)], 1.0)
    assert (found["tokens"], found["ranks"], found["padded_ranks"]) == (13, 8 * 10 + 16 * 3, 13 * 16)


def test_equation_2() -> None:
    assert model().decode_step_s(MIXED) == pytest.approx(0.01 + 1e-4 * 4 * 32)
    assert model().prefill_step_s([Row("a", 8, 100)]) == pytest.approx(0.02 + 0.1 + 1e-5 * 800)
    by_sum = model(kernel="mbgmv", decode_s={"step": 0.01, "ranks": 1e-4}, prefill_s={"step": 0.0})
    assert by_sum.decode_step_s(MIXED) == pytest.approx(0.01 + 1e-4 * 48)


def test_decode_counts_one_token_of_each_request() -> None:
    assert model().decode_step_s([Row("a", 8, 100)]) == model().decode_step_s([Row("a", 8)])


def test_nothing_takes_no_time() -> None:
    assert model().decode_step_s([]) == 0 == model().prefill_step_s([])


@given(st.permutations(MIXED))
def test_order_of_requests_does_not_matter(rows: list[Row]) -> None:
    assert features(rows, 0.5) == pytest.approx(features(MIXED, 0.5))


ROWS = st.lists(
    st.builds(
        lambda name, tokens: Row(name, {"a": 8, "b": 64, "c": 8, None: 0}[name], tokens),
        st.sampled_from(["a", "b", "c", None]),
        st.integers(1, 9),
    ),
    max_size=8,
)


@given(ROWS, ROWS, st.sampled_from([0.25, 1.0]))
def test_a_batch_that_changed_is_the_batch_of_what_is_left(
    stay: list[Row], go: list[Row], share: float
) -> None:
    work = StepWork(share, [*go, *stay])
    for row in go:
        work.take(row)
    assert work.features() == pytest.approx(features(stay, share), abs=1e-9)
    for row in go:
        assert work.features(row) == pytest.approx(features([*stay, row], share), abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 64)), max_size=12), st.integers(1, 64))
def test_one_more_request_never_shortens_a_step(drawn: list[tuple[str, int]], rank: int) -> None:
    ranks = dict(drawn)
    rows = [Row(name, ranks[name]) for name, _ in drawn]
    full = model(
        kernel="sgmv",
        form="full",
        expert_share=0.25,
        decode_s=dict.fromkeys(feature_names("sgmv", "full", "decode"), 1e-3),
        prefill_s={},
    )
    full_s = full.decode_step_s([*rows, Row("new", rank)])
    assert full_s >= full.decode_step_s(rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "gmv"}, "kernel='gmv' is unknown"),
        ({"form": "cubic"}, "form='cubic' is unknown"),
        ({"expert_share": 0.0}, "expert_share=0.0 must be above 0"),
        ({"decode_s": {"ranks": 1.0}}, "it has step, padded_ranks"),
        ({"decode_s": {"step": -1.0}}, "must be a number of seconds >= 0"),
        ({"prefill_s": {"step": float("nan")}}, "must be a number of seconds >= 0"),
    ],
)
def test_bad_models_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(**changes)


def test_needs_no_torch() -> None:
    program = (
        "import sys, moe_lora.timing.step_model, moe_lora.provision.performance_models\n"
        "import moe_lora.provision.operating_points\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
