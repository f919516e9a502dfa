# SPDX-License-Identifier: Apache-2.0
"""Adapter popularity."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.workload.popularity.popularity import Popularity, read_counts, uniform, zipf


def names(num_adapters: int) -> list[str]:
    return [f"a{index}" for index in range(num_adapters)]


@given(num_adapters=st.integers(1, 600), s=st.floats(0, 4))
def test_zipf_sums_to_one_and_never_rises(num_adapters: int, s: float) -> None:
    probabilities = zipf(names(num_adapters), s).probabilities
    assert sum(probabilities) == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(probabilities))


@given(num_adapters=st.integers(2, 100), s=st.floats(0.1, 3))
def test_zipf_ratio_is_the_power_of_the_places(num_adapters: int, s: float) -> None:
    probabilities = zipf(names(num_adapters), s).probabilities
    assert probabilities[0] / probabilities[-1] == pytest.approx(num_adapters**s)


def test_uniform_gives_all_the_same() -> None:
    assert uniform(names(4)).probabilities == (0.25,) * 4


def test_sample_follows_the_probabilities_and_the_seed() -> None:
    popularity = zipf(names(3), 1.0)
    drawn = popularity.sample(20_000, np.random.default_rng(3))
    shares = Counter(drawn)
    for adapter, probability in zip(popularity.adapters, popularity.probabilities, strict=True):
        assert shares[adapter] / 20_000 == pytest.approx(probability, abs=0.02)
    assert drawn == popularity.sample(20_000, np.random.default_rng(3))


@pytest.mark.parametrize(
    "text",
    [
        '{"x": 3, "y": 1}',
        '\ufeff\n {"x": 3, "y": 1}',
        "adapter,count\nx,3\ny,1\n",
        "\ufeffadapter,count\nx,3\ny,1",
    ],
)
def test_counts_are_read_from_json_and_csv(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counts"
    path.write_text(text, encoding="utf-8")
    assert read_counts(path) == Popularity(("x", "y"), (0.75, 0.25))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adapter,count\nx,many\n", "line 2, column 'count'"),
        ("adapter,count\nx,1\nx,2\n", "line 3, column 'adapter': 'x' is there twice"),
        ("adapter,count\nx\n", "line 2"),
        ("name,n\nx,1\n", "needed: adapter,count"),
        ('{"x": 0}', "no adapter with a count > 0"),
        ("{x}", "not JSON"),
    ],
)
def test_bad_counts_are_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "counts"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="counts") as caught:
        read_counts(path)
    assert said in str(caught.value)


def test_impossible_popularity_is_refused() -> None:
    with pytest.raises(ValueError, match=">= 0"):
        zipf(names(2), -1.0)
    with pytest.raises(ValueError, match="at least one"):
        zipf([], 1.0)
    with pytest.raises(ValueError, match="twice"):
        zipf(["x", "x"], 1.0)
    with pytest.raises(ValueError, match="sum to 1"):
        Popularity(("x", "y"), (0.5, 0.1))
