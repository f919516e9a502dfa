"""Random traffic over a lease table, each step replayed and checked by `LeaseModel`."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

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

    @rule(capacity=capacities)
    def resize(self, capacity: int) -> None:
        self.model.resize(capacity)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


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
