# SPDX-License-Identifier: Apache-2.0
"""A setting is stated once: what it may be, its option, its place in the file and its row in the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from bench.house import interface
from bench.pages.setting_tables import option_table, section_table, with_tables
from moe_lora import LLM
from moe_lora.cli.main import main
from moe_lora.cli.options import section_options, sections_of
from moe_lora.config import EngineConfig, FrontEndConfig, LimitsConfig, LoraServerConfig
from moe_lora.config.cluster import SECTIONS, ClusterConfig, cluster_of, cluster_text, read_cluster
from moe_lora.config.front_end import FrontEndPlace
from moe_lora.config.optional_parts import EmulationConfig, StageTime, StepProfile
from moe_lora.config.settings import meanings, read_section, setting, settings_of
from moe_lora.core.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {**SECTIONS, "front_ends.NAME": FrontEndPlace}


@dataclass(frozen=True, kw_only=True)
class OneMore(EngineConfig):
    """Settings of an engine, and a new one."""

    patience_s: float = setting(2.5, above=0, option="--patience-s")
    """How long it waits.  Longer is calmer."""


def _command(given: list[dict[str, Any]]) -> Any:
    @section_options(engine=OneMore)
    @click.command()
    def command(**options: Any) -> None:
        given.append(sections_of(options, {"engine": OneMore}, absolute=False))

    return command


def test_a_new_setting_is_an_option_a_key_of_the_file_and_a_row_of_the_docs() -> None:
    given: list[dict[str, Any]] = []
    command = _command(given)
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "--patience-s X" in shown
    assert "How long it waits.  [default: 2.5]" in shown
    assert CliRunner().invoke(command, ["--patience-s", "4"]).exit_code == 0
    assert CliRunner().invoke(command, []).exit_code == 0
    assert given == [{"engine": {"patience_s": 4.0}}, {}]
    assert read_section(OneMore, "engine", {"patience_s": 4}) == {"patience_s": 4.0}
    row = "| `patience_s` | number > 0 | `2.5` | `--patience-s` | How long it waits. Longer is calmer. |"
    assert row in section_table(OneMore)
    assert "| `--patience-s N` | `2.5` |" in option_table(OneMore)
    assert OneMore(model_dir="m", patience_s=1.0).patience_s == 1.0


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 2.0**40])
def test_its_range_holds_in_the_file_and_in_python(value: float) -> None:
    for make in (
        lambda: read_section(OneMore, "engine", {"patience_s": value}),
        lambda: OneMore(model_dir="m", patience_s=value),
    ):
        with pytest.raises(ConfigError, match=r"patience_s=\S+ (must be positive and finite|is too large)"):
            make()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("max_num_seqs", "4", "a whole number"),
        ("max_num_seqs", 4.0, "a whole number"),
        ("max_model_len", "256", "a whole number or null"),
        ("kv_cache_gb", "1", "a number or null"),
        ("eager", "yes", "true or false"),
        ("eager", 1, "true or false"),
        ("max_num_seqs", None, "a whole number"),
        ("eager", None, "true or false"),
        ("model_dir", None, "a text"),
        ("dtype", 1, "a text"),
        ("decode_buckets", 8, "a list of whole numbers or null"),
    ],
)
def test_python_s_value_of_another_type_is_refused_by_name(name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value!r} must be {kind}$"):
        EngineConfig(**{"model_dir": "m", name: value})


def test_numpy_s_numbers_are_numbers() -> None:
    config = EngineConfig(model_dir="m", max_num_seqs=np.int64(4), kv_cache_gb=np.float32(1))
    assert (config.max_num_seqs, config.kv_cache_gb) == (4, 1)
    assert (type(config.max_num_seqs), type(config.kv_cache_gb)) == (int, float)


def test_options_that_switch_and_lists_are_known_by_their_types() -> None:
    given: list[dict[str, Any]] = []
    words = ["--eager", "--adapter-root", ".", "--threads", "2"]
    result = CliRunner().invoke(_command(given), words)
    assert result.exit_code == 0, result.output
    assert given == [{"engine": {"adapter_root": ".", "eager": True, "num_threads": 2}}]


def test_fixed_settings_reach_other_processes_and_no_file_of_a_user(tmp_path: Path) -> None:
    profile = StepProfile(attention=StageTime(fixed_s=0.5), overlap=False)
    engine = EngineConfig(
        model_dir=str(tmp_path),
        emulation=EmulationConfig(load_gb_per_s=2.0, step_profile=profile),
        starvation_s=1.0,
        decode_buckets=(1, 2),
        contents_dir=str(tmp_path / "contents"),
    )
    server = LoraServerConfig(layer_wise=False, max_rows=7)
    front_end = FrontEndConfig(max_unread_steps=3)
    cluster = ClusterConfig(engine=engine, served_model_name="m", lora_server=server, front_end=front_end)
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_text(cluster))
    assert read_cluster(file) == cluster


@pytest.mark.parametrize(
    ("section", "name", "reason"),
    [
        ("engine", "emulation", "by code in Python"),
        ("engine", "starvation_s", "5 s serve all loads"),
        ("engine", "swap_out_above", "above 95 %"),
        ("engine", "performance_model", "give front_end.performance_model"),
        ("lora_server", "layer_wise", "layers always serve"),
        ("front_end", "max_json_depth", "32 levels"),
        ("provision", "interval_s", "every 30 s"),
    ],
)
def test_a_former_setting_is_refused_with_its_reason(
    tmp_path: Path, section: str, name: str, reason: str
) -> None:
    said = f"{section}.{name} is no setting any more: "
    with pytest.raises(ConfigError, match=rf"^{re.escape(said)}.*{reason}"):
        cluster_of({"model_dir": "m", section: {name: 1}}, tmp_path)
    result = CliRunner().invoke(main, ["serve", str(tmp_path), "--set", f"{section}.{name}=1"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_house_counts_no_parameter_of_a_policy() -> None:
    assert "front_end.migration" in interface.settings()
    assert not {"front_end.migration_queue_s", "dlora.credit"} & set(interface.settings())


def test_a_name_that_is_none_is_refused_with_the_nearest_everywhere() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_lora is not a setting; did you mean max_loras\?"):
        read_section(EngineConfig, "engine", {"max_lora": 1})
    with pytest.raises(ConfigError, match=r"max_lora is not a setting; did you mean max_loras\?"):
        LLM("m", max_lora=1)
    result = CliRunner().invoke(main, ["serve", "--max-lora", "1"])
    assert "--max-loras" in result.output
    result = CliRunner().invoke(main, ["serv"])
    assert "did you mean serve?" in result.output
    assert result.exit_code == 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_setting_says_what_it_means(kind: type) -> None:
    texts = meanings(kind)
    assert set(settings_of(kind)) == set(texts)
    assert all(text.endswith(".") for text in texts.values())


@pytest.mark.parametrize("page", ["reference/cluster_file.md", "guides/limits.md", "guides/lora_server.md"])
def test_tables_of_the_docs_are_those_of_the_classes(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "<!-- end -->" in text
    assert with_tables(text) == text, "run: python -m bench.pages.setting_tables docs/*/*.md"


def test_every_section_of_the_file_has_a_table() -> None:
    text = (DOCS / "reference/cluster_file.md").read_text(encoding="utf-8")
    for section in KINDS:
        assert f"<!-- settings: {section.removesuffix('.NAME')} -->" in text


def test_settings_start_without_torch_and_yaml() -> None:
    code = "import sys, moe_lora.config; assert not {'torch', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        (3, "fixed must be a mapping"),
        ({"engine": 3}, "fixed.engine must be a mapping"),
        ({"nosuch": {}}, "fixed.nosuch is not a setting"),
        ({"engine": {"nosuch": 1}}, "fixed.engine.nosuch is not a setting"),
        ({"engine": {"max_num_seqs": 1}}, "fixed.engine.max_num_seqs is not a setting"),
    ],
)
def test_fixed_settings_of_a_file_are_checked(tmp_path: Path, fixed: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        cluster_of({"model_dir": ".", "fixed": fixed}, tmp_path)


def test_a_body_that_no_client_may_send_is_refused_at_the_start() -> None:
    """The first 16 KiB of a body count for no client."""
    LimitsConfig(max_body_bytes=1 << 24, max_bodies_bytes_per_client=(1 << 24) - (1 << 14))
    for most in ("max_bodies_bytes_per_client", "max_bodies_bytes"):
        with pytest.raises(ConfigError, match=f"max_body_bytes=16777216 .*{most}=16760831"):
            LimitsConfig(max_body_bytes=1 << 24, **{most: (1 << 24) - (1 << 14) - 1})
