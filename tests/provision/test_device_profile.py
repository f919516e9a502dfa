# SPDX-License-Identifier: Apache-2.0
"""Tables between and beyond their points, and what a profile file may hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError
from moe_lora.provision.device_profile import MeasuredProfile, Table, read_profile, shipped_profiles

SHIPPED = Path(__file__).parents[2] / "moe_lora" / "provision" / "profiles" / "hopper96.json"
CONTENT: dict[str, Any] = json.loads(SHIPPED.read_text())


def test_table_is_exact_at_its_points_and_linear_between_and_above() -> None:
    table = Table((1, 10, 20), (1.0, 4.0, 4.0))
    assert [table.seconds(batch) for batch in (1, 10, 20, 4, 40)] == pytest.approx([1, 4, 4, 2, 4])


def test_table_below_its_first_point_never_falls_below_the_line_through_zero() -> None:
    steep = Table((100, 200), (1.0, 3.0))  # the first line is negative below 50
    assert steep.seconds(10) == pytest.approx(0.1)
    flat = Table((100, 200), (1.0, 1.5))
    assert flat.seconds(0.5) == pytest.approx(0.5025)
    assert flat.seconds(0) == 0


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.floats(0.1, 1000), st.floats(0, 100))
def test_table_never_falls(steps: list[float], batch: float, more: float) -> None:
    times = [sum(steps[: i + 1]) for i in range(len(steps))]
    table = Table(tuple(float(8 * (i + 1)) for i in range(len(steps))), tuple(times))
    assert 0 < table.seconds(batch) <= table.seconds(batch + more) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("batches", "times", "message"),
    [
        ((1.0,), (1.0,), "two at least"),
        ((2.0, 1.0), (1.0, 2.0), "must increase"),
        ((1.0, 2.0), (2.0, 1.0), "must not fall"),
        ((1.0, 2.0), (0.0, 1.0), "positive"),
    ],
)
def test_bad_tables_are_refused(batches: tuple[float, ...], times: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Table(batches, times)


def test_the_papers_table_4_ships_and_says_where_its_numbers_come_from() -> None:
    assert "hopper96" in shipped_profiles()
    profile = read_profile("hopper96")
    assert isinstance(profile, MeasuredProfile)
    assert profile.tables["server_us.4.send"].seconds(256) == pytest.approx(396e-6)
    assert "table 4" in profile.sources["server_us, base_us"]


def changed(path: str, value: Any) -> dict[str, Any]:
    content = copy.deepcopy(CONTENT)
    *place, last = path.split(".")
    section = content
    for name in place:
        section = section[name]
    if value is None:
        del section[last]
    else:
        section[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", "guess", "kind='guess' is unknown; choose one of tables, roofline"),
        ("gpu.memory_gib", -1, "gpu.memory_gib=-1: .* greater than 0"),
        ("gpu.server_memory_share", 1.2, "gpu.server_memory_share=1.2: .* less than or equal to 1"),
        ("gpu.memory_gib", None, "gpu.memory_gib: Field required"),
        ("gpu.colour", "red", "gpu: colour is not .* allowed are memory_gib"),
        ("server_us.x", {}, r"server_us.x.\[key\]=x: .* valid integer"),
        ("server_us.4.send", [207, "396"], "server_us.4.send.1=396: .* valid number"),
        ("server_us.4.send", [207], "server_us.4.send: 1 times for 2 batches"),
        ("taken_at.num_experts", 0, "taken_at.num_experts=0: .* greater than or equal to 1"),
        ("batches", [256, 128], "must increase"),
        ("base_us.experts", [900, 763], "must not fall"),
    ],
)
def test_bad_profile_names_file_and_field(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ConfigError, match=rf"mine.json: .*{message}"):
        read_profile(file)


def test_unreadable_profile_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shipped are h200, hopper96"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_profile(tmp_path / "bad.json")
