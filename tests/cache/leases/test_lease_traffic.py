# SPDX-License-Identifier: Apache-2.0
"""Random traffic over a lease table, each step replayed and checked by `LeaseModel`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from moe_lora.core.errors import ConfigError

from .lease_model import INSTANCES, SHARDS, LeaseModel

instances = st.sampled_from(INSTANCES)
adapters = st.sampled_from(sorted(SHARDS))
capacities = st.integers(1, 4)


class LeaseMachine(RuleBasedStateMachine):
    @initialize(capacity=capacities, known=st.sets(adapters))
    def start(self, capacity: int, known: set[str]) -> None:
        self.model = LeaseModel(capacity)
        for adapter_id in sorted(known):
            self.model.register(adapter_id)

    @rule(adapter_id=adapters)
    def register(self, adapter_id: str) -> None:
        self.model.register(adapter_id)

    @rule(adapter_id=adapters)
    def unregister(self, adapter_id: str) -> None:
        self.model.unregister(adapter_id)

    @rule(instance=instances, adapter_id=adapters)
    def acquire(self, instance: str, adapter_id: str) -> None:
        self.model.acquire(instance, adapter_id)

    @rule(instance=instances, adapter_id=adapters)
    def release(self, instance: str, adapter_id: str) -> None:
        self.model.release(instance, adapter_id)

    @rule(data=st.data())
    def release_a_lease(self, data: st.DataObject) -> None:
        if self.model.leases:
            self.model.release(*data.draw(st.sampled_from(sorted(self.model.leases))))

    @rule(instance=instances, adapter_id=adapters)
    def cancel(self, instance: str, adapter_id: str) -> None:
        self.model.cancel(instance, adapter_id)

    @rule(adapter_id=adapters)
    def prefetch(self, adapter_id: str) -> None:
        self.model.prefetch(adapter_id)

    @rule(after_s=st.sampled_from([0.5, 1.5, 3.0]))
    def time_passes(self, after_s: float) -> None:
        self.model.now_s += after_s

    @rule(instance=instances)
    def drop_instance(self, instance: str) -> None:
        self.model.drop_instance(instance)

    @rule(adapter_id=adapters)
    def fail(self, adapter_id: str) -> None:
        self.model.fail(adapter_id)

    @rule(capacity=capacities)
    def resize(self, capacity: int) -> None:
        self.model.resize(capacity)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


pages = st.integers(1, 30)
operations = st.lists(
    st.tuples(st.sampled_from(["acquire", "release", "unload"]), instances, st.integers(0, 5))
)


@st.composite
def budgets(draw) -> tuple[list[int], dict[str, dict[int, dict[int, int]]]]:
    """Pages of each rank, and adapters of any size up to twice the budget."""
    pages_per_rank = draw(st.lists(pages, min_size=1, max_size=3))
    shards = {}
    for number in range(draw(st.integers(1, 6))):
        shards[f"a{number}"] = {
            server_rank: dict(enumerate(draw(st.lists(st.integers(1, max(1, 2 * total // 3)), max_size=3))))
            for server_rank, total in enumerate(pages_per_rank)
        }
    return pages_per_rank, shards


@settings(max_examples=150, deadline=None)
@given(budgets(), st.integers(1, 5), operations)
def test_adapter_within_the_budget_is_granted_once_leases_end(budget, capacity, chosen):
    """Whatever sizes come in whatever order; `LeaseModel` checks that no page has two owners."""
    pages_per_rank, shards = budget
    model, known = LeaseModel(capacity, pages_per_rank, shards), []
    for name, shard in shards.items():
        if all(sum(layers.values()) <= pages_per_rank[rank] for rank, layers in shard.items()):
            model.register(name)
            known.append(name)
        else:
            with pytest.raises(ConfigError, match=r"lora_server\.memory_gb"):
                model.table.register(name, shard)
    for operation, instance, number in chosen:
        name = f"a{number}"
        if name in known and operation == "acquire":
            model.acquire(instance, name)
        elif operation == "release":
            model.release(instance, name)
        elif name in known and operation == "unload":
            model.drop_instance(instance)
    for name in known:
        for instance in INSTANCES:
            model.acquire(instance, name)
            assert (instance, name) in model.leases or (instance, name) in model.waiting, "never refused"
    model.drain()


def one_operation(model: LeaseModel, rng: random.Random) -> None:
    instance, adapter_id = rng.choice(INSTANCES), rng.choice(sorted(SHARDS))
    model.now_s += rng.expovariate(5.0)
    choice = rng.random()
    if choice < 0.4:
        model.acquire(instance, adapter_id)
    elif choice < 0.7 and model.leases:
        model.release(*rng.choice(sorted(model.leases)))
    elif choice < 0.75:
        model.cancel(instance, adapter_id)
    elif choice < 0.8:
        model.prefetch(adapter_id)
    elif choice < 0.81:
        model.drop_instance(instance)
    elif choice < 0.83:
        model.resize(rng.randint(1, 4))
    elif choice < 0.84:
        model.fail(adapter_id)
    elif choice < 0.87:
        model.unregister(adapter_id)
    else:
        model.register(adapter_id)


def run_operations(seed: int, num_operations: int) -> LeaseModel:
    model, rng = LeaseModel(3), random.Random(seed)
    for adapter_id in SHARDS:
        model.register(adapter_id)
    for _ in range(num_operations):
        one_operation(model, rng)
    return model


def test_random_traffic_reaches_every_corner():
    model = run_operations(seed=1, num_operations=2000)
    stats = model.table.stats()
    assert stats.num_loads > 100
    assert stats.num_evictions > 100
    assert model.num_starving > 100
    model.drain()


def test_what_is_heard_in_one_turn_is_given_out_at_its_end_and_nobody_is_forgotten():
    """`LeaseModel.check` after each turn: whoever waits finds no place, or is behind who starves."""
    model, rng = LeaseModel(3), random.Random(3)
    for adapter_id in SHARDS:
        model.register(adapter_id)
    for _ in range(400):
        with model.turn():
            for _ in range(rng.randint(2, 8)):
                one_operation(model, rng)
    assert model.table.stats().num_evictions > 100
    assert model.num_starving > 50
    model.drain()


@pytest.mark.slow
def test_100_000_operations_leave_nothing_behind():
    run_operations(seed=2, num_operations=100_000).drain()
