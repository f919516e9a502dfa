# SPDX-License-Identifier: Apache-2.0
"""`moe-lora quantize` on the demo model, and an engine over what it writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from click.testing import CliRunner
from safetensors import safe_open

from moe_lora import LLM, SamplingParams
from moe_lora.cli.main import main
from moe_lora.core.wrong_files import INDEX_NAME, SINGLE_NAME
from moe_lora.models import quantised_checkpoint

DEMO = Path(__file__).parents[2] / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_written_model_answers_as_the_same_model_quantised_at_load(tmp_path):
    out = tmp_path / "int4"
    words = ["quantize", str(DEMO / "model"), str(out), "--format", "int4", "--group-size", "32"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert f"{out}: " in result.stdout
    adapters = {name: str(DEMO / "adapters" / name) for name in ("upper", "reverse")}
    prompts, names = ["upper: moon", "reverse: moon", "moon"], ["upper", "reverse", None]
    asked = {"adapters": adapters, "num_threads": 1, "eager": True}
    with LLM(out, **asked) as llm:
        found = [one.token_ids for one in llm.generate(prompts, names, GREEDY)]
        assert llm.stats().lora_rows_local > 0
    with LLM(DEMO / "model", quantize="int4", quantize_group_size=32, **asked) as llm:
        assert [one.token_ids for one in llm.generate(prompts, names, GREEDY)] == found
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1
    assert "is there already" in again.stderr


def test_group_size_without_meaning_is_refused(tmp_path):
    words = ["quantize", str(DEMO / "model"), str(tmp_path / "out"), "--group-size", "64"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "quantize_group_size=64 is for int4 and fp8" in result.stderr
    assert not list(tmp_path.iterdir())


def test_sigterm_ends_it_as_ctrl_c_does_and_leaves_nothing(tmp_path, monkeypatch):
    written = []

    def terminated(*given, **more):
        written.append([path.name for path in tmp_path.iterdir()])
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a failure is not the end of all tests
    monkeypatch.setattr(quantised_checkpoint, "save_file", terminated)
    try:
        result = CliRunner().invoke(main, ["quantize", str(DEMO / "model"), str(tmp_path / "out")])
    finally:
        after = signal.signal(signal.SIGTERM, before)
    assert (result.exit_code, result.stderr.strip()[-8:]) == (1, "Aborted!")
    assert written == [[".out.partial"]]
    assert not list(tmp_path.iterdir())
    assert after == signal.SIG_IGN


def test_sizes_are_of_the_files_that_the_index_names(tmp_path):
    model_dir = shutil.copytree(DEMO / "model", tmp_path / "model")
    (model_dir / "parts").mkdir()
    (model_dir / SINGLE_NAME).rename(model_dir / "parts" / SINGLE_NAME)
    with safe_open(model_dir / "parts" / SINGLE_NAME, "pt") as file:
        places = dict.fromkeys(file.keys(), f"parts/{SINGLE_NAME}")
    (model_dir / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    result = CliRunner().invoke(main, ["quantize", str(model_dir), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (written,) = (tmp_path / "out").glob("*.safetensors")
    share = written.stat().st_size / (model_dir / "parts" / SINGLE_NAME).stat().st_size
    assert f" GB of weights, {share:.0%} of {model_dir}" in result.stdout
