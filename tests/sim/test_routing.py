# SPDX-License-Identifier: Apache-2.0
"""The front end's routers before simulated instances."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moe_lora.config.optional_parts import StageTime
from moe_lora.policies.routing.model_routing import CostModel
from moe_lora.policies.routing.routers import ROUTERS, RoutingContext, make_router
from moe_lora.provision.replayed.system import System
from moe_lora.timing.step_model import StepModel

from .systems import asked, coupled, served, server

NAMES = tuple("abcdef")
RANKS = dict(zip(NAMES, (8, 8, 8, 8, 128, 128), strict=True))
STEPS = StepModel(
    kernel="bgmv",
    form="toppings",
    expert_share=1.0,
    decode_s={"step": 0.01, "padded_ranks": 1e-4},
    prefill_s={"padded_ranks": 1e-4},
)
MODEL = CostModel(steps=STEPS, adapter_load_s_per_rank=0.01)
TABLE = {name: [(0, 0.5), (1, 0.5)] if name == "a" else [(2, 1.0)] for name in NAMES}
CONTEXT = RoutingContext(max_num_seqs=3, model=MODEL, ranks=RANKS, table=TABLE)


def some(num: int = 300):
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.05, num)).tolist()
    return asked(
        *((at_s, str(rng.choice(NAMES)), int(rng.integers(1, 9))) for at_s in arrivals), prompt_tokens=4
    )


@pytest.mark.parametrize("name", sorted(ROUTERS))
@pytest.mark.parametrize("kind", ["coupled", "server"])
def test_every_router_serves_all_requests_and_leaves_nothing_counted(name, kind):
    if kind == "coupled":
        config = coupled(3, num_instances=3, prefill=StageTime(per_row_s=0.01))
    else:
        config = served(server(3), num_instances=3)
    system = System(replace(config, router=lambda: make_router(name, CONTEXT)))
    plan = some()
    system.replay(plan)
    assert len(system.requests) == len(plan)
    for instance in system.instances:
        load = instance.load
        assert (load.num_requests, load.waiting_tokens) == (0, 0)
        assert not load.waiting
        assert not load.running
    if name == "phi":
        placed = Counter((request.adapter, request.instance) for request in system.requests)
        assert set(placed) == {(name, index) for name, row in TABLE.items() for index, _ in row}
        assert abs(placed["a", 0] - placed["a", 1]) <= 1


def test_rank_aware_routing_learns_the_answers_of_its_own_run():
    means = []
    for _ in range(2):
        router = make_router("rank_aware", CONTEXT)
        System(replace(coupled(6, num_instances=3), router=lambda router=router: router)).replay(some())
        means.append(router.mean_output_tokens)
    lengths = [one.output_tokens for one in some()]
    assert means == [pytest.approx((8 * 128 + sum(lengths)) / (8 + len(lengths)))] * 2


def test_rank_aware_routing_keeps_the_high_ranks_together():
    config = coupled(6, num_instances=3)
    spread = {}
    for name in ("rank_aware", "round_robin"):
        system = System(replace(config, router=lambda name=name: make_router(name, CONTEXT)))
        system.replay(some())
        high = Counter(request.instance for request in system.requests if RANKS[request.adapter] == 128)
        spread[name] = max(high.values()) / sum(high.values())
    assert spread["rank_aware"] > spread["round_robin"] + 0.1
