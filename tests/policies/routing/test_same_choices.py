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
COEFFICIENTS = {
    name: st.sampled_from([1e-6, 3e-4])
    for name in ("tokens", "experts", "padded_ranks", "adapter_ranks", "expert_ranks")
}


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


MODELS = st.fixed_dictionaries(
    {
        "steps": st.builds(
            StepModel,
            kernel=st.just("bgmv"),
            form=st.just("full"),
            expert_share=st.sampled_from([0.25, 0.004, 1.0]),
            decode_s=st.fixed_dictionaries({"step": st.just(5e-3)}, optional=COEFFICIENTS),
            prefill_s=st.fixed_dictionaries({}, optional=COEFFICIENTS),
        ),
        "slo_tpot_s": st.sampled_from([math.inf, 5e-3, 6.5e-3, 0.02]),
        "cost": st.sampled_from(RANK_AWARE_COSTS),
        "mean_output_tokens": st.sampled_from([None, 10.0]),
        "adapter_load_s_per_rank": st.sampled_from([0.0, 1e-3]),
        "host": st.sampled_from([None, FixedStart()]),
    }
)


def plain_work(model: StepModel, load: InstanceLoad) -> tuple[StepWork, StepWork]:
    """The waiting prompts, and a token of each request."""
    parts = load.waiting_prompts.items(), [*load.running.items(), *load.waiting.items()]
    return tuple(model.work(Row(one, RANKS.get(one, 0), num) for one, num in part) for part in parts)


def plain_cost_s(model: CostModel, request: Request, one: Instance) -> float:
    """Algorithm 1 of Toppings, each sum from the requests."""
    queue, everything = plain_work(model.steps, one.load)
    rank, seconds = RANKS.get(request.adapter, 0), model.steps.seconds
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


def plain_pending_s(model: CostModel, request: Request, one: Instance) -> float:
    """Section 5.1 of dLoRA, each sum from the requests."""
    queue, everything = plain_work(model.steps, one.load)
    pending_s = model.steps.seconds("prefill", queue)
    if everything.num_tokens:
        left = max(0, one.outstanding_tokens - one.load.waiting_tokens)
        decode_s = model.steps.seconds("decode", everything)
        pending_s += left / max(everything.num_tokens, MAX_NUM_SEQS) * decode_s
    if one.load.has(request.adapter):
        return pending_s
    return pending_s + model.start_s(Row(request.adapter, RANKS[request.adapter], request.prompt_tokens))


@settings(max_examples=40, deadline=None)
@given(MODELS, st.randoms(use_true_random=True), st.sampled_from([1, 3, 12]), st.sampled_from([None, 1, 2]))
def test_choices_from_columns_are_those_of_the_plain_formula(facts, rng, num, max_loras):
    """Also at ties, between equal states and by rounding, with absent and restarted instances."""
    model = CostModel(**facts)
    by_cost, by_pending = RankAware(model, RANKS, max_loras), ShortestPendingTime(model, RANKS, 4, max_loras)
    instances = [Instance(3 * index, load=InstanceLoad(max_recent=MAX_RECENT)) for index in range(num)]
    for one in instances:
        one.load.has_slots = one.index % 4 != 3
    requests: dict[int, list[tuple[str | None, int, bool]]] = {one.index: [] for one in instances}
    gone: list[tuple[Instance, list[Any]]] = []
    for _ in range(60):
        for one, left in gone:
            _change("end", one, left, None, 0)
        kind = rng.choice(("add", "add", "start", "end", "hold", "restart", "choose", "choose"))
        position, adapter, tokens = rng.randrange(12), rng.choice(SOME), rng.randrange(4)
        # A step of all instances makes ties.
        for one in instances if position > 8 else instances[position : position + 1]:
            _change(kind, one, requests[one.index], adapter, tokens)
        if kind == "restart" and position < num:
            former, slots = instances[position], instances[position].load.has_slots
            gone += [(former, requests[3 * position])]
            requests[3 * position] = []
            instances[position] = Instance(3 * position, load=InstanceLoad(max_recent=MAX_RECENT))
            instances[position].load.has_slots = slots
        if kind != "choose":
            continue
        present = [one for one in instances if (one.index + position) % 4] or instances
        fitting = [one for one in present if one.load.has_room(adapter, max_loras)] or present
        request = Request(adapter, prompt_tokens=20 * tokens)
        costs_s = [plain_cost_s(model, request, one) for one in fitting]
        keys = [
            (cost_s, one.outstanding_tokens, one.index) for cost_s, one in zip(costs_s, fitting, strict=True)
        ]
        num_choices = by_cost.stats.num_choices["infinite"]
        assert by_cost.choose(request, present) is fitting[keys.index(min(keys))]
        assert by_cost.stats.num_choices["infinite"] - num_choices == (min(costs_s) == math.inf)
        pending_s = [plain_pending_s(model, request, one) for one in fitting]
        assert by_pending.choose(request, present) is fitting[pending_s.index(min(pending_s))]


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
