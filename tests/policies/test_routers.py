"""Routers by name, those that count requests, and those that ask a performance model."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.config import ROUTINGS
from moe_lora.core.errors import ConfigError
from moe_lora.policies.instance_load import InstanceLoad
from moe_lora.policies.model_routing import RankAware, ShortestPendingTime
from moe_lora.policies.performance import Batch, LinearTime, PerformanceModel, read_performance_model
from moe_lora.policies.routers import ROUTERS, RoutingContext, make_router
from moe_lora.policies.spread import AdapterAffinity, FirstFit, JoinShortestQueue, RandomChoice

from .routing_parts import BASE, Instance, Request

RANKS = {"small": 8, "large": 128}


def model(**settings) -> PerformanceModel:
    """A unit of work (a request times a rank) is 1 ms of decoding and 10 ms of prefill."""
    times = {"prefill": LinearTime(alpha_s=0.010, beta_s=0.5), "decode": LinearTime(alpha_s=0.001)}
    return PerformanceModel(**{"mean_output_tokens": 10.0, **times, **settings})


EVENTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9), st.integers(0, 2)))


@given(EVENTS)
def test_books_are_empty_once_all_requests_have_ended(events):
    load = InstanceLoad(max_recent=1)
    for adapter, tokens, fate in events:
        load.add(adapter, tokens)
        if fate:
            load.start(adapter, tokens)
    assert load.num_requests == len(events)
    assert load.num_running == sum(fate > 0 for _, _, fate in events)
    assert load.waiting_tokens == sum(tokens for _, tokens, fate in events if not fate)
    for adapter, tokens, fate in events:
        load.end(adapter, tokens, started=fate > 0)
    assert (load.num_requests, load.waiting_tokens, dict(load.waiting), dict(load.running)) == (0, 0, {}, {})
    assert len(load.recent) <= 1


def test_an_adapter_is_had_while_it_is_asked_for_and_while_it_is_recent():
    load = InstanceLoad(max_recent=2)
    for adapter in "abc":
        load.add(adapter, 1)
    assert all(load.has(adapter) for adapter in ("a", "b", "c", None))
    load.end("a", 1, started=False)
    load.end("b", 1, started=False)
    assert [load.has(adapter) for adapter in "abcd"] == [False, True, True, False]


def test_fewest_requests_are_joined_the_first_of_equal_ones():
    instances = [Instance(0).give("a", "a"), Instance(1, 900).run("a"), Instance(2).give("b")]
    assert JoinShortestQueue().choose(BASE, instances).index == 1


def test_first_fit_fills_one_instance_before_the_next():
    router, instances = FirstFit(2), [Instance(0), Instance(1)]
    chosen = []
    for _ in range(5):
        chosen.append(router.choose(BASE, instances).index)
        instances[chosen[-1]].give(None)
    assert chosen == [0, 0, 1, 1, 0]


def test_chance_is_even_and_repeats_with_its_seed():
    instances = [Instance(index) for index in range(4)]
    first, again, other = (RandomChoice(seed) for seed in (3, 3, 4))
    chosen = [first.choose(BASE, instances).index for _ in range(2000)]
    assert chosen == [again.choose(BASE, instances).index for _ in range(2000)]
    assert chosen != [other.choose(BASE, instances).index for _ in range(2000)]
    assert min(Counter(chosen).values()) > 400


def test_affinity_holds_until_the_imbalance_is_too_great():
    router = AdapterAffinity(max_imbalance=0.5, slack_tokens=100)
    there, idle = Instance(0, 200).run("a"), Instance(1, 100)
    assert router.choose(Request("a"), [there, idle]).index == 0
    assert router.choose(Request("b"), [there, idle]).index == 1
    there.outstanding_tokens = 251
    assert router.choose(Request("a"), [there, idle]).index == 1


def test_cost_is_what_the_request_adds_for_those_that_are_there():
    load = Instance(0).give("small").run("small", "small").load
    # bgmv: queue 1 · 8 -> 2 · 128, 10 ms each; all 3 · 8 -> 4 · 128, 1 ms each; 3 requests.
    expected = 3 * ((2 * 128 - 8) * 0.010 / 10 + (4 * 128 - 3 * 8) * 0.001)
    assert RankAware(model(), RANKS).cost_s(128, load) == pytest.approx(expected)
    # mbgmv: queue 8 -> 136, all 24 -> 152.
    expected = 3 * (128 * 0.010 / 10 + 128 * 0.001)
    assert RankAware(model(kernel="mbgmv"), RANKS).cost_s(128, load) == pytest.approx(expected)


def test_an_empty_queue_pays_the_fixed_part_of_a_prefill():
    load = Instance(0).run("small").load
    assert RankAware(model(), RANKS).cost_s(8, load) == pytest.approx((8 * 0.010 + 0.5) / 10 + 8 * 0.001)
    assert RankAware(model(), RANKS).cost_s(8, InstanceLoad()) == 0.0


def test_high_ranks_gather_where_padding_costs_nothing_more():
    router = RankAware(model(), RANKS)
    instances = [Instance(0).run("small", "small"), Instance(1).run("large", "large")]
    assert router.choose(Request("large"), instances).index == 1
    assert router.choose(Request("small"), instances).index == 0


def test_an_instance_that_would_miss_its_slo_is_left_out_while_another_would_not():
    instances = [Instance(0, 5).run("small"), Instance(1, 3).run("large"), Instance(2, 9).run("large")]
    router = RankAware(model(slo_s=0.100), RANKS)
    assert router.choose(Request("small"), instances).index == 0
    assert router.choose(Request("large"), instances).index == 1  # all would: the least work left


def test_pending_time_is_queue_and_load():
    settings = {"token_s": 0.01, "adapter_load_s_per_rank": 0.001}
    router = ShortestPendingTime(model(**settings), RANKS)
    there, idle = Instance(0, 10).run("large"), Instance(1, 0)
    assert router.pending_s("large", there) == pytest.approx(0.10)
    assert router.pending_s("large", idle) == pytest.approx(0.128)
    assert router.choose(Request("large"), [there, idle]).index == 0
    assert router.choose(Request("small"), [there, idle]).index == 1
    assert router.choose(BASE, [there, idle]).index == 1


@given(st.dictionaries(st.sampled_from(["small", "large", "unknown", None]), st.integers(1, 5)))
def test_a_batch_is_the_sum_of_its_requests(counts):
    one_by_one = Batch(0, 0, 0)
    for adapter, count in counts.items():
        for _ in range(count):
            one_by_one = one_by_one.with_one(RANKS.get(adapter, 0))
    assert Batch.of(counts, RANKS) == one_by_one
    assert one_by_one + Batch.of(counts, RANKS) == Batch.of(
        {adapter: 2 * count for adapter, count in counts.items()}, RANKS
    )


@given(
    st.sampled_from(sorted(ROUTERS)),
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.sampled_from(["small", "large", None]))), min_size=1),
    st.lists(st.sampled_from(["small", "large", "unknown", None]), min_size=1),
)
def test_every_router_chooses_one_of_the_instances_and_repeats_itself(name, loads, adapters):
    context = RoutingContext(model=model(token_s=0.1), ranks=RANKS, table={"small": [(0, 0.5), (7, 0.5)]})
    runs = []
    for _ in range(2):
        router = make_router(name, context)
        instances = [
            Instance(2 * number, tokens).give(*requests) for number, (tokens, requests) in enumerate(loads)
        ]
        runs.append([router.choose(Request(adapter), instances).index for adapter in adapters])
    assert runs[0] == runs[1]
    assert set(runs[0]) <= {2 * number for number in range(len(loads))}


def test_settings_name_every_router():
    assert tuple(ROUTERS) == ROUTINGS


def test_unknown_names_and_missing_models_say_what_to_do():
    with pytest.raises(ConfigError, match="routing='x' is unknown; choose one of least_outstanding"):
        make_router("x")
    for name in ("rank_aware", "shortest_pending_time"):
        with pytest.raises(ConfigError, match=f"routing='{name}' needs a performance model; give --perf"):
            make_router(name)


def test_a_model_is_read_from_its_file(tmp_path):
    path = tmp_path / "model.json"
    parts = {"prefill": {"alpha_s": 1e-3}, "decode": {"alpha_s": 1e-4, "beta_s": 0.02}}
    path.write_text(json.dumps({**parts, "kernel": "mbgmv", "slo_s": 0.1}))
    found = read_performance_model(path)
    assert found.decode == LinearTime(alpha_s=1e-4, beta_s=0.02)
    assert (found.kernel, found.slo_s) == ("mbgmv", 0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "a mapping of fields is needed"),
        ('{"prefill": {"alpha_s": 1}}', "decode is needed"),
        ('{"prefill": {"alpha_s": 1}, "decode": {}}', "decode.alpha_s is needed"),
        ('{"prefill": {"alpha_s": 1}, "decode": {"alpha_s": 1}, "slo": 1}', "'slo' is not a field"),
        ('{"prefill": {"alpha_s": "1"}, "decode": {"alpha_s": 1}}', "alpha_s='1' must be a number"),
        ('{"prefill": {"alpha_s": -1}, "decode": {"alpha_s": 1}}', "must be 0 or more"),
        ('{"prefill": {"alpha_s": 1}, "decode": {"alpha_s": 1}, "kernel": "sgmv"}', "kernel='sgmv'"),
        ('{"prefill": {"alpha_s": 1}, "decode": {"alpha_s": 1}, "slo_s": 0}', "slo_s=0 must be positive"),
    ],
)
def test_a_bad_model_is_refused_by_file_and_field(tmp_path, content, message):
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_performance_model(path)
    assert str(path) in str(caught.value)
