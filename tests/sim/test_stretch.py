# SPDX-License-Identifier: Apache-2.0
"""Equal steps as one event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.provision.replayed.instance import Stretch


def test_a_stretch_ends_after_its_first_step_and_the_equal_ones():
    assert Stretch(10.0, 3.0, 2.0, 4).end_s == 19.0
    assert Stretch(10.0).end_s == 10.0


@pytest.mark.parametrize(
    ("now_s", "done"), [(10.0, 0), (12.9, 0), (13.0, 1), (14.9, 1), (15.0, 2), (19.0, 4), (99.0, 4)]
)
def test_steps_that_have_ended_are_counted(now_s, done):
    assert Stretch(10.0, 3.0, 2.0, 4).steps_done(now_s) == done


@pytest.mark.parametrize(
    ("now_s", "end_s"), [(10.0, 13.0), (12.0, 13.0), (13.0, 13.0), (13.5, 15.0), (16.9, 17.0)]
)
def test_cut_ends_with_the_step_under_way(now_s, end_s):
    stretch = Stretch(10.0, 3.0, 2.0, 4)
    assert stretch.cut(now_s)
    assert stretch.end_s == end_s


def test_the_last_step_is_not_cut():
    stretch = Stretch(10.0, 3.0, 2.0, 4)
    assert not stretch.cut(17.5)
    assert not Stretch(10.0, 3.0, 2.0, 1).cut(11.0)
    assert stretch.end_s == 19.0


@given(st.floats(0, 100), st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(2, 1000), st.floats(0, 1))
def test_a_cut_never_ends_in_the_past(start_s, first_s, step_s, num_steps, share):
    stretch = Stretch(start_s, first_s, step_s, num_steps)
    now_s = min(stretch.end_s, start_s + share * (stretch.end_s - start_s))
    stretch.cut(now_s)
    assert stretch.end_s >= now_s
