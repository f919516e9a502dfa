# SPDX-License-Identifier: Apache-2.0
"""Which adapter is merged and who computes, step by step and by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.core.errors import ConfigError
from moe_lora.policies.merging.merging import (
    BATCHINGS,
    Batching,
    CheapestMode,
    DLora,
    MergedOnly,
    MergingPolicy,
    MergingView,
    UnmergedOnly,
    make_merging_policy,
)
from moe_lora.policies.merging.merging_costs import Credits, MergingCosts, Period, Thresholds, mode_of
from moe_lora.timing.step_model import StepModel

BASE_S, RANK_S, SWAP_S = 0.010, 0.0001, 0.050


@dataclass(frozen=True)
class Request:
    adapter_uid: str | None
    arrival_s: float = 0.0


def costs(base_s: float = BASE_S, swap_s: float = SWAP_S, row_s: float = 0.0) -> MergingCosts:
    """Rank 8: an adapter's row adds 0.8 ms to a step of 10 ms."""
    decode_s = {"step": base_s, "ranks": RANK_S, "tokens": row_s}
    model = StepModel(
        kernel="sgmv", form="full", expert_share=1.0, decode_s=decode_s, prefill_s={"step": 0.0}
    )
    return MergingCosts(model, lambda uid: 8, lambda before, after: swap_s)


def view(uids: str, merged: str | None = None, size: int = 4, now_s: float = 0.0, **more) -> MergingView:
    """A letter a request in FCFS order, "-" the base model's."""
    requests = [Request(None if uid == "-" else uid, float(index)) for index, uid in enumerate(uids)]
    return MergingView(requests, size, merged, more.pop("eligible", lambda uid: True), now_s, **more)


def only(*uids: str | None) -> frozenset[str | None]:
    return frozenset(uids)


# Costs.


def test_seconds_of_each_mode_by_hand() -> None:
    rows = {"a": 3, "b": 2, None: 1}
    assert costs().step_s(rows, None) == pytest.approx(BASE_S + 5 * 8 * RANK_S)
    assert costs().step_s({"a": 3}, "a") == pytest.approx(BASE_S)
    assert costs().step_s(rows, "a") == pytest.approx(BASE_S + 2 * 8 * RANK_S + 3 * 8 * RANK_S)
    assert costs().swap_s("a", "a") == 0
    assert [mode_of(rows, None), mode_of({"a": 3}, "a"), mode_of(rows, "a")] == [
        "unmerged",
        "merged",
        "mixed",
    ]


def test_measured_steps_correct_their_mode_and_until_then_the_others() -> None:
    told = costs()
    told.expect({"a": 2}, None)
    expected_s = told.step_s({"a": 2}, None)
    told.took("unmerged", 2, 3 * expected_s)
    assert told.step_s({"a": 2}, None) == pytest.approx(3 * expected_s)
    assert told.step_s({"a": 2}, "a") == pytest.approx(3 * BASE_S)
    told.expect({"a": 2}, "a")
    told.took("merged", 2, BASE_S)
    assert told.step_s({"a": 2}, "a") == pytest.approx(BASE_S)


def test_a_step_that_was_not_as_meant_tells_nothing() -> None:
    told = costs()
    told.expect({"a": 2}, None)
    told.took("unmerged", 40, 1.0)
    told.took("mixed", 2, 1.0)
    assert told.step_s({"a": 1}, "a") == pytest.approx(BASE_S)


# One mode always.


def test_unmerged_only_serves_everybody() -> None:
    assert UnmergedOnly().decide(view("aaab")) == Batching()


def test_merged_only_serves_whom_a_turn_began_with_then_the_oldest() -> None:
    policy = MergedOnly()
    requests = [Request("a", 1.0), Request("b", 2.0), Request("a", 3.0)]

    def decide(requests: list[Request], now_s: float) -> Batching:
        return policy.decide(MergingView(requests, 4, None, lambda uid: uid != "c", now_s))

    assert decide(requests, 3.0) == Batching("a", only("a"), at_once=True)
    joined = [*requests[1:], Request("a", 5.0)]
    assert decide(joined, 5.0).only == only("a")
    assert decide([requests[1], joined[-1]], 6.0) == Batching("b", only("b"), at_once=True)
    assert decide([joined[-1]], 7.0).merge == "a"
    assert decide([Request("c")], 8.0) == Batching(None, only("c"), at_once=True)
    assert decide([Request(None)], 9.0) == Batching(None, only(None), at_once=True)


# Algorithm 1.


def test_algorithm_1_merges_above_alpha_and_unmerges_below_beta() -> None:
    policy = DLora(costs(), DLoraConfig(alpha_switch=0.7, beta_switch=0.5, gamma_dec=0.0, gamma_mul=1.0))
    assert policy.decide(view("aabb")) == Batching(None, None, at_once=True)
    assert policy.decide(view("aaab")) == Batching("a", only("a"), at_once=True)
    assert policy.decide(view("aabb", "a")) == Batching("a", only("a"), at_once=True)
    assert policy.decide(view("abbb", "a")) == Batching(None, None, at_once=True)


def test_weights_merge_at_alpha_too_as_one_adapter_alone_has_a_ratio_of_1() -> None:
    assert DLora(costs()).decide(view("aaa")).merge == "a"
    assert DLora(costs()).decide(view("aaab")).merge is None


def test_requests_beyond_the_batch_count_for_the_ratio() -> None:
    policy = DLora(costs(), DLoraConfig(alpha_switch=1.2))
    assert policy.decide(view("abbaaa")).merge is None
    assert policy.decide(view("abbaaaa")).merge == "a"


def test_an_adapter_that_is_no_longer_eligible_is_unmerged() -> None:
    policy = DLora(costs())
    assert policy.decide(view("aaaa")).merge == "a"
    assert policy.decide(view("aaaa", "a", eligible=lambda uid: False)) == Batching(None, None, at_once=True)


def test_the_base_model_is_never_merged() -> None:
    assert DLora(costs()).decide(view("----")) == Batching(None, None, at_once=True)


def test_without_requests_nothing_changes() -> None:
    policy = DLora(costs())
    policy.decide(view("aaaa"))
    assert policy.decide(view("", "a")).merge == "a"


# Algorithm 2.


def test_algorithm_2_by_hand() -> None:
    thresholds = Thresholds(DLoraConfig(alpha_switch=0.8, beta_switch=0.5, gamma_dec=0.05, gamma_mul=1.1))
    unmerged = Period(merged=False, adapter="a")
    unmerged.add((4, 0.1), (4, 0.2))  # 4 / (0.1 + swap) against 4 / 0.2
    thresholds.tune(unmerged, 0.05)
    assert thresholds.alpha == pytest.approx(0.75)
    thresholds.tune(unmerged, 0.15)
    assert thresholds.alpha == pytest.approx(0.75 * 1.1)
    merged = Period(merged=True, adapter="a")
    merged.add((1, 0.1), (4, 0.2))  # 1 / 0.1 against 4 / (0.2 + swap)
    thresholds.tune(merged, 0.1)
    assert thresholds.beta == pytest.approx(0.55)
    thresholds.tune(merged, 0.3)
    assert thresholds.beta == pytest.approx(0.5)


def test_thresholds_stay_within_their_bounds() -> None:
    settings = DLoraConfig(gamma_dec=0.5, gamma_mul=3.0)
    thresholds = Thresholds(settings)
    period = Period(merged=False, adapter="a")
    period.add((4, 0.1), (4, 0.2))
    for swap_s in [0.0] * 5:
        thresholds.tune(period, swap_s)
    assert thresholds.alpha == settings.least_threshold == thresholds.beta
    for swap_s in [9.0] * 5:
        thresholds.tune(period, swap_s)
    assert thresholds.alpha == settings.most_threshold


def test_a_period_ends_after_so_many_steps_and_when_another_adapter_leads() -> None:
    policy = DLora(costs(swap_s=1.0), DLoraConfig(alpha_switch=0.9, period=2, gamma_mul=1.1))
    for _ in range(3):
        policy.decide(view("aaab"))
    assert policy.thresholds.alpha == pytest.approx(0.99)
    policy.decide(view("abbb"))
    assert policy.thresholds.alpha == pytest.approx(0.99 * 1.1)


# Algorithm 3.


def test_defaults_are_the_values_of_the_authors_artifact() -> None:
    """10,000 (n - 1) at first; starving from 10,000 n until 5,000 less; a request is 1 / max_num_seqs."""
    found, policy = DLoraConfig(), DLora(costs())
    assert (found.alpha_switch, found.beta_switch) == (1.0, 15 / 27)
    assert (found.gamma_dec, found.gamma_mul) == (0.05, 1.1)
    policy.decide(view("abcd", size=4))
    credits = policy.credits
    assert credits is not None
    assert credits.of == dict.fromkeys("abcd", 4 * 10_000 * 3)
    assert credits.start + credits._starve == 4 * 10_000 * 4
    assert credits.start + credits._normal == 4 * (10_000 * 4 - 5_000)


def test_algorithm_3_by_hand() -> None:
    credits = Credits(share=2, starve=1, normal=0)
    credits.update("ab")
    credits.transfer(("a",), {"b": 1})
    assert credits.of == {"a": 1, "b": 3}
    credits.update("ab")
    assert credits.starving == set()
    credits.transfer(("a",), {"b": 1})
    credits.update("ab")
    assert (credits.of, credits.starving) == ({"a": 0, "b": 4}, {"b"})
    credits.transfer(("b",), {"a": 2})
    credits.update("ab")
    assert (credits.of, credits.starving) == ({"a": 2, "b": 2}, {"b"})
    credits.transfer(("b",), {"a": 1})
    credits.update("ab")
    assert credits.starving == set()


def test_credits_grow_with_the_number_of_adapters() -> None:
    credits = Credits(share=5, starve=3, normal=2)
    credits.update("a")
    assert credits.of == {"a": 0}
    credits.update("ab")
    credits.transfer(("a",), {"b": 4})
    credits.update("abc")
    assert credits.of == {"a": 6, "b": 14, "c": 10}
    assert credits.starving == {"b"}, "as far above the first credit as before"
    credits.forget("c")
    assert credits.of == {"a": 1, "b": 9}
    credits.forget("c")
    assert credits.of == {"a": 1, "b": 9}


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("a", {"b": 17, "c": 25, "d": 18}),  # 15, 25, 11 lack 9: d rises to 15, then d and b
        ("b", {"a": 24, "c": 25, "d": 11}),  # 29, 25, 11 have 5 too many: a falls to 25, and one more
        ("c", {"a": 29, "b": 15, "d": 16}),  # 29, 15, 11 lack 5: d rises to 15, and one more
    ],
)
def test_a_forgotten_adapters_credits_level_the_others(gone: str, left: dict[str, int]) -> None:
    credits = Credits(share=10, starve=100, normal=1)
    credits.update("abcd")
    credits.of = {"a": 39, "b": 25, "c": 35, "d": 21}
    credits.forget(gone)
    assert credits.of == left


def test_credits_of_millions_are_forgotten_at_once() -> None:
    credits = Credits(share=10**12, starve=1, normal=1)
    credits.update("abc")
    credits.of = {"a": 6 * 10**12, "b": 0, "c": 0}
    credits.forget("a")
    assert credits.of == {"b": 10**12, "c": 10**12}


@given(st.lists(st.integers(0, 400), min_size=1, max_size=7), st.integers(0, 9))
def test_forgetting_keeps_the_sum_and_takes_no_more_than_is_there(given_credits, share) -> None:
    credits = Credits(share, 10**6, 1)
    credits.update(range(len(given_credits)))
    total = credits.start * len(given_credits)
    scale = sum(given_credits)
    credits.of = {uid: credit * total // scale if scale else 0 for uid, credit in enumerate(given_credits)}
    credits.of[0] += total - sum(credits.of.values())
    before = {uid: credit - share for uid, credit in credits.of.items() if uid}
    credits.forget(0)
    assert sum(credits.of.values()) == credits.start * len(credits.of)
    assert all(credit >= 0 for credit in credits.of.values())
    for one in before:
        for other in before:
            if before[one] < before[other]:
                assert credits.of[one] <= credits.of[other] + 1, "the order stays"


def test_one_that_starves_is_served_before_all_others() -> None:
    settings = DLoraConfig(
        alpha_switch=0.5, beta_switch=0.1, gamma_dec=0, gamma_mul=1, credit=1, t_starve=1, t_normal=1
    )
    policy, merged, served = DLora(costs(), settings), None, []
    policy.decide(view("c"))
    for _ in range(7):
        batching = policy.decide(view("aaab", merged))
        merged = batching.merge
        served.append(batching.only)
    # b has 8, 9, ..., 12, and then 13 > 8 + 4.  It pays for the three requests of a, and starves no longer.
    assert served == [only("a")] * 5 + [only("b")] + [only("a")]
    assert policy.credits is not None
    assert policy.credits.of == {"a": 5, "b": 11, "c": 8}


def test_an_adapter_without_the_credit_for_whom_it_passes_over_is_not_merged() -> None:
    policy = DLora(costs(), DLoraConfig(alpha_switch=0.5, beta_switch=0.5, credit=0.25))
    assert policy.decide(view("aaab")).merge == "a"
    assert policy.decide(view("aaab", "a")) == Batching(None, None, at_once=True)


ADAPTERS = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9)


def _forever(policy: MergingPolicy, batches: list[list[str | None]], size: int, requests_left: int = 10**9):
    """Decide again and again over these queues in turn; yields (first requests, batching)."""
    merged = None
    for step, uids in enumerate(batches):
        queue = [Request(uid, float(index)) for index, uid in enumerate(uids)]
        seen = MergingView(queue, size, merged, lambda uid: True, step * 0.1)
        batching = policy.decide(seen)
        merged = batching.merge
        policy.took(batching, "unmerged", 1, 0.1)
        yield uids[:size], batching


@given(st.lists(ADAPTERS, min_size=1, max_size=60), st.integers(1, 5), st.floats(0.1, 3), st.floats(1, 3))
def test_credits_are_conserved_and_never_negative(batches, size, credit, above) -> None:
    settings = DLoraConfig(alpha_switch=0.3, beta_switch=0.2, credit=credit, t_starve=above, t_normal=1)
    policy, known = DLora(costs(), settings), set()
    for index, _ in enumerate(_forever(policy, batches, size)):
        known |= set(batches[index])
        assert policy.credits is not None
        of = policy.credits.of
        assert set(of) == known
        assert sum(of.values()) == len(known) * policy.credits.start
        assert min(of.values()) >= 0
    policy.forget(batches[0][0])
    assert sum(policy.credits.of.values()) == len(policy.credits.of) * policy.credits.start


@given(ADAPTERS, st.integers(1, 4), st.floats(0.2, 4), st.floats(1, 3))
@example(uids=["a", "b", "c"], size=3, credit=2.0, t_starve=2.5)
def test_nobody_waits_longer_than_the_bound(uids, size, credit, t_starve) -> None:
    """An adapter among the first computes again after the steps that `DLora` states."""
    settings = DLoraConfig(
        alpha_switch=0.1, beta_switch=0.1, gamma_dec=0.1, credit=credit, t_starve=t_starve, t_normal=1
    )
    policy = DLora(costs(base_s=1.0), settings)
    bound = math.ceil(credit * size) * (len(set(uids)) - 1) + math.ceil(t_starve * size) + 1
    waited: Counter[str | None] = Counter()
    for first, batching in _forever(policy, [uids] * 150, size):
        for uid in set(first):
            waited[uid] = 0 if batching.only is None or uid in batching.only else waited[uid] + 1
            assert waited[uid] <= bound


# Ours.


def test_auto_merges_when_what_it_would_have_saved_passes_the_swap() -> None:
    policy = CheapestMode(costs(swap_s=0.0055))
    # A step of four rows of one adapter: 3.2 ms more than merged.
    assert [policy.decide(view("aaaa", now_s=step)).merge for step in range(2)] == [None, "a"]
    swapping = policy.decide(view("aaaa", now_s=2.0, swapping=True))
    assert swapping == Batching("a")
    assert policy.decide(view("aaaa", "a", now_s=3.0)) == Batching("a")
    assert policy.decide(view("bbbb", "a", now_s=4.0)).merge == "b"  # two deltas a row: 6.4 ms


def test_auto_stays_mixed_while_most_rows_are_the_merged_adapters() -> None:
    policy = CheapestMode(costs(swap_s=0.001), max_wait_s=0.0)
    policy.decide(view("aaaa"))
    for step in range(5):
        assert policy.decide(view("aaab", "a", now_s=step)) == Batching("a")  # 2 corrections against 4 deltas
    for step in range(5):
        policy.decide(view("abbb", "a", now_s=step))
    assert policy.decide(view("abcd", "a", now_s=9)).merge is None  # 6 corrections against 4 deltas


def test_auto_lets_one_adapter_go_alone_where_rows_cost_and_only_for_so_long() -> None:
    policy = CheapestMode(costs(base_s=1e-6, swap_s=1e-6, row_s=1e-6), max_wait_s=0.25)
    policy.decide(view("aaab"))
    alone = [policy.decide(view("aaab", "a", now_s=0.1 * step)).only == only("a") for step in range(1, 13)]
    assert alone == [True, True, True, False, False, False, True, True, True, False, False, False]


def test_auto_lets_go_at_once_of_what_may_no_longer_be_merged() -> None:
    policy = CheapestMode(costs(swap_s=0.0))
    assert policy.decide(view("aaaa")).merge == "a"
    assert policy.decide(view("aaaa", "a", eligible=lambda uid: False)).merge is None


@given(st.lists(ADAPTERS, min_size=1, max_size=80), st.integers(1, 4), st.floats(0, 0.5))
def test_auto_passes_nobody_over_for_longer_than_max_wait_s_and_a_step(batches, size, max_wait_s) -> None:
    policy = CheapestMode(costs(base_s=1e-6, swap_s=1e-6, row_s=1e-6), max_wait_s)
    stretch = 0
    for _, batching in _forever(policy, batches, size):
        stretch = 0 if batching.only is None else stretch + 1
        assert stretch * 0.1 <= max_wait_s + 0.1 + 1e-9


def test_policies_have_names() -> None:
    made = [type(make_merging_policy(name, costs())) for name in BATCHINGS]
    assert made == [UnmergedOnly, MergedOnly, DLora, CheapestMode]
    with pytest.raises(ConfigError, match="choose one of unmerged, merged, dlora, auto"):
        make_merging_policy("mixed")
    with pytest.raises(ConfigError, match=r"--set front_end\.performance_model"):
        make_merging_policy("auto")


def test_the_name_dlora_has_its_settings() -> None:
    settings = DLoraConfig(credit=3)
    policy = make_merging_policy("dlora", costs(), settings)
    assert isinstance(policy, DLora)
    assert policy.settings is settings
