"""What the demand of the next time step is expected to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.dist.cluster.controller.placement_controller import DemandHistory

RATES = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)


def history(rates, num_steps=4) -> DemandHistory:
    found = DemandHistory(num_steps)
    for rate in rates:
        found.observe({"a": rate * 2.0}, 2.0)
    return found


def test_a_trend_goes_on():
    assert history([10.0, 20.0, 30.0, 40.0]).forecast() == pytest.approx({"a": 50.0})
    assert history([999.0, 40.0, 30.0, 20.0, 10.0]).forecast() == pytest.approx({"a": 0.0})


@given(st.floats(0, 1e9), st.integers(1, 6))
def test_a_demand_that_does_not_change_is_forecast_exactly(rate, num):
    assert history([rate] * num).forecast() == {"a": rate * 2.0 / 2.0}


@given(RATES)
def test_a_forecast_is_not_negative_and_at_most_twice_what_was_seen(rates):
    assert 0 <= history(rates).forecast()["a"] <= 2 * max(rates[-4:])


@given(RATES)
def test_with_one_step_the_last_demand_is_the_forecast(rates):
    assert history(rates, num_steps=1).forecast() == {"a": rates[-1]}


def test_adapters_come_and_are_forgotten():
    found = DemandHistory(2)
    assert found.forecast() == {}
    found.observe({"a": 4.0}, 1.0)
    found.observe({"b": 4.0}, 1.0)
    assert found.forecast() == {"a": 0.0, "b": pytest.approx(8.0)}
    found.observe({"b": 4.0}, 1.0)
    assert set(found.forecast()) == {"b"}


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="num_steps=0 must be 1 or more"):
        DemandHistory(0)
    with pytest.raises(ValueError, match="length_s=0 must be positive"):
        DemandHistory().observe({}, 0)
