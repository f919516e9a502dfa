"""Random traffic over the engine's bookkeeping: everybody gets done, and nothing stays taken."""

from __future__ import annotations

import random

import pytest

from moe_lora.engine.sequence import Sequence

from .parts import Parts, packed

ANSWER_TOKENS = 12


def parts_for(rng: random.Random) -> Parts:
    return Parts(
        kv_pages=rng.choice([8, 12]),
        lora_pages=rng.choice([3, 5]),
        max_loras=rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([4, 16]),
        starvation_s=rng.choice([0.5, 5.0]),
    )


def change_something(rng: random.Random, parts: Parts, live: list[Sequence], number: int) -> None:
    """A request comes or leaves, an adapter is published or removed."""
    known = parts.residency.known()
    if rng.random() < 0.15 or not known:
        name, num_pages = rng.choice("abcd"), rng.randint(1, 3)
        parts.residency.add(packed(name, num_pages), None, replace=True)
    elif rng.random() < 0.1:
        parts.residency.remove(rng.choice(known).name)
    elif rng.random() < 0.1 and live:
        parts.scheduler.finish(live.pop(rng.randrange(len(live))))
    else:
        first = rng.choice([0, 100])
        prompt = range(first, first + rng.randint(1, 18))
        live.append(parts.add(str(number), prompt, rng.choice([None, *known])))


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_gets_done_and_leaves_nothing_taken(seed):
    rng = random.Random(seed)
    parts, live = parts_for(rng), []
    num_free = parts.pages.num_free
    for number in range(3000):
        if number < 120:
            change_something(rng, parts, live, number)
        elif not live:
            break
        parts.clock.advance(0.1)
        assert parts.step() or not live, "requests wait and nothing is computed"
        assert parts.writer.num_kept >= len(parts.residency.known())
        for sequence in [s for s in live if s.num_generated >= ANSWER_TOKENS]:
            parts.scheduler.finish(sequence)
            live.remove(sequence)
    assert not live
    for adapter in parts.residency.known():
        parts.residency.remove(adapter.name)
    while parts.blocks.evict_one():
        pass
    assert list(parts.residency.resident()) == []
    assert parts.writer.num_kept == 0
    assert (parts.blocks.num_used, parts.pages.num_free) == (0, num_free)
