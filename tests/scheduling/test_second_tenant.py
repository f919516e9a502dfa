# SPDX-License-Identifier: Apache-2.0
"""A scheduler and its cache count tenants from the second tenant on, and decide as if they always had."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.grids import with_quick

from .parts import Parts

ADAPTERS = {f"a{number}": 2 for number in range(6)}


def decisions(seed: int, *, from_start: bool) -> list[object]:
    """What runs in each step: first requests of one tenant, later of two or three tenants."""
    rng = random.Random(seed)
    sizes = {"num_pages": rng.choice([24, 40, 80]), "max_num_seqs": rng.choice([2, 4, 8])}
    parts = Parts(ADAPTERS, max_num_batched_tokens=32, max_adapters=rng.choice([None, 3]), **sizes)
    if from_start:
        parts.scheduler.count_tenants()
        parts.cache._divide()
    found: list[object] = []
    arrival, shares = rng.randrange(5, 60), {"one": 1.0, "two": rng.choice([1.0, 2.0]), "three": 0.5}
    for number in range(200):
        tenants = ("one",) if number < arrival else tuple(shares)[: 2 + seed % 2]
        if number < 120 and rng.random() < 0.7:
            tenant = rng.choice(tenants)
            start = rng.choice([0, 100, 200, 1000 * number])
            parts.add(
                f"{tenant}{number}",
                range(start, start + rng.randrange(1, 30)),
                rng.choice([None, *ADAPTERS]),
                num_answer=rng.randrange(1, 20),
                tenant=tenant,
                share=shares[tenant],
            )
        found.append((parts.step(), parts.names()))
        parts.clock.advance(rng.choice([0.01, 0.05, 0.2]))
    usage = parts.cache.usage()
    return [*found, usage, vars(parts.cache.counters), parts.scheduler.num_preemptions]


@pytest.mark.parametrize("seed", with_quick(range(40), (0, 1, 2, 3, 6)))
def test_decisions_are_those_of_a_scheduler_that_counted_from_the_start(seed):
    assert decisions(seed, from_start=False) == decisions(seed, from_start=True)


def test_one_tenant_is_not_counted():
    parts = Parts(ADAPTERS)
    for number in range(8):
        parts.add(f"r{number}", range(8), "a1", num_answer=4, tenant="one", share=2.0)
        parts.step()
    assert parts.scheduler.tenants is None
    assert parts.cache._ranking.shares is None
    parts.add("other", range(8), "a1", num_answer=4, tenant="two")
    parts.step()
    assert parts.scheduler.tenants is parts.scheduler.waiting
    assert parts.cache._ranking.shares is not None


def test_a_priority_alone_orders_the_queue_but_divides_no_arena():
    parts = Parts(max_num_seqs=1)
    for name, priority in (("usual", 0), ("low", 5), ("urgent", -1)):
        parts.add(name, range(4), num_answer=1, priority=priority)
    assert [next(iter(parts.step())) for _ in range(3)] == ["urgent", "usual", "low"]
    assert parts.cache._ranking.shares is None


def test_what_counts_tenants_is_imported_with_the_second_tenant():
    code = """
import sys
from tests.scheduling.parts import Parts
parts = Parts({"a": 2})
names = ("admission.fairness", "caching.arena_shares")
def known():
    return [f"moe_lora.policies.{name}" in sys.modules for name in names]
parts.add("one", range(8), "a", tenant="one")
parts.step()
assert known() == [False, False], known()
parts.add("two", range(8), "a", tenant="two")
parts.step()
assert known() == [True, True], known()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
