# SPDX-License-Identifier: Apache-2.0
"""Routers keep counts; rules that count all requests anew make the same choices."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moe_lora.policies.routing.model_routing import CostModel, RankAware, ShortestPendingTime
from moe_lora.policies.routing.routers import AdapterAffinity
from moe_lora.policies.routing.routing import InstanceLoad
from moe_lora.timing.step_model import StepModel
from tests.policies.routing_parts import Instance, Request

MAX_LORAS, MAX_RECENT, SLACK_TOKENS = 3, 2, 40
RANKS = {f"adapter-{number}": 8 << number % 4 for number in range(8)}
ADAPTERS = [None, *RANKS]


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
    return min(with_room, key=lambda one: (router.pending_s(request, one.instance), one.instance.index))


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
