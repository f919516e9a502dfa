"""Prompts on host workers: how a step's tokens are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.policies.host_start import fair_shares


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([100, 4], 12, [8, 4]),
        ([100, 100], 12, [6, 6]),
        ([100, 100, 2], 12, [5, 5, 2]),
        ([5, 5, 5], 8, [3, 3, 2]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([3, 4], 12, [3, 4]),
        ([], 12, []),
    ],
)
def test_long_prompts_leave_shorter_ones_their_share(wanted, total, shares):
    assert fair_shares(wanted, total) == shares


@given(wanted=st.lists(st.integers(0, 1000), max_size=8), total=st.integers(0, 2000))
def test_shares_are_max_min_fair(wanted, total):
    shares = fair_shares(wanted, total)
    assert sum(shares) == min(total, sum(wanted)), "all that is wanted and there"
    for share, want in zip(shares, wanted, strict=True):
        assert 0 <= share <= want
        assert share == want or share >= max(shares) - 1
