# SPDX-License-Identifier: Apache-2.0
"""Routers keep counts; rules that count all requests anew make the same choices."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config import RANK_AWARE_COSTS
from moe_lora.policies.routing.model_routing import CostModel, RankAware, ShortestPendingTime
from moe_lora.policies.routing.routers import AdapterAffinity
from moe_lora.policies.routing.routing import InstanceLoad
from moe_lora.timing.answer_lengths import FIRST_TOKENS
from moe_lora.timing.step_model import Row, StepModel, StepWork
from tests.policies.routing_parts import Instance, Request

MAX_LORAS, MAX_RECENT, SLACK_TOKENS = 3, 2, 40
RANKS = {f"adapter-{number}": 8 << number % 4 for number in range(8)}
ADAPTERS = [None, *RANKS]
MAX_NUM_SEQS = 4
SOME = [None, "adapter-0", "adapter-4", "adapter-1", "adapter-5"]
"""Pairs have equal ranks."""
SECONDS = st.sampled_from([1e-6, 3e-4, 1e-4 / 3])
TERMS = ("tokens", "experts", "adapter_ranks", "expert_ranks")


class FixedStart:
    """A start on the host, in 3 ms and 0.1 ms a token."""

    times = SimpleNamespace(adapter=lambda lora_rank: None)

    def start_s(self, num_tokens: int, adapter: None) -> float:
        return 3e-3 + 1e-4 * num_tokens


@dataclass
class Counted:
    """An instance beside its requests: adapter, prompt tokens, True after the first token."""

    instance: Instance
    requests: list[tuple[str | None, int, bool]] = field(default_factory=list)
    recent: list[str] = field(default_factory=list)

    @property
    def work(self) -> tuple[int, int]:
        return self.instance.outstanding_tokens, self.instance.index

    def add(self, adapter: str | None, prompt_tokens: int) -> None:
        self.instance.load.add(adapter, prompt_tokens)
        self.instance.outstanding_tokens += prompt_tokens
        self.requests.append((adapter, prompt_tokens, False))
        if adapter is not None:
            self.recent = [*(one for one in self.recent if one != adapter), adapter][-MAX_RECENT:]

    def go_on(self, number: int, *, ends: bool) -> None:
        adapter, prompt_tokens, started = self.requests.pop(number)
        if ends:
            self.instance.load.end(adapter, prompt_tokens, started=started)
            self.instance.outstanding_tokens -= prompt_tokens
            return
        if not started:
            self.instance.load.start(adapter, prompt_tokens)
        self.requests.append((adapter, prompt_tokens, True))

    def has(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self.recent or any(one == adapter for one, _, _ in self.requests)

    def has_room(self, adapter: str | None) -> bool:
        if adapter is None or any(one == adapter and started for one, _, started in self.requests):
            return True
        used = {one for one, _, _ in self.requests} - {None}
        return not self.instance.load.held_back and (adapter in used or len(used) < MAX_LORAS)


def affine(request: Request, counted: list[Counted]) -> Counted:
    idlest = min(counted, key=lambda one: one.work)
    having = [one for one in counted if one.has(request.adapter)]
    chosen = min(having, key=lambda one: one.work, default=idlest)
    limit = 1.5 * idlest.instance.outstanding_tokens + SLACK_TOKENS
    return chosen if chosen.instance.outstanding_tokens <= limit else idlest


def rank_aware() -> RankAware:
    seconds = {
        "step": 5e-3,
        "tokens": 1e-4,
        "padded_ranks": 1e-6,
        "adapter_ranks": 2e-6,
        "expert_ranks": 3e-6,
    }
    steps = StepModel(kernel="bgmv", form="full", expert_share=0.25, decode_s=seconds, prefill_s=seconds)
    return RankAware(CostModel(steps=steps, slo_tpot_s=0.0065), RANKS, MAX_LORAS)


def pending() -> ShortestPendingTime:
    steps = StepModel(
        kernel="mbgmv", form="toppings", expert_share=1.0, decode_s={"ranks": 1e-3}, prefill_s={"tokens": 0.1}
    )
    return ShortestPendingTime(CostModel(steps=steps, adapter_load_s_per_rank=1e-2), RANKS, 4, MAX_LORAS)


def least_cost(request: Request, counted: list[Counted]) -> Counted:
    router = rank_aware()
    with_room = [one for one in counted if one.has_room(request.adapter)] or counted
    return min(with_room, key=lambda one: (router.cost_s(request, one.instance), one.work))


def least_pending(request: Request, counted: list[Counted]) -> Counted:
    router = pending()
    with_room = [one for one in counted if one.has_room(request.adapter)] or counted
    return min(with_room, key=lambda one: (router.pending_s(request, [one.instance])[0], one.instance.index))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: AdapterAffinity(slack_tokens=SLACK_TOKENS), affine),
        (rank_aware, least_cost),
        (pending, least_pending),
    ],
    ids=["adapter_affinity", "rank_aware", "shortest_pending_time"],
)
@pytest.mark.parametrize("seed", range(10))
def test_a_router_chooses_by_its_rule(make, rule, seed):
    rng, router = random.Random(seed), make()
    counted = [
        Counted(Instance(2 * number, load=InstanceLoad(max_recent=MAX_RECENT)))
        for number in range(rng.choice((1, 2, 4, 7)))
    ]
    for _ in range(100):
        for _ in range(rng.randrange(4)):
            one = rng.choice(counted)
            one.instance.load.held_back = rng.random() < 0.2
            if one.requests:
                one.go_on(rng.randrange(len(one.requests)), ends=rng.random() < 0.6)
        present = [one for one in counted if rng.random() < 0.8] or counted
        request = Request(rng.choice(ADAPTERS), prompt_tokens=rng.randrange(1, 60))
        chosen = router.choose(request, [one.instance for one in present])
        assert chosen is rule(request, present).instance
        next(one for one in counted if one.instance is chosen).add(request.adapter, request.prompt_tokens)


def step_models(kernel: str, ranks: str) -> st.SearchStrategy[StepModel]:
    coefficients = dict.fromkeys((*TERMS, ranks), SECONDS)
    return st.builds(
        StepModel,
        kernel=st.just(kernel),
        form=st.just("full"),
        expert_share=st.sampled_from([0.3, 0.004, 1.0, 1e-9]),
        decode_s=st.fixed_dictionaries({"step": st.just(5e-3)}, optional=coefficients),
        prefill_s=st.fixed_dictionaries({}, optional=coefficients),
    )


MODELS = st.fixed_dictionaries(
    {
        "steps": step_models("bgmv", "padded_ranks") | step_models("mbgmv", "ranks"),
        "slo_tpot_s": st.sampled_from([math.inf, 5e-3, 6.5e-3, 0.02]),
        "cost": st.sampled_from(RANK_AWARE_COSTS),
        "mean_output_tokens": st.sampled_from([None, 10.0]),
        "adapter_load_s_per_rank": st.sampled_from([0.0, 1e-3]),
        "host": st.sampled_from([None, FixedStart()]),
    }
)


def plain_work(model: StepModel, ranks: dict[str, int], load: InstanceLoad) -> tuple[StepWork, StepWork]:
    """The waiting prompts, and a token of each request."""
    parts = load.waiting_prompts.items(), [*load.running.items(), *load.waiting.items()]
    return tuple(model.work(Row(one, ranks.get(one, 0), num) for one, num in part) for part in parts)


def plain_cost_s(model: CostModel, ranks: dict[str, int], request: Request, one: Instance) -> float:
    """Algorithm 1 of Toppings, each sum from the requests."""
    queue, everything = plain_work(model.steps, ranks, one.load)
    rank, seconds = ranks.get(request.adapter, 0), model.steps.seconds
    decode_s = seconds("decode", everything, Row(request.adapter, rank))
    if decode_s > model.slo_tpot_s:
        return math.inf
    if model.cost == "others" and not everything.num_tokens:
        return 0.0
    prompt = Row(request.adapter, rank, request.prompt_tokens)
    prefill_s = seconds("prefill", queue, prompt)
    is_cold = model.host is not None and not one.load.has(request.adapter)
    start_s = model.start_s(prompt) if is_cold else 0.0
    mean = model.mean_output_tokens or FIRST_TOKENS
    more_s = (
        (prefill_s - seconds("prefill", queue) + start_s) / mean + decode_s - seconds("decode", everything)
    )
    own_s = (prefill_s + start_s) / mean + decode_s if model.cost == "all" else 0.0
    return more_s * everything.num_tokens + own_s


def plain_pending_s(model: CostModel, ranks: dict[str, int], request: Request, one: Instance) -> float:
    """Section 5.1 of dLoRA, each sum from the requests."""
    queue, everything = plain_work(model.steps, ranks, one.load)
    pending_s = model.steps.seconds("prefill", queue)
    if everything.num_tokens:
        left = max(0, one.outstanding_tokens - one.load.waiting_tokens)
        decode_s = model.steps.seconds("decode", everything)
        pending_s += left / max(everything.num_tokens, MAX_NUM_SEQS) * decode_s
    if one.load.has(request.adapter):
        return pending_s
    return pending_s + model.start_s(Row(request.adapter, ranks[request.adapter], request.prompt_tokens))


class Fleet:
    """Instances beside their requests, former instances too."""

    def __init__(self, num: int) -> None:
        self.instances = [self._enter(3 * position) for position in range(num)]
        self.requests: list[list[Any]] = [[] for _ in self.instances]
        self._gone: list[tuple[Instance, list[Any]]] = []

    def _enter(self, index: int) -> Instance:
        entered = Instance(index, load=InstanceLoad(max_recent=MAX_RECENT))
        entered.load.has_slots = index % 4 != 3
        return entered

    def change(self, kind: str, position: int, adapter: str | None, tokens: int) -> None:
        """A step of one instance, and the end of a request at each former one."""
        if kind == "restart":
            self._gone.append((self.instances[position], self.requests[position]))
            self.instances[position] = self._enter(3 * position)
            self.requests[position] = []
        else:
            _change(kind, self.instances[position], self.requests[position], adapter, tokens)
        for one, left in self._gone:
            _change("end", one, left, None, 0)

    def add_in_any_order(self, requests: list[tuple[str | None, int]], rng: random.Random) -> None:
        """The same requests everywhere: sums that differ by rounding alone."""
        for position in range(len(self.instances)):
            for adapter, tokens in rng.sample(requests, len(requests)):
                self.change("add", position, adapter, tokens)

    def end_all(self) -> None:
        for one, requests in [*zip(self.instances, self.requests, strict=True), *self._gone]:
            while requests:
                _change("end", one, requests, None, 0)


@dataclass
class Compared:
    """The routers beside the plain formulas."""

    model: CostModel
    ranks: dict[str, int]
    max_loras: int | None
    by_cost: RankAware
    by_pending: ShortestPendingTime

    def choose(self, request: Request, present: list[Instance]) -> None:
        model, ranks = self.model, self.ranks
        fitting = [one for one in present if one.load.has_room(request.adapter, self.max_loras)] or present
        costs_s = [plain_cost_s(model, ranks, request, one) for one in fitting]
        keys = [
            (cost_s, one.outstanding_tokens, one.index) for cost_s, one in zip(costs_s, fitting, strict=True)
        ]
        num_choices = self.by_cost.stats.num_choices["infinite"]
        assert self.by_cost.choose(request, present) is fitting[keys.index(min(keys))]
        assert self.by_cost.stats.num_choices["infinite"] - num_choices == (min(costs_s) == math.inf)
        pending_s = [plain_pending_s(model, ranks, request, one) for one in fitting]
        assert self.by_pending.choose(request, present) is fitting[pending_s.index(min(pending_s))]


def compared(model: CostModel, max_loras: int | None = None) -> Compared:
    ranks = dict(RANKS)
    return Compared(
        model,
        ranks,
        max_loras,
        RankAware(model, ranks, max_loras),
        ShortestPendingTime(model, ranks, MAX_NUM_SEQS, max_loras),
    )


KINDS = (*["add"] * 5, "start", "start", "end", "hold", "restart", "leave", "same", *["choose"] * 6)


@settings(max_examples=60, deadline=None)
@given(
    MODELS, st.randoms(use_true_random=True), st.sampled_from([1, 3, 12, 20]), st.sampled_from([None, 1, 2])
)
def test_choices_from_columns_are_those_of_the_plain_formula(facts, rng, num, max_loras):
    """Also at ties, between equal states and by rounding, with absent and restarted instances."""
    model, fleet = CostModel(**facts), Fleet(num)
    routers, absent = compared(model, max_loras), 0
    for _ in range(80):
        kind = rng.choice(KINDS)
        position, adapter, tokens = rng.randrange(num), rng.choice(SOME), rng.randrange(4)
        if kind == "choose":
            present = [one for one in fleet.instances if absent < 4 or one.index % absent] or fleet.instances
            routers.choose(Request(adapter, prompt_tokens=20 * tokens), present)
        elif kind == "leave":
            absent = rng.choice((0, 4, 5))
        elif kind == "same":
            fleet.add_in_any_order([(adapter, tokens), (rng.choice(SOME), 1), ("adapter-2", 2)], rng)
        else:
            # A request at each instance makes ties.
            for one in range(num) if kind == "add" and rng.random() < 0.5 else [position]:
                fleet.change(kind, one, rng.choice([adapter, *SOME]), tokens)
    fleet.end_all()
    fresh = compared(model, max_loras)
    for adapter in SOME:
        request = Request(adapter, prompt_tokens=20)
        routers.choose(request, fleet.instances)
        fresh.choose(request, fleet.instances)
    assert (routers.by_cost._columns == fresh.by_cost._columns).all()
    assert (routers.by_pending._columns == fresh.by_pending._columns).all()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.3, 1e-9])
def test_rounding_decides_as_in_the_plain_formula(seed, share):
    """Sums of the same numbers in another order differ by rounding alone; so do costs."""
    rng = random.Random(seed)
    # Beside other terms the rounding of a small share is nothing.
    terms = ("experts", "expert_ranks") if share < 0.1 else ("step", *TERMS)
    seconds = {name: rng.random() * 1e-3 for name in terms}
    steps = StepModel(kernel="bgmv", form="full", expert_share=share, decode_s=seconds, prefill_s=seconds)
    routers, fleet = compared(CostModel(steps=steps, cost=rng.choice(RANK_AWARE_COSTS))), Fleet(20)
    for _ in range(6):
        requests = [(adapter, rng.randrange(4)) for adapter in rng.sample([*RANKS], 5)]
        fleet.add_in_any_order(requests, rng)
        for one in fleet.instances:
            one.outstanding_tokens = rng.randrange(3)
        routers.choose(Request(rng.choice([None, *RANKS]), prompt_tokens=30), fleet.instances)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.3, 0.004, 1e-9])
def test_bounds_from_columns_hold_the_costs(seed, share):
    rng = random.Random(seed)
    names = rng.choice((("experts", "expert_ranks"), ("experts",), ("step", *TERMS, "padded_ranks")))
    decode_s, prefill_s = ({name: rng.random() * 1e-3 for name in names} for _ in range(2))
    steps = StepModel(kernel="bgmv", form="full", expert_share=share, decode_s=decode_s, prefill_s=prefill_s)
    host = rng.choice([None, FixedStart()])
    model, fleet = CostModel(steps=steps, cost=rng.choice(RANK_AWARE_COSTS), host=host), Fleet(20)
    routers = compared(model)
    for _ in range(4):
        for _ in range(60):
            kind, tokens = rng.choice(("add", "add", "start", "end")), rng.randrange(4)
            fleet.change(kind, rng.randrange(20), rng.choice(ADAPTERS), tokens)
        for adapter in ADAPTERS:
            request = Request(adapter, prompt_tokens=rng.randrange(1, 30))
            router = routers.by_cost
            bounds_s = router._bounds_s(router._ask(request), router._read(fleet.instances))
            costs_s = [plain_cost_s(model, RANKS, request, one) for one in fleet.instances]
            for lowest_s, cost_s, highest_s in zip(bounds_s[0], costs_s, bounds_s[1], strict=True):
                assert lowest_s <= cost_s <= highest_s
            routers.choose(request, fleet.instances)


@pytest.mark.parametrize("num", [2, 12])
def test_the_load_of_a_former_instance_does_not_count(num):
    seconds = {"step": 1e-3, "ranks": 1e-5}
    steps = StepModel(kernel="mbgmv", form="full", expert_share=1.0, decode_s=seconds, prefill_s=seconds)
    routers, fleet = compared(CostModel(steps=steps)), Fleet(num)
    for adapters in ("adapter-1", "adapter-2"), ("adapter-3", "adapter-2"), ("adapter-0", "adapter-2"):
        for position in range(num):
            if position == 0:
                fleet.change("restart", 0, None, 0)
            if not fleet.requests[position]:
                fleet.change("add", position, adapters[position > 0], 1)
        routers.choose(Request(None, prompt_tokens=10), fleet.instances)


@pytest.mark.parametrize("num", [2, 12])
@pytest.mark.parametrize("cost", RANK_AWARE_COSTS)
def test_idle_instances_cost_alike_if_they_have_the_adapter(num, cost):
    seconds = {"step": 1e-3, "ranks": 1e-5}
    steps = StepModel(kernel="mbgmv", form="full", expert_share=1.0, decode_s=seconds, prefill_s=seconds)
    routers, fleet = compared(CostModel(steps=steps, cost=cost, host=FixedStart())), Fleet(num)
    for one in fleet.instances:
        one.outstanding_tokens = 5
    fleet.instances[1].load.note("adapter-1")
    routers.choose(Request("adapter-1", prompt_tokens=10), fleet.instances)
    # Busy, with less work by count.
    fleet.instances[0].load.note("adapter-1")
    for position in range(1, num):
        fleet.instances[position].outstanding_tokens = 0
        fleet.change("add", position, "adapter-1", 0)
    routers.choose(Request("adapter-1", prompt_tokens=10), fleet.instances)


@pytest.mark.parametrize("num", [2, 12])
def test_a_changed_rank_counts_at_the_next_change(num):
    """An adapter's next version may have another rank while the name is in use."""
    seconds = {"step": 1e-3, "ranks": 1e-5}
    steps = StepModel(kernel="mbgmv", form="full", expert_share=1.0, decode_s=seconds, prefill_s=seconds)
    routers, fleet = compared(CostModel(steps=steps)), Fleet(num)
    for position in range(num):
        fleet.change("add", position, "adapter-1" if position else "adapter-2", 1)
    routers.ranks["adapter-2"] = 4
    routers.choose(Request(None, prompt_tokens=10), fleet.instances)


def _change(kind: str, one: Instance, requests: list[Any], adapter: str | None, tokens: int) -> None:
    """One step of an instance's requests."""
    if kind == "add":
        one.load.add(adapter, 10 * tokens)
        one.outstanding_tokens += 10 * tokens
        requests.append((adapter, 10 * tokens, False))
    elif kind == "hold":
        one.load.held_back = tokens > 0
    elif kind in ("start", "end") and requests:
        found, prompt_tokens, started = requests.pop(tokens % len(requests))
        if kind == "end":
            one.load.end(found, prompt_tokens, started=started)
            one.outstanding_tokens -= prompt_tokens // 2
        else:
            if not started:
                one.load.start(found, prompt_tokens)
            requests.append((found, prompt_tokens, True))
