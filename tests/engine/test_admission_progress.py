# SPDX-License-Identifier: Apache-2.0
"""Small arenas, slow copies: every request ends within a bounded number of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config import CACHE_POLICIES

from .parts import BLOCK_SIZE, Parts, packed

MAX_LEN = 24
"""Tokens of a request; with the largest adapter it fits into the smallest arena."""
LARGEST = 3
MAX_DELAY = 6
"""Steps that a copy takes at most."""


@dataclass(frozen=True)
class Mix:
    """Requests as (step, adapter or None, prompt tokens, answer tokens), and what serves them."""

    seed: int
    requests: list[tuple[int, int | None, int, int]]
    pages: tuple[int, ...]
    spare_pages: int
    settings: dict


MIXES = st.builds(
    Mix,
    seed=st.integers(0, 2**32),
    requests=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([None, 0, 1, 2, 3, 4, 5]),
            st.integers(1, MAX_LEN - 6),
            st.integers(1, 6),
        ),
        min_size=4,
        max_size=20,
    ).map(lambda rows: sorted(rows, key=lambda row: row[0])),
    pages=st.tuples(*[st.integers(1, LARGEST)] * 6),
    spare_pages=st.integers(0, 3),
    settings=st.fixed_dictionaries(
        {
            "num_host_pages": st.sampled_from([0, 4, 40]),
            "max_loras": st.integers(1, 6),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([6, 16, 64]),
            "starvation_s": st.sampled_from([0.0, 0.5, 100.0]),
            "shortest_first": st.booleans(),
            "policy": st.sampled_from(CACHE_POLICIES),
        }
    ),
)


@settings(max_examples=40, deadline=None)
@given(mix=MIXES)
def test_every_request_ends_within_a_bounded_number_of_steps(mix):
    assert_all_end(mix)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(mix=MIXES)
def test_every_request_of_many_mixes_ends(mix):
    assert_all_end(mix)


def assert_all_end(mix: Mix) -> None:
    rng = random.Random(mix.seed)
    least = -(-MAX_LEN // BLOCK_SIZE) + LARGEST
    parts = Parts(num_pages=least + mix.spare_pages, room_pages=LARGEST, prompt=False, **mix.settings)
    adapters = [parts.manager.add(packed(f"a{i}", pages), None) for i, pages in enumerate(mix.pages)]
    answers = {str(number): row[3] for number, row in enumerate(mix.requests)}
    to_come = list(enumerate(mix.requests))
    num_left, delay = len(to_come), rng.randint(1, MAX_DELAY)
    work = sum(prompt + answer for *_, prompt, answer in mix.requests)
    for step in range(10 + MAX_DELAY * (2 * work + 20 * num_left)):
        while to_come and to_come[0][1][0] <= step:
            number, (_, adapter, prompt, _) = to_come.pop(0)
            version = None if adapter is None else adapters[adapter]
            first = 100 * rng.randint(0, 2)
            parts.add(str(number), range(first, first + prompt), version)
        parts.clock.advance(0.06)
        parts.step()
        delay -= 1
        if not delay:
            parts.mover.work(1)
            delay = rng.randint(1, MAX_DELAY)
        for sequence in list(parts.scheduler.running):
            if sequence.num_generated >= answers[sequence.request.request_id]:
                parts.scheduler.finish(sequence)
                num_left -= 1
        if not num_left:
            break
    assert not num_left
    assert parts.cache.usage()["device_kv_used"] == 0
