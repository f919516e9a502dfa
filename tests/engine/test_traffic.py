# SPDX-License-Identifier: Apache-2.0
"""Random traffic over the engine's bookkeeping: everybody gets done, and nothing stays taken."""

from __future__ import annotations

import random

import pytest

from moe_lora.cache.pages import BlockTable
from moe_lora.config import CACHE_POLICIES
from moe_lora.engine.core import NUM_TRIES
from moe_lora.engine.sequence import Sequence
from tests.grids import with_quick

from .parts import BLOCK_SIZE, Parts, packed

ANSWER_TOKENS = 12


def parts_for(rng: random.Random) -> Parts:
    return Parts(
        num_pages=rng.choice([11, 15]),
        num_host_pages=rng.choice([0, 6]),
        room_pages=4,
        policy=rng.choice(CACHE_POLICIES),
        prompt=rng.random() < 0.5,
        max_loras=rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([4, 16]),
        starvation_s=rng.choice([0.5, 5.0]),
    )


def change_something(
    rng: random.Random, parts: Parts, live: list[Sequence], number: int, tenants: int
) -> None:
    """A request comes or leaves, an adapter is published or removed."""
    known = parts.manager.known()
    if rng.random() < 0.15 or not known:
        name, num_pages = rng.choice("abcd"), rng.randint(1, 3)
        parts.manager.add(packed(name, num_pages, value=rng.random()), None, replace=True)
    elif rng.random() < 0.1:
        parts.manager.remove(rng.choice(known).name)
    elif rng.random() < 0.1 and live:
        parts.scheduler.finish(live.pop(rng.randrange(len(live))))
    else:
        first = rng.choice([0, 100])
        prompt = range(first, first + rng.randint(1, 18))
        tenant = "" if tenants == 1 else f"tenant {rng.randrange(tenants)}"
        live.append(parts.add(str(number), prompt, rng.choice([None, *known]), tenant))


QUICK = (0, 1, 2, 3, 7, 10, 13, 19)
"""Their draws have each value of each setting."""


@pytest.mark.parametrize("seed", with_quick(range(20), QUICK))
def test_random_traffic_gets_done_and_leaves_nothing_taken(seed):
    """Every second time of three tenants, who share no KV and give way to each other."""
    rng, tenants = random.Random(seed), 1 + 2 * (seed % 2)
    parts, live = parts_for(rng), []
    num_free, num_empty = parts.num_free, 0
    for number in range(3000):
        if number < 60:
            change_something(rng, parts, live, number, tenants)
        elif not live:
            break
        parts.clock.advance(0.1)
        idle = not parts.step()
        num_empty = num_empty + 1 if idle and live and not parts.transfers.busy else 0
        assert num_empty < NUM_TRIES, "requests wait and nothing is computed"
        if rng.random() < 0.5 or idle:
            parts.mover.work(rng.randint(1, 3))
        assert len(parts.kept) >= len(parts.manager.known())
        for sequence in [s for s in live if s.num_generated >= ANSWER_TOKENS]:
            parts.scheduler.finish(sequence)
            live.remove(sequence)
    assert not live
    for adapter in parts.manager.known():
        parts.manager.remove(adapter.name)
    parts.move()
    assert list(parts.manager.resident()) == []
    assert len(parts.kept) == 0
    usage = parts.cache.usage()
    assert (usage["device_kv_used"], usage["device_adapters"]) == (0, 0)
    for_kv = parts.cache._room.max_kv_pages
    assert parts.cache.grow(BlockTable(None), for_kv * BLOCK_SIZE, parts.clock.now_s())
    assert parts.num_free == num_free - for_kv
    assert not parts.scheduler.waiting
    counted = parts.scheduler.tenants
    assert counted is None if tenants == 1 else counted is not None and not counted.counter._waiting
