# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.cli.settings import KINDS
from moe_lora.config.settings import settings_of


def run(*words):
    result = CliRunner().invoke(main, ["settings", *words])
    return result.exit_code, result.output


def test_all_settings_are_listed():
    code, text = run()
    assert code == 0
    for section, kind in KINDS.items():
        assert f"\n{section}:\n" in f"\n{text}"
        for name, one in settings_of(kind).items():
            assert not one.rule.in_file or f"{section}.{name}" in text
    assert "engine.starvation_s" not in text


def test_a_section_shows_values_defaults_options_and_the_whole_meaning():
    code, text = run("engine")
    assert code == 0
    words = " ".join(text.split())
    assert "engine.max_loras Adapters on the device. A LoRA Server has its own capacity. " in words
    assert "[whole number ≥ 1; default: 64; also --max-loras]" in words
    assert "front_end" not in text.replace("front_end.performance_model", "")


def test_one_setting_is_shown_alone():
    code, text = run("pool.replicas")
    assert code == 0
    assert text.startswith("pool:\n  pool.replicas ")
    assert "pool.transport" not in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("engin", "did you mean engine?"),
        ("pool.replica", "did you mean replicas?"),
        ("", "allowed are engine"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, reason):
    code, text = run(name)
    assert code == 2
    assert reason in text
