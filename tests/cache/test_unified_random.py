# SPDX-License-Identifier: Apache-2.0
"""Every policy under random use: invariants after each step, and every page holds what it is found by."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moe_lora.policies.caching.caching import CACHING_POLICIES

from .random_operations import RandomCache


@pytest.fixture(autouse=True, scope="module")
def forgetting_takes_many_slices():
    """So few nodes as there are here would be forgotten at once otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_lora.cache.node_mover.SLICE", 1)
        yield


class CacheMachine(RuleBasedStateMachine):
    """hypothesis chooses the operations and what they draw, so that a failure shrinks."""

    @initialize(policy=st.sampled_from(sorted(CACHING_POLICIES)), seed=st.randoms(use_true_random=False))
    def begin(self, policy: str, seed: Random) -> None:
        self.use = RandomCache(policy, seed)

    @rule()
    def add_version(self) -> None:
        self.use.add()

    @rule()
    def forget_version(self) -> None:
        self.use.forget()

    @rule()
    def hold_adapter(self) -> None:
        self.use.hold()

    @rule()
    def match_prompt(self) -> None:
        self.use.start()

    @rule()
    def compute_and_insert(self) -> None:
        self.use.compute()

    @rule()
    def end_request(self) -> None:
        self.use.end()

    @rule()
    def swap(self) -> None:
        self.use.tick()

    @rule()
    def confirm_an_order(self) -> None:
        self.use.execute()

    @rule()
    def wait(self) -> None:
        self.use.wait()

    @invariant()
    def everything_is_consistent(self) -> None:
        if hasattr(self, "use"):
            self.use.check()

    def teardown(self) -> None:
        if hasattr(self, "use"):
            self.use.finish()


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def run(policy: str, num_operations: int, *, check_every: int) -> None:
    use = RandomCache(policy, Random(policy), device_pages=40, host_pages=24)
    for number in range(num_operations):
        use.step()
        if number % check_every == 0:
            use.check()
    use.finish()


@pytest.mark.parametrize("policy", sorted(CACHING_POLICIES))
def test_no_page_leaks_or_gets_two_owners(policy):
    run(policy, 500, check_every=3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(CACHING_POLICIES))
def test_no_page_leaks_or_gets_two_owners_in_100_000_operations(policy):
    run(policy, 12_500, check_every=1)
