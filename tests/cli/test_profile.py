# SPDX-License-Identifier: Apache-2.0
"""`moe-lora profile` on the demo model, and planning with what it writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.cli.profile import _micros
from moe_lora.config import EngineConfig
from moe_lora.provision.device_profile import MeasuredProfile, read_profile
from moe_lora.provision.plan import verify
from tests.provision.plan.conftest import shares_computed_once  # noqa: F401  (the fixture)

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "demo" / "model")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "mine.json"
    arguments = ["--max-batch", "6", "--num-adapters", "4", "--lora-rank", "8", "--context-tokens", "120"]
    result = CliRunner().invoke(main, ["profile", MODEL, "--out", str(path), "--threads", "1", *arguments])
    assert result.exit_code == 0, result.output
    return path


def test_written_profile_is_one_of_this_model(profile: Path) -> None:
    read = read_profile(profile)
    assert isinstance(read, MeasuredProfile)
    assert read.tables["base_us.experts"].batches == (1, 2, 4, 6)
    assert set(read.server_us) == {1, 2, 4, 8}
    assert "base_us.attention" in read.tables
    assert (read.taken_at.lora_rank, read.taken_at.context_tokens) == (8, 120)
    assert read.taken_at.num_heads is not None
    assert read.gpu.bytes_per_s is None


def test_profile_of_a_quantised_checkpoint_names_its_format(tmp_path: Path) -> None:
    model, out = tmp_path / "int8", tmp_path / "profile.json"
    sizes = ["--max-batch", "2", "--num-adapters", "2", "--lora-rank", "4", "--context-tokens", "8"]
    for words in (["quantize", MODEL, str(model)], ["profile", str(model), "--out", str(out), *sizes]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    read = read_profile(out)
    assert isinstance(read, MeasuredProfile)
    assert read.taken_at.weights == EngineConfig(model_dir=str(model)).weights_name() != "none"


def test_a_file_that_cant_be_written_is_refused_before_an_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    monkeypatch.setattr("moe_lora.profiling.layer_times.LayerClock", lambda *_, **__: built.append(1))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["profile", MODEL, "--out", str(tmp_path / "file" / "x.json")])
    assert result.exit_code == 1
    assert "there is no folder" in result.output
    assert not built


def test_a_faster_larger_batch_lowers_the_smaller_ones() -> None:
    assert _micros([3e-6, 1e-6, 2e-6]) == [1, 1, 2]


def test_written_times_never_fall_with_the_batch(profile: Path) -> None:
    content = json.loads(profile.read_text())
    for stages in content["server_us"].values():
        for times in stages.values():
            assert all(low <= high for low, high in pairwise(times))


def test_plan_with_this_machines_profile(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "NUM_REQUESTS", 500)
    rows = [{"arrival_s": n / 4, "prompt_tokens": 100, "output_tokens": 50} for n in range(100)]
    trace = str(tmp_path / "trace.jsonl")
    Path(trace).write_text("\n".join(map(json.dumps, rows)))
    words = ["--trace", trace, "--model", MODEL, "--adapters", "36", "--lora-rank", "8", "--json"]
    # An SLO that leaves the machine that runs this test a hundred times what it measures.
    result = CliRunner().invoke(
        main, ["provision", *words, "--hardware", str(profile), "--slo-tpot-s", "5", "--slo-ttft-s", "20"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["inputs"]["hardware"] == "model on cpu"
    other = CliRunner().invoke(
        main,
        ["provision", "--trace", trace, "--model", "DBRX", "--adapters", "9", "--hardware", str(profile)],
    )
    assert other.exit_code == 2
    assert "take one of this model with `moe-lora profile`" in other.output
