# SPDX-License-Identifier: Apache-2.0
"""Routers by name, those that count requests, and those that ask a performance model."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config import ROUTINGS, RoutingConfig
from moe_lora.core.errors import ConfigError
from moe_lora.policies.admission.host_start import HostStart
from moe_lora.policies.routing.model_routing import AnswerMean, CostModel, RankAware, ShortestPendingTime
from moe_lora.policies.routing.routers import (
    ROUTERS,
    AdapterAffinity,
    FirstFit,
    JoinShortestQueue,
    RandomChoice,
    RoutingContext,
    make_router,
)
from moe_lora.policies.routing.routing import InstanceLoad
from moe_lora.timing.answer_lengths import FIRST_TOKENS
from moe_lora.timing.host_times import HostTimes, PartTime
from moe_lora.timing.step_model import StepModel
from tests.policies.routing_parts import BASE, Instance, Request

RANKS = {"small": 8, "large": 128}


def model(kernel: str = "bgmv", **settings) -> CostModel:
    """A token times a rank is 1 ms of decoding, 10 ms of prefill; a prompt token 0.1 s, a prefill 0.5 s."""
    ranks = "padded_ranks" if kernel == "bgmv" else "ranks"
    steps = StepModel(
        kernel=kernel,
        form="toppings",
        expert_share=1.0,
        decode_s={ranks: 0.001},
        prefill_s={"step": 0.5, "tokens": 0.1, ranks: 0.010},
    )
    return CostModel(**{"steps": steps, "mean_output_tokens": 10.0, **settings})


EVENTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9), st.integers(0, 2)))


@given(EVENTS)
def test_nothing_is_counted_once_all_requests_have_ended(events):
    load = InstanceLoad(max_recent=1)
    for adapter, tokens, fate in events:
        load.add(adapter, tokens)
        if fate:
            load.start(adapter, tokens)
    assert load.num_requests == len(events)
    assert load.running.total() == sum(fate > 0 for _, _, fate in events)
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
    one = Instance(0).give("small", prompt_tokens=2).run("small", "small")
    # queue: 2 tokens at rank 8 -> 5 at 128, 10 ms each, and 3 tokens;
    # all: 3 · 8 -> 4 · 128, 1 ms each; 3 requests.
    expected = 3 * ((3 * 0.1 + (5 * 128 - 2 * 8) * 0.010) / 10 + (4 * 128 - 3 * 8) * 0.001)
    request = Request("large", prompt_tokens=3)
    assert RankAware(model(), RANKS).cost_s(request, one) == pytest.approx(expected)
    # True ranks: queue 3 · 128 more, all 128 more.
    expected = 3 * ((3 * 0.1 + 3 * 128 * 0.010) / 10 + 128 * 0.001)
    assert RankAware(model("mbgmv"), RANKS).cost_s(request, one) == pytest.approx(expected)


def test_an_empty_queue_pays_the_fixed_part_of_a_prefill():
    one, request = Instance(0).run("small"), Request("small")
    expected = (0.1 + 8 * 0.010 + 0.5) / 10 + 8 * 0.001
    assert RankAware(model(), RANKS).cost_s(request, one) == pytest.approx(expected)
    assert RankAware(model(), RANKS).cost_s(request, Instance(0)) == 0.0


def test_a_long_prompt_costs_more_than_a_short_one():
    one, router = Instance(0).give("large").run("small"), RankAware(model(), RANKS)
    costs = [router.cost_s(Request("small", prompt_tokens=number), one) for number in (1, 10, 100)]
    assert costs == sorted(set(costs))


@given(EVENTS, st.sampled_from(["small", "large", None]))
def test_a_router_that_keeps_sums_costs_as_one_that_counts_anew(events, adapter):
    one, request, keeping = Instance(0), Request(adapter, prompt_tokens=3), RankAware(model(), RANKS)
    for name, tokens, fate in events:
        name = {"a": "small", "b": "large", None: None}[name]
        one.load.add(name, tokens)
        keeping.cost_s(request, one)
        if fate:
            one.load.start(name, tokens)
        if fate == 2:
            one.load.end(name, tokens, started=True)
        fresh = RankAware(model(), RANKS)
        assert keeping.cost_s(request, one) == fresh.cost_s(request, one)


def one_worker() -> HostStart:
    """Two layers of 0.1 s on the device; a worker takes 0.1 s a token for each; 0.01 s a rank to load.

    An adapter of rank 128 takes 1.28 s to load.  3 tokens take 0.3 s a layer on the host, both before the
    load ends: 2 · 0.3 - 2 · 0.1 = 0.4 s more.  30 tokens take 3 s in the first layer: the load is shorter.
    """
    times = HostTimes(
        worker={"q+k+v": PartTime(per_token_s=0.1)},
        device=PartTime(fixed_s=0.1),
        num_layers=2,
        load_fixed_s=0.0,
        load_bytes_per_s=100.0,
        bytes_per_rank=1.0,
        max_tokens=512,
        max_rank=128,
    )
    return HostStart(times=times, num_workers=1, tokens_per_worker=512)


def test_a_prefill_on_the_host_costs_its_extra_time_or_the_load():
    one, there = Instance(0).run("small"), Instance(1).run("small")
    there.load.recent["large"] = None
    warm, cold = RankAware(model(), RANKS), RankAware(model(host=one_worker()), RANKS)
    for num_tokens, start_s in ((3, 0.4), (30, 1.28)):
        request = Request("large", prompt_tokens=num_tokens)
        assert cold.cost_s(request, one) == pytest.approx(warm.cost_s(request, one) + start_s / 10)
        assert cold.cost_s(request, there) == warm.cost_s(request, there)
    chunks = RankAware(model(host=one_worker(), max_num_batched_tokens=3), RANKS)
    assert chunks.cost_s(request, one) == pytest.approx(warm.cost_s(request, one) + 0.4 / 10)
    assert cold.cost_s(BASE, one) == warm.cost_s(BASE, one)
    assert warm.choose(request, [one, there]).index == 0
    assert cold.choose(request, [one, there]).index == 1


def test_high_ranks_gather_where_padding_costs_nothing_more():
    router = RankAware(model(), RANKS)
    instances = [Instance(0).run("small", "small"), Instance(1).run("large", "large")]
    assert router.choose(Request("large"), instances).index == 1
    assert router.choose(Request("small"), instances).index == 0


def test_an_instance_that_would_miss_its_slo_is_left_out_while_another_would_not():
    instances = [Instance(0, 5).run("small"), Instance(1, 3).run("large"), Instance(2, 9).run("large")]
    router = RankAware(model(slo_tpot_s=0.100), RANKS)
    assert router.choose(Request("small"), instances).index == 0
    assert router.choose(Request("large"), instances).index == 1  # all would: the least work left


def test_the_share_of_choices_without_an_instance_within_the_slo_is_counted():
    router = RankAware(model(slo_tpot_s=0.100), RANKS)
    assert router.stats.infinite_share == 0.0
    instances = [Instance(0).run("small"), Instance(1).run("small")]
    for adapter in ("small", "small", "small", "large"):
        router.choose(Request(adapter), instances)
    assert router.stats.num_choices == {"finite": 3, "infinite": 1}
    assert router.stats.infinite_share == 0.25


def test_a_step_of_exactly_the_slo_keeps_it():
    """Both are seconds of a step in which each request gets a token: 2 · 8 ms here."""
    one = Instance(0).run("small")
    assert RankAware(model(slo_tpot_s=0.016), RANKS).cost_s(Request("small"), one) < math.inf
    assert RankAware(model(slo_tpot_s=0.0159), RANKS).cost_s(Request("small"), one) == math.inf


def test_time_of_a_prompt_does_not_count_against_the_slo_of_a_token():
    """A prompt of 100 tokens takes 18.5 s, and the SLO is that of the tokens after the first."""
    cost_s = RankAware(model(slo_tpot_s=0.016), RANKS).cost_s
    assert cost_s(Request("small", prompt_tokens=100), Instance(0).run("small")) < math.inf


def test_the_mean_answer_is_learnt_unless_it_is_set():
    learning, told = RankAware(model(mean_output_tokens=None), RANKS), RankAware(model(), RANKS)
    assert (learning.mean_output_tokens, told.mean_output_tokens) == (FIRST_TOKENS, 10.0)
    one, request = Instance(0).run("small"), Request("small", prompt_tokens=5)
    before = learning.cost_s(request, one)
    for router in (learning, told):
        for _ in range(8):
            router.stop("request", 8)
    # The start counts as 8 answers of 128 tokens.
    assert (learning.mean_output_tokens, told.mean_output_tokens) == (pytest.approx(68.0), 10.0)
    prefill_s = 0.5 + 5 * 0.1 + 5 * 8 * 0.010
    assert learning.cost_s(request, one) - before == pytest.approx(prefill_s / 68 - prefill_s / 128)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=50))
def test_the_mean_answer_lies_within_the_answers_and_its_start(lengths):
    mean = AnswerMean()
    for number in lengths:
        mean.add(number)
    expected = (8 * 128.0 + sum(lengths)) / (8 + len(lengths))
    assert mean.tokens == pytest.approx(expected)


def test_the_mean_answer_follows_a_load_that_changes():
    mean = AnswerMean()
    for _ in range(100_000):
        mean.add(100)
    for _ in range(5_000):
        mean.add(1000)
    assert 990 < mean.tokens < 1000


def test_a_cost_of_all_counts_the_requests_own_time():
    router, others = RankAware(model(cost="all"), RANKS), RankAware(model(), RANKS)
    idle, busy = Instance(0), Instance(1).run("small")
    request = Request("large", prompt_tokens=3)
    own_s = (0.5 + 3 * 0.1 + 3 * 128 * 0.010) / 10 + 128 * 0.001
    assert (others.cost_s(request, idle), router.cost_s(request, idle)) == (0.0, pytest.approx(own_s))
    own_s += 128 * 0.001  # two rows at rank 128
    assert router.cost_s(request, busy) == pytest.approx(others.cost_s(request, busy) + own_s)


def test_pending_time_is_queue_and_load():
    router = ShortestPendingTime(model(adapter_load_s_per_rank=0.001), RANKS, 2)
    there, idle = Instance(0, 10).run("large", "small"), Instance(1, 0)
    # 10 tokens of two requests are 5 steps of 2 · 128 ms.
    assert router.pending_s(Request("large"), [there])[0] == pytest.approx(5 * 2 * 128 * 0.001)
    assert router.pending_s(Request("large"), [idle])[0] == pytest.approx(0.128)
    assert router.choose(Request("large"), [there, idle]).index == 1
    there.outstanding_tokens = 0
    assert router.choose(Request("large"), [there, idle]).index == 0
    assert router.choose(BASE, [there, idle]).index == 0


@pytest.mark.parametrize(
    ("load_s_per_rank", "short_s", "long_s"), [(0.0, 0.4, 1.28), (0.009, 0.4, 1.152), (0.001, 0.128, 0.128)]
)
def test_a_start_on_the_host_is_pending_instead_of_a_longer_load(load_s_per_rank, short_s, long_s):
    """The load is the profile's (1.28 s) where the settings do not give one."""
    settings = model(adapter_load_s_per_rank=load_s_per_rank, host=one_worker())
    router = ShortestPendingTime(settings, RANKS, 2)
    there, idle = Instance(0, 6).run("large", "small"), Instance(1)
    short, long = Request("large", prompt_tokens=3), Request("large", prompt_tokens=30)
    assert router.pending_s(short, [idle])[0] == pytest.approx(short_s)
    assert router.pending_s(long, [idle])[0] == pytest.approx(long_s)
    assert router.pending_s(long, [there])[0] == pytest.approx(3 * 2 * 128 * 0.001)
    assert router.choose(short, [there, idle]).index == 1
    assert router.choose(long, [there, idle]).index == (0 if long_s > 0.768 else 1)


@pytest.mark.parametrize("router", [RankAware(model(), RANKS, 2), ShortestPendingTime(model(), RANKS, 8, 2)])
def test_candidates_have_the_adapter_or_room_for_it(router):
    """The first instance is idle or nearly so, and would be chosen by its cost alone."""
    best, other = Instance(0).run("a", "b"), Instance(1, 900).run("small", "small", "small")
    small = Request("small")
    assert router.choose(Request("a"), [best, other]).index == 0, "it uses the adapter"
    assert router.choose(small, [best, other]).index == 1, "two adapters are all it has places for"
    assert router.choose(BASE, [best, other]).index == 0, "the base model needs none"
    best.load.end("b", 1, started=True)
    assert router.choose(small, [best, other]).index == 0
    best.load.held_back = True
    assert router.choose(small, [best, other]).index == 1, "its memory has no room"
    assert router.choose(Request("a"), [best, other]).index == 0
    other.load.held_back = True
    assert router.choose(Request("c"), [best, other]).index == 0, "nobody has room: by cost"


def test_a_batch_with_room_is_a_shorter_queue_the_less_work_it_has():
    router = ShortestPendingTime(model(), RANKS, 16)
    one, several = Instance(0, 20).run("small"), Instance(1, 80).run(*["small"] * 4)
    assert router.pending_s(BASE, [one])[0] == pytest.approx(20 * 8 * 0.001 / 16)
    assert router.pending_s(BASE, [several])[0] == pytest.approx(80 * 4 * 8 * 0.001 / 16)


def test_prompts_that_wait_are_pending_for_their_prefill():
    one = Instance(0, 7).give("small", prompt_tokens=7)
    expected = 0.5 + 7 * 0.1 + 7 * 8 * 0.010
    assert ShortestPendingTime(model(), RANKS, 2).pending_s(BASE, [one])[0] == pytest.approx(expected)


@given(
    st.sampled_from(sorted(ROUTERS)),
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.sampled_from(["small", "large", None]))), min_size=1),
    st.lists(st.sampled_from(["small", "large", "unknown", None]), min_size=1),
)
def test_every_router_chooses_one_of_the_instances_and_repeats_itself(name, loads, adapters):
    context = RoutingContext(model=model(), ranks=RANKS, table={"small": [(0, 0.5), (7, 0.5)]})
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
        with pytest.raises(ConfigError, match=f"routing='{name}' needs a performance model; give --set "):
            make_router(name)


@pytest.mark.parametrize("name", ["slo_tpot_s", "mean_output_tokens"])
def test_costs_by_what_can_not_be_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be positive"):
        RoutingConfig(**{name: 0})
    with pytest.raises(ConfigError, match="adapter_load_s_per_rank=-1 must be 0 or more"):
        RoutingConfig(adapter_load_s_per_rank=-1)


def test_a_form_of_the_cost_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="rank_aware_cost='mine' is not known; choose one of others, all"):
        RoutingConfig(rank_aware_cost="mine")
