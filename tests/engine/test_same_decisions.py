# SPDX-License-Identifier: Apache-2.0
"""The engine's sequences and adapters, and the simulator's, under the one scheduler."""

from __future__ import annotations

import random

import pytest

from moe_lora.policies.admission.host_start import HostLoads, HostStart
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.timing.host_times import CacheCosts, HostTimes, PartTime
from tests.grids import diagonal
from tests.scheduling.parts import Parts as SimulatedParts

from .parts import PAGE_BYTES, Parts, packed

NUM_PAGES = {"a0": 1, "a1": 2, "a2": 3, "a3": 1, "a4": 2}
"""Of each adapter."""
ROOM = {
    "num_pages": 11,
    "num_host_pages": 16,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "starvation_s": 0.5,
    "prompt": False,
}


def host_rule() -> HostStart:
    """A worker takes 20 ms for a token of one of two layers, a page 50 ms to load."""
    times = HostTimes(
        worker={"o": PartTime(per_token_s=0.02)},
        device=PartTime(fixed_s=0.02),
        num_layers=2,
        load_fixed_s=0.0,
        load_bytes_per_s=PAGE_BYTES / 0.05,
        bytes_per_rank=PAGE_BYTES,
        max_tokens=16,
        max_rank=1,
    )
    return HostStart(times=times, num_workers=3, tokens_per_worker=2)


class CountedLoads(HostLoads):
    """Counts its decisions: (tokens, whether they begin)."""

    def __init__(self) -> None:
        super().__init__(host_rule(), ROOM["max_num_batched_tokens"])
        self.decisions = []

    def pays(self, uid, num_tokens, on_host, now_s):
        found = super().pays(uid, num_tokens, on_host, now_s)
        self.decisions.append((num_tokens, on_host, found))
        return found


@pytest.mark.parametrize(
    ("policy", "seed", "host"),
    diagonal(("fastlibra", "cost-aware", "lru", "slora"), range(3), (False, True)),
)
def test_engine_and_simulator_compute_the_same_steps(policy, seed, host):
    """host: workers compute prompts of loading adapters, where the profile says that it pays."""
    rng = random.Random(seed)
    loads = [CountedLoads() if host else None for _ in range(2)]
    tokens = 4 if host else 0
    real = Parts(policy=policy, room_pages=3, max_loras=3, host_loads=loads[0], host_tokens=tokens, **ROOM)
    costs = CacheCosts(page_bytes=PAGE_BYTES)
    simulated = SimulatedParts(
        NUM_PAGES,
        policy=make_caching_policy(policy, costs),
        max_adapters=3,
        host_loads=loads[1],
        host_tokens=tokens if host else None,
        page_bytes=PAGE_BYTES,
        **ROOM,
    )
    versions = {name: real.manager.add(packed(name, pages), None) for name, pages in NUM_PAGES.items()}
    sequences, num_left = {}, {}
    for number in range(300):
        if number % 3 == 0 and number < 150:
            name, adapter = str(number), rng.choice([None, *NUM_PAGES])
            first = 100 * rng.randrange(3)
            prompt, num_answer = range(first, first + rng.randint(1, 18)), rng.randint(1, 6)
            sequences[name] = real.add(name, prompt, versions.get(adapter))
            num_left[name] = num_answer
            simulated.add(name, prompt, adapter, num_answer)
        real.clock.advance(0.06)
        simulated.clock.advance(0.06)
        step = real.step()
        assert simulated.step() == step
        for name in step:
            if sequences[name].num_generated == num_left[name]:
                real.scheduler.finish(sequences[name])
                del num_left[name]
        if number % 2:
            real.mover.work(1)
            simulated.work(1)
    assert not num_left
    if host:
        assert loads[0].decisions == loads[1].decisions
        assert {found for _, _, found in loads[0].decisions} == {False, True}, "some begin, others wait"
    assert simulated.cache.counters == real.cache.counters
    assert simulated.cache.usage() == real.cache.usage()
    assert simulated.scheduler.num_put_back == real.scheduler.num_put_back
    assert real.scheduler.num_put_back + real.scheduler.num_preemptions > 0
    assert simulated.scheduler.num_preemptions == real.scheduler.num_preemptions
