# SPDX-License-Identifier: Apache-2.0
"""An adapter of rank 513: served on a CPU, refused when its file is read under a limit; neighbours go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora import LLM, SamplingParams

from .demo_server import DEMO, DemoServer, demo_server
from .instance_parts import until
from .neighbours import Neighbours, ask, stream

RANK = 513
UPPER = DEMO / "adapters" / "upper"
OPTIONS = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--instances", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Path:
    """The adapter "upper" with zeros up to rank 513 on attention: another file of the same deltas."""
    folder = tmp_path_factory.mktemp("large") / "padded"
    shutil.copytree(UPPER, folder)
    config = json.loads((UPPER / "adapter_config.json").read_text())
    modules = config["target_modules"]
    config |= {
        "rank_pattern": dict.fromkeys(modules, RANK),
        "alpha_pattern": dict.fromkeys(modules, config["lora_alpha"] * RANK / config["r"]),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(UPPER / "adapter_model.safetensors")
    more = RANK - config["r"]
    for name, tensor in tensors.items():
        if "self_attn" in name:
            zeros = (0, 0, 0, more) if "lora_A" in name else (0, more)
            tensors[name] = torch.nn.functional.pad(tensor, zeros).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(params=[(), ("--max-lora-rank", "512")], ids=["no limit", "limit"])
def limits(request) -> tuple[str, ...]:
    return request.param


@pytest.fixture
def pair(limits, tmp_path) -> Iterator[DemoServer]:
    with demo_server(tmp_path / "log", *OPTIONS, "--lora-server", "EP1-PP1", *limits) as server:
        yield server


def load(server: DemoServer, path: Path) -> httpx.Response:
    body = {"lora_name": "large", "lora_path": str(path)}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, trust_env=False)


@pytest.mark.slow
def test_no_request_of_a_neighbour_fails_beside_an_adapter_of_rank_513(pair, limits, padded):
    neighbours = Neighbours(pair)
    until(lambda: neighbours.num_answers() >= 2)
    loaded = load(pair, padded)
    if limits:
        assert loaded.status_code == 400
        assert "the LoRA rank 513 is above max_lora_rank=512" in loaded.json()["error"]["message"]
        assert ask(pair, "large").status_code == 404
    else:
        assert loaded.status_code == 200, loaded.text
        right = ask(pair, "upper").json()["choices"][0]["text"]
        for _ in range(4):
            assert stream(pair, "large") == (200, right)
    num_answers = neighbours.num_answers()
    until(lambda: neighbours.num_answers() >= num_answers + 5)
    neighbours.stop()
    log = pair.log.read_text()
    assert "the engine failed" not in log
    assert "Traceback" not in log


def test_an_adapter_of_rank_513_is_served_on_a_cpu(padded):
    adapters = {"large": str(padded), "upper": str(UPPER)}
    model = str(DEMO / "model")
    with LLM(model, adapters=adapters, dtype="float32", eager=True, num_threads=1) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        prompts = ["hello=", "abc="]
        large, small = (llm.generate(prompts, name, greedy) for name in ("large", "upper"))
    assert [one.token_ids for one in large] == [one.token_ids for one in small]
    assert large[0].text == "HELLO"
