# SPDX-License-Identifier: Apache-2.0
"""Demand as it is metered when requests come, and as it is forecast for the next time step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config import RoutingConfig
from moe_lora.policies.routing.demand import DemandForecast, DemandMeter

RATES = st.lists(st.floats(0, 1e6), min_size=1, max_size=12)


@dataclass(frozen=True)
class Asked:
    adapter: str | None
    prompt_tokens: int = 10


def test_a_request_counts_when_it_comes_as_its_prompt_and_the_expected_answer():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.start(1, Asked("a"))
    meter.start(2, Asked("b"), max_tokens=20)
    meter.start(3, Asked(None))
    assert meter.read() == {"a": 60, "b": 30}
    assert meter.read() == {}


def test_an_answer_of_unloaded_content_is_no_length_of_the_next_content():
    meter = DemandMeter(mean_output_tokens=100.0)
    meter.start(1, Asked("a"))
    meter.forget("a")
    meter.stop(1, 5000)
    other = DemandMeter(mean_output_tokens=100.0)
    other.start(1, Asked("a"))
    other.stop(1, 5000)
    other.forget("a")
    for one in (meter, other):
        one.read()
        one.start(2, Asked("a"))
    assert meter.read() == other.read()


def test_an_answer_corrects_the_count_in_the_step_in_which_it_ends():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.start(1, Asked("a"))
    meter.stop(1, 7)
    assert meter.read() == {"a": 17}
    meter.start(2, Asked("a"))
    counted = meter.read()["a"]
    meter.stop(2, 7)
    meter.start(3, Asked("b"), max_tokens=5)
    meter.stop(3, 5)
    assert counted + meter.read()["a"] == 17


def test_a_request_without_a_token_stays_as_counted():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.start(1, Asked("a"))
    meter.stop(1, 0)
    meter.stop("never started", 9)
    assert meter.read() == {"a": 60}
    meter.start(2, Asked("a"))
    assert meter.read() == {"a": 60}, "nothing was learnt from it"


def test_a_request_that_the_service_refuses_is_no_demand():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.start(0, Asked("a"))
    for number in range(1, 100):
        meter.start(number, Asked("a"))
        meter.cancel(number)
        meter.stop(number, 0)
    meter.cancel("never started")
    assert meter.read() == {"a": 60}


def test_the_answers_of_an_unloaded_adapter_are_forgotten():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.start(1, Asked("a"))
    meter.stop(1, 5000)
    expected = []
    for number in (2, 3):
        meter.read()
        meter.start(number, Asked("a"))
        expected.append(meter.read()["a"])
        meter.forget("a")
    meter.start(4, Asked("new"))
    assert expected[0] > expected[1] == meter.read()["new"]


def test_answers_are_expected_by_the_adapters_mean_and_before_it_by_the_mean_of_all():
    meter = DemandMeter(mean_output_tokens=100.0)
    for number in range(800):
        meter.start(number, Asked("long"))
        meter.stop(number, 400)
    meter.read()
    meter.start("new", Asked("new", prompt_tokens=0))
    meter.start("long", Asked("long", prompt_tokens=0))
    found = meter.read()
    assert 390 < found["new"] < 400
    assert found["new"] <= found["long"] <= 400
    for number in range(800):
        meter.start(number, Asked("short"))
        meter.stop(number, 20)
    meter.read()
    meter.start("short", Asked("short", prompt_tokens=0))
    meter.start("long", Asked("long", prompt_tokens=0))
    found = meter.read()
    assert found["short"] < 25
    assert found["long"] > 390


def test_what_other_meters_read_is_added():
    meter = DemandMeter(mean_output_tokens=50.0)
    meter.add({"a": 5, "b": 7})
    meter.add({"a": -2})
    assert meter.read() == {"a": 3, "b": 7}


def test_the_defaults_are_those_of_the_settings():
    config = RoutingConfig()
    rates = [5.0, 9.0, 2.0, 40.0, 8.0, 1.0, 7.0, 3.0, 6.0]
    stated = {
        "num_steps": config.demand_steps,
        "smoothing": config.demand_smoothing,
        "trend_gain": config.demand_trend,
    }
    assert forecast(rates).read() == forecast(rates, **stated).read()


def forecast(rates: list[float], **settings: float) -> DemandForecast:
    found = DemandForecast(**settings)
    for rate in rates:
        found.observe({"a": rate * 2.0}, 2.0)
    return found


def test_a_damped_trend_by_hand():
    found = forecast([10.0, 20.0, 40.0], num_steps=3, smoothing=0.5, trend_gain=0.5)
    # levels 10; 10 + 10 / 2 = 15, trend 2.5; predicted 15 + 0.8 * 2.5 = 17, level 17 + 23 / 2 = 28.5,
    # trend 0.8 * 2.5 + 11.5 / 2 = 7.75; next 28.5 + 0.8 * 7.75
    assert found.read() == pytest.approx({"a": 34.7})


def test_a_growing_demand_is_forecast_to_grow_and_a_falling_one_to_fall():
    rates = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
    for one, sign in ((rates, 1), (rates[::-1], -1)):
        flat, trend = (forecast(one, smoothing=0.5, trend_gain=gain).read()["a"] for gain in (0.0, 0.5))
        assert sign * (trend - flat) > 0


@given(st.floats(0, 1e9), st.integers(1, 12))
def test_a_demand_that_does_not_change_is_forecast_exactly(rate, num):
    assert forecast([rate] * num).read() == {"a": rate * 2.0 / 2.0}


@given(RATES, st.integers(1, 8), st.floats(0.01, 1), st.floats(0, 1))
def test_a_forecast_is_not_negative_and_at_most_twice_what_was_seen(rates, num_steps, smoothing, trend_gain):
    found = forecast(rates, num_steps=num_steps, smoothing=smoothing, trend_gain=trend_gain).read()["a"]
    assert 0 <= found <= 2 * max(rates[-num_steps:])


@given(RATES)
def test_two_settings_are_the_last_step_and_the_mean(rates):
    last = forecast(rates, smoothing=1.0, trend_gain=0.0).read()["a"]
    assert forecast(rates, num_steps=1).read()["a"] == rates[-1] == pytest.approx(last, abs=1e-6)
    mean = forecast(rates, num_steps=4, smoothing=0.25, trend_gain=0.0).read()["a"]
    assert mean == pytest.approx(sum(rates[-4:]) / len(rates[-4:]), abs=1e-6)


def test_adapters_come_and_are_forgotten():
    found = DemandForecast(2, 1.0, 0.0)
    assert found.read() == {}
    found.observe({"a": 4.0}, 1.0)
    found.observe({"b": 4.0}, 1.0)
    assert found.read() == {"a": 0.0, "b": 4.0}
    found.observe({"b": 4.0}, 1.0)
    assert set(found.read()) == {"b"}


def test_more_correction_than_demand_counts_as_none():
    found = DemandForecast()
    found.observe({"a": -4.0}, 1.0)
    assert found.read() == {"a": 0.0}


def test_a_step_needs_a_length():
    with pytest.raises(ValueError, match="length_s=0 must be positive"):
        DemandForecast().observe({}, 0)
