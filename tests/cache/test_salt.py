# SPDX-License-Identifier: Apache-2.0
"""Prompts that tenants do not share."""

from __future__ import annotations

from collections import OrderedDict
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache import unified
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import lru

BLOCK = 4


def cache() -> UnifiedCache:
    return UnifiedCache(num_device_pages=400, block_size=BLOCK, policy=lru())


def leave(of: UnifiedCache, tokens: list[int], salt: str) -> int:
    """Compute a prompt and leave it; how much of it was found."""
    table = of.match(None, tokens, 1.0, salt=salt)
    found = table.num_matched
    assert of.grow(table, len(tokens), 1.0)
    of.publish(table, tokens, len(tokens), 1.0)
    of.release(table, 1.0)
    return found


def test_what_one_salt_left_no_other_finds():
    prompts, tokens = cache(), list(range(13))
    assert leave(prompts, tokens, "acme") == 0
    assert leave(prompts, tokens, "globex") == 0
    assert leave(prompts, tokens, "") == 0
    for salt in ("acme", "globex", ""):
        assert leave(prompts, tokens, salt) == 12
    prompts.look_ahead([(None, tokens, "acme"), (None, tokens, "other")])


@settings(max_examples=60, deadline=None)
@given(
    visits=st.lists(
        st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), min_size=1, max_size=20)),
        max_size=12,
    )
)
def test_each_salt_finds_what_a_cache_of_its_own_would(visits):
    shared, alone = cache(), {salt: cache() for salt in ("", "a", "b")}
    for salt, tokens in visits:
        assert leave(shared, tokens, salt) == leave(alone[salt], tokens, "")


@settings(max_examples=60, deadline=None)
@given(
    visits=st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), min_size=1, max_size=20)), max_size=20
    )
)
def test_a_salt_that_left_the_table_finds_nothing_old(visits):
    shared, alone = cache(), OrderedDict[str, UnifiedCache]()
    with patch.object(unified, "MAX_SALTS", 2):
        for salt, tokens in visits:
            own = alone.pop(salt, None) or cache()
            alone[salt] = own
            while len(alone) > 2:
                alone.popitem(last=False)
            assert leave(shared, tokens, salt) == leave(own, tokens, "")
            assert len(shared._salts) <= 2


def test_a_prompt_whose_salt_leaves_the_table_meanwhile_is_found_by_no_other():
    prompts, tokens = cache(), list(range(13))
    with patch.object(unified, "MAX_SALTS", 1):
        table = prompts.match(None, tokens, 1.0, salt="acme")
        assert leave(prompts, tokens, "globex") == 0
        assert prompts.grow(table, len(tokens), 1.0)
        prompts.publish(table, tokens, len(tokens), 1.0)
        prompts.release(table, 1.0)
        for salt in ("globex", "initech", "", "umbrella"):
            assert leave(prompts, tokens, salt) == 0
