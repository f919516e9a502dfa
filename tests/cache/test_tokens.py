# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_lora.cache.pages import TOKEN_BYTES, encode, encode_more


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2000), st.data())
def test_prompt_is_encoded_as_far_as_asked_and_never_further_than_it_may_be_matched(tokens, data):
    most = data.draw(st.integers(0, len(tokens)))
    encoded = b""
    for num_tokens in data.draw(st.lists(st.integers(0, 2 * most), max_size=4)):
        encoded = encode_more(encoded, tokens, most, num_tokens * TOKEN_BYTES)
        assert len(encoded) >= min(num_tokens, most) * TOKEN_BYTES
        assert encoded == encode(tokens[:most])[: len(encoded)]
