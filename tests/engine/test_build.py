# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.config import EngineConfig
from moe_lora.core import host
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine import arena_size as sizing
from moe_lora.engine import build
from moe_lora.engine.build import build_engine
from tests.families import make_adapter

MODEL = Path(__file__).parents[2] / "demo" / "model"


def test_end_token_outside_the_vocabulary_is_left_out(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 50_000]}))
    core = build_engine(EngineConfig(model_dir=str(folder), eager=True, num_threads=1))
    assert core.info.eos_token_ids == (2,)
    sampling = SamplingParams(min_tokens=2, max_tokens=2)
    core.add_request(GenerateRequest(request_id="r", prompt_token_ids=(1, 40), sampling=sampling))
    assert core.step()[0].finish_reason is None


def test_the_generation_config_is_read_or_not(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    fields = {"eos_token_id": [2, 7], "temperature": 0.5, "top_k": 3}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    config = EngineConfig(model_dir=str(folder), eager=True, num_threads=1)
    info = build_engine(config).info
    assert (info.eos_token_ids, info.sampling_defaults) == ((2, 7), {"temperature": 0.5, "top_k": 3})
    info = build_engine(replace(config, generation_config="none")).info
    assert (info.eos_token_ids, info.sampling_defaults) == ((2,), {})


def test_an_adapter_that_has_grown_too_large_stops_no_restart(tmp_path, caplog):
    """Another instance may serve the former content."""
    adapters = [("upper", str(MODEL.parent / "adapters" / "upper"))]
    grown = make_adapter("mixtral", MODEL, tmp_path / "grown", lora_rank=512)
    config = EngineConfig(model_dir=str(MODEL), max_model_len=64, eager=True, num_threads=1, arena_mb=8.0)
    config = replace(config, adapters=(("grown", str(grown)), *adapters))
    with pytest.raises(ConfigError, match="arena_mb=8 is too small"):
        build_engine(config)
    core = build_engine(replace(config, leave_out_bad=True))
    assert [one.name for one in core.adapters.known()] == ["upper"]
    assert "adapter grown is left out: adapter 'grown' needs" in caplog.text
    core.close()


@pytest.mark.parametrize(
    ("stored", "dtype", "served", "is_said"),
    [
        ("float16", "auto", "bfloat16", True),
        ("float16", "float32", "float32", False),
        ("float16", "bfloat16", "bfloat16", False),
        ("bfloat16", "auto", "bfloat16", False),
        ("float32", "auto", "float32", False),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "thinker_config"])
def test_auto_serves_float16_in_bfloat16_and_the_log_says_so(
    key, stored, dtype, served, is_said, tmp_path, caplog
):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    value = {"dtype": stored} if key == "thinker_config" else stored
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    caplog.set_level(logging.INFO, logger="moe_lora")
    core = build_engine(EngineConfig(model_dir=str(folder), dtype=dtype, eager=True, num_threads=1))
    assert core.info.dtype.removeprefix("torch.") == served
    core.close()
    said = "the checkpoint is float16, and dtype auto serves it in bfloat16"
    assert caplog.text.count(said) == is_said


def test_help_says_that_auto_is_bfloat16_for_float16():
    words = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    assert "float32, bfloat16, or auto, the checkpoint's (bfloat16 for float16)." in words


def test_memory_that_files_occupy_counts_as_free(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(host, "MEMINFO", meminfo)
    assert sizing.free_bytes(torch.device("cpu")) == 5000 * 1024


def test_what_builds_an_engine_leaves_no_thread_that_openmp_would_keep_workers_for(monkeypatch):
    builders = []
    whole = build._Build

    def watched(*args):
        builders.append(threading.current_thread())
        return whole(*args)

    monkeypatch.setattr(build, "_Build", watched)
    build_engine(EngineConfig(model_dir=str(MODEL), eager=True, num_threads=1)).close()
    [builder] = builders
    assert builder is not threading.main_thread()
    assert not builder.is_alive()
