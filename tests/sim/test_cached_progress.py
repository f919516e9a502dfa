# SPDX-License-Identifier: Apache-2.0
"""Small devices, copies slower than steps: the simulated instance gets every request done."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.sim.instance import CachedConfig, CachedInstance
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import TurnRequest
from tests.grids import with_quick

MAX_LEN, BLOCK_SIZE, LARGEST = 24, 4, 5
"""Tokens of a request, tokens of a page, pages of the largest adapter."""
EVEN_STEPS = TransformerTime(
    num_params=1e-3,
    num_layers=1,
    hidden_size=0,
    kv_token_bytes=1,
    flops_per_s=1e6,
    bytes_per_s=math.inf,
    fixed_s=0.1,
)
ALONE_S = 10.0
"""More than any request takes that has the device for itself."""


def config_of(pages, spare_pages=0, page_s=0.4, **changes):
    common = {
        "time": EVEN_STEPS,
        "adapter_pages": {f"a{i}": num_pages for i, num_pages in enumerate(pages)},
        "num_device_pages": -(-MAX_LEN // BLOCK_SIZE) + LARGEST + spare_pages,
        "num_host_pages": 40,
        "link_bytes_per_s": BLOCK_SIZE / page_s,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 16,
        "starvation_s": 0.5,
    }
    return CachedConfig(**common | changes)


def traffic(seed, num_requests, num_adapters, gap_s=0.2):
    """Prompts that share three beginnings, at random times, of random adapters."""
    rng = random.Random(seed)
    requests, arrival_s = [], 0.0
    for index in range(num_requests):
        arrival_s += rng.uniform(0, 2 * gap_s)
        first = 100 * rng.randrange(3)
        prompt = tuple(range(first, first + rng.randint(1, MAX_LEN - 6)))
        answer = tuple(range(1000 * (index + 1), 1000 * (index + 1) + rng.randint(1, 6)))
        requests.append(TurnRequest(index, arrival_s, f"a{rng.randrange(num_adapters)}", prompt, answer))
    return requests


def num_left(config, policy, requests):
    """Requests that did not end in the time in which each of them could have run alone."""
    policy = make_caching_policy(policy, config.costs())
    instance = CachedInstance(config, policy, requests)
    instance.events.run(requests[-1].arrival_s + ALONE_S * len(requests))
    return len(requests) - len(instance.done)


@pytest.mark.parametrize("seed", with_quick(range(4), (0,)))
@pytest.mark.parametrize("policy", sorted(set(CACHING_POLICIES) - {"static"}))
def test_oldest_request_is_not_starved_by_younger_ones_that_load(policy, seed):
    config = config_of((1, 5, 5, 1, 3, 4))
    assert not num_left(config, policy, traffic(seed, 80, 6))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(4, 40),
    gap_s=st.sampled_from([0.05, 0.2, 0.5]),
    pages=st.lists(st.integers(1, LARGEST), min_size=2, max_size=8),
    policy=st.sampled_from(sorted(set(CACHING_POLICIES) - {"static"})),
    room=st.fixed_dictionaries(
        {
            "spare_pages": st.integers(0, 3),
            "page_s": st.sampled_from([0.05, 0.1, 0.2, 0.4]),
            "num_host_pages": st.sampled_from([0, 4, 40]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([6, 16, 64]),
            "starvation_s": st.sampled_from([0.0, 0.5, 100.0]),
        }
    ),
)
def test_every_request_ends_in_bounded_time(seed, num_requests, gap_s, pages, policy, room):
    config = config_of(pages, **room)
    assert not num_left(config, policy, traffic(seed, num_requests, len(pages), gap_s))
