# SPDX-License-Identifier: Apache-2.0
"""Shapes of popularity: what each paper's sentence says of them, and their names on the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config.plan import WorkloadOptions
from moe_lora.workload.popularity.named import (
    LORA_RANKS,
    POPULARITY_NAMES,
    dirichlet,
    gaussian,
    long_tail,
    parse_popularity,
    two_level,
)
from moe_lora.workload.popularity.popularity import Popularity, uniform, zipf
from moe_lora.workload.replay_plan import make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest


def names(num_adapters: int) -> list[str]:
    return [f"a{index}" for index in range(num_adapters)]


def of_rank(popularity: Popularity, rank: int) -> list[float]:
    pairs = zip(popularity.lora_ranks, popularity.probabilities, strict=True)
    return [probability for lora_rank, probability in pairs if lora_rank == rank]


def rank_shares(popularity: Popularity) -> list[float]:
    return [sum(of_rank(popularity, rank)) for rank in LORA_RANKS]


EXAMPLES = {
    "uniform": "uniform",
    "zipf": "zipf:0.8",
    "distinct": "distinct",
    "gaussian": "gaussian:0.1",
    "long-tail": "long-tail",
    "two-level": "two-level:3,0.9",
    "dirichlet": "dirichlet:0.5,7",
    "loraserve:uniform": "loraserve:uniform",
    "loraserve:exponential": "loraserve:exponential",
    "loraserve:shifting": "loraserve:shifting",
    "loraserve:power": "loraserve:power:3",
    "loraserve:production": "loraserve:production:5,4,3,2,1",
}


def test_every_shape_has_an_example() -> None:
    assert len(EXAMPLES) == len([name for name in POPULARITY_NAMES if "FILE" not in name])


@pytest.mark.parametrize("text", EXAMPLES.values())
@settings(deadline=None)
@given(num_adapters=st.integers(8, 300), time_share=st.floats(0, 1), seed=st.integers(0, 9))
def test_shape_is_a_popularity_at_all_times_and_draws_from_its_adapters(
    text: str, num_adapters: int, time_share: float, seed: int
) -> None:
    choice = parse_popularity(text, names(num_adapters))
    popularity = choice.at(time_share)
    assert popularity.adapters == choice.adapters == tuple(names(num_adapters))
    assert popularity.lora_ranks == choice.lora_ranks
    assert sum(popularity.probabilities) == pytest.approx(1.0)
    times = np.linspace(0, 1, 20)
    drawn = choice.draw(times, np.random.default_rng(seed))
    assert len(drawn) == 20
    assert set(drawn) <= set(choice.adapters)
    assert drawn == choice.draw(times, np.random.default_rng(seed))


def test_top_five_of_a_thousand_have_seventy_percent() -> None:
    probabilities = long_tail(names(1000)).probabilities
    assert sum(probabilities[:5]) == pytest.approx(0.7)
    assert all(later < earlier for earlier, later in pairwise(probabilities))


def test_long_tail_of_an_even_share_is_uniform() -> None:
    assert long_tail(names(10), 5, 0.5).probabilities == pytest.approx(uniform(names(10)).probabilities)


def test_two_levels_and_one_hot_adapter() -> None:
    assert two_level(names(4), 2, 0.8).probabilities == pytest.approx((0.4, 0.4, 0.1, 0.1))
    assert two_level(names(3), 1, 0.5).probabilities == pytest.approx((0.5, 0.25, 0.25))


def test_dirichlet_follows_its_seed_and_evens_out_with_concentration() -> None:
    assert dirichlet(names(9), 0.5, 3) == dirichlet(names(9), 0.5, 3)
    assert dirichlet(names(9), 0.5, 3) != dirichlet(names(9), 0.5, 4)
    assert max(dirichlet(names(50), 1e4).probabilities) < 0.025 < max(dirichlet(names(50), 0.1).probabilities)


def test_gaussian_has_its_mass_within_its_deviation() -> None:
    probabilities = gaussian(names(1000), 0.1).probabilities
    assert sum(probabilities[400:600]) == pytest.approx(0.6827, abs=1e-3)
    assert probabilities == pytest.approx(probabilities[::-1])
    assert max(gaussian(names(1000), 0.3).probabilities) < max(probabilities)


def test_distinct_takes_the_adapters_in_turn() -> None:
    drawn = parse_popularity("distinct", names(3)).draw(np.zeros(7), np.random.default_rng(0))
    assert drawn == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]


def test_ranks_split_the_adapters_evenly() -> None:
    choice = parse_popularity("loraserve:uniform", names(25))
    assert Counter(choice.lora_ranks) == dict.fromkeys(LORA_RANKS, 5)
    assert choice.at(0).probabilities == pytest.approx([1 / 25] * 25)
    assert Counter(parse_popularity("loraserve:uniform", names(7)).lora_ranks)[8] == 2


def test_shifting_skew_moves_linearly_from_the_largest_rank_to_the_smallest() -> None:
    choice = parse_popularity("loraserve:shifting", names(25))
    assert rank_shares(choice.at(0.0)) == pytest.approx([0.125, 0.125, 0.125, 0.125, 0.5])
    assert rank_shares(choice.at(0.5)) == pytest.approx([0.3125, 0.125, 0.125, 0.125, 0.3125])
    assert rank_shares(choice.at(1.0)) == pytest.approx([0.5, 0.125, 0.125, 0.125, 0.125])
    with pytest.raises(ValueError, match="time_share"):
        choice.at(1.5)


def test_shifting_draws_follow_the_time() -> None:
    choice = parse_popularity("loraserve:shifting", names(5))
    times = np.linspace(0, 1, 40_000)
    drawn = choice.draw(times, np.random.default_rng(0))
    for start, end in ((0, 10_000), (15_000, 25_000), (30_000, 40_000)):
        counts = Counter(drawn[start:end])
        expected = choice.at(float(times[start:end].mean())).probabilities
        shares = [counts[name] / (end - start) for name in choice.adapters]
        assert shares == pytest.approx(expected, abs=0.02)


def test_plan_asks_for_the_largest_rank_early_and_the_smallest_late() -> None:
    trace = Trace("t", "own", tuple(TraceRequest(float(i), 1, 1) for i in range(4000)))
    plan = make_plan(trace, WorkloadOptions(), parse_popularity("loraserve:shifting", names(5)))
    early, late = Counter(r.adapter for r in plan[:1000]), Counter(r.adapter for r in plan[-1000:])
    assert early["a4"] > 2 * early["a0"]
    assert late["a0"] > 2 * late["a4"]


def test_largest_rank_has_a_sixth_at_the_lowest_alpha_as_the_paper_says() -> None:
    power = parse_popularity(f"loraserve:power:{1 / 3}", names(100)).at(0)
    assert rank_shares(power)[-1] == pytest.approx(0.16, abs=0.005)
    assert rank_shares(parse_popularity("loraserve:power:3", names(100)).at(0))[0] > 0.8


def test_production_splits_each_rank_by_a_power_law() -> None:
    even = parse_popularity("loraserve:production", names(50)).at(0)
    assert rank_shares(even) == pytest.approx([0.2] * 5)
    within = of_rank(even, 32)
    assert within[0] / within[9] == pytest.approx(10.0)
    given_shares = parse_popularity("loraserve:production:5,4,3,2,1", names(50)).at(0)
    assert rank_shares(given_shares) == pytest.approx([5 / 15, 4 / 15, 3 / 15, 2 / 15, 1 / 15])


def test_names_mean_the_functions_they_name() -> None:
    assert parse_popularity("zipf", names(9)) == zipf(names(9), 1.2)
    assert parse_popularity("zipf:0.5", names(9)) == zipf(names(9), 0.5)
    assert parse_popularity("uniform", names(9)) == uniform(names(9))


def test_popularity_from_files(tmp_path: Path) -> None:
    counts, trace = tmp_path / "counts.csv", tmp_path / "trace.jsonl"
    counts.write_text("adapter,count\nx,3\ny,1\n")
    assert parse_popularity(str(counts)).at(0) == Popularity(("x", "y"), (0.75, 0.25))
    row = '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 2%s}\n'
    trace.write_text(row % "" + (row % ', "adapter": "x"') * 3 + row % ', "adapter": "y"')
    assert parse_popularity(f"trace:{trace}").at(0) == Popularity(("x", "y"), (0.75, 0.25))
    assert parse_popularity(f"trace:{trace}", ["p", "q"]).at(0) == Popularity(("p", "q"), (0.75, 0.25))
    assert parse_popularity(f"trace:2:{trace}", ["p", "q"]).at(0) == Popularity(("p", "q"), (1.0, 0.0))
    with pytest.raises(ValueError, match="names the adapters itself"):
        parse_popularity(str(counts), names(3))
    trace.write_text(row % "")
    with pytest.raises(ValueError, match="names no adapter"):
        parse_popularity(f"trace:{trace}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipff", "long-tail[:NUM_HEAD,SHARE]"),
        ("loraserve", "loraserve:shifting"),
        ("zipf:much", "write zipf[:S]"),
        ("zipf:1,2", "2 arguments; write zipf[:S]"),
        ("zipf:-1", ">= 0"),
        ("zipf:nan", ">= 0"),
        ("gaussian", "write gaussian:SIGMA"),
        ("gaussian:0", "sigma=0.0"),
        ("two-level:9,0.5", "num_hot=9"),
        ("two-level:1,1.5", "hot_share=1.5"),
        ("long-tail:5,0.1", "head_share=0.1"),
        ("long-tail:8,0.9", "num_head=8"),
        ("dirichlet:0", "concentration=0.0"),
        ("dirichlet:1,-1", "seed=-1"),
        ("loraserve:power:-1", "alpha=-1.0"),
        ("loraserve:exponential:inf", "decay=inf"),
        ("loraserve:production:1,2", "2 shares"),
        ("loraserve:production:0,0,0,0,0", "one of them > 0"),
        ("trace:absent", "readable file"),
    ],
)
def test_bad_name_or_argument_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_popularity(text, () if text.startswith("trace") else names(8))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", [*EXAMPLES.values(), "functions:f.csv"])
def test_shape_without_adapters_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no adapter"):
        parse_popularity(text)


def test_ranks_need_an_adapter_each() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        parse_popularity("loraserve:uniform", names(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Popularity(("x", "y"), (0.5, 0.5), (8,)),
        lambda: gaussian([], 0.1),
    ],
)
def test_shapes_that_can_not_be_are_refused(make: Callable[[], Popularity]) -> None:
    with pytest.raises(ValueError):
        make()
