# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO against a real server: its HTTP calls, and a training run with expert LoRA."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.live_server import wait_until
from tests.serve.test_controls import Http

ROLLOUT = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1}
ROLLOUT |= {"return_token_ids": True, "logprobs": 0}


def test_every_call_of_its_client_has_the_awaited_answer(tmp_path: Path) -> None:
    """The calls of TRL 1.16 (`VLLMClient`, `_AsyncRolloutLoop`), in the order of a run with LoRA."""
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        http = Http(server.url)

        def rollout(version: int, seed: int) -> dict:
            body = {"model": f"trl-policy-v{version}", "prompt": [1, 40, 41], "seed": seed, **ROLLOUT}
            [choice] = http.ok("POST", "/v1/completions", json=body)["choices"]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
            return choice

        http.ok("GET", "/health")
        info = http.ok("GET", "/server_info?config_format=json")["vllm_config"]
        assert info["lora_config"]["max_loras"] >= 6
        assert info["lora_config"]["max_lora_rank"] >= 4
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert http.ok("GET", "/v1/models")["data"][0]["max_model_len"] == 256
        with ThreadPoolExecutor(1) as pool:
            for version in range(1, 8):
                http.ok("POST", "/pause?mode=keep")
                waits = pool.submit(rollout, version - 1, 2**63 - 1) if version > 1 else None
                if waits is not None:
                    wait_until(lambda: http.num_waiting() == 1, "the rollout waits")
                name = f"trl-policy-v{version}"
                path = str(DEMO / "adapters" / ("upper", "reverse")[version % 2])
                body = {"lora_name": name, "lora_path": path, "load_inplace": False}
                http.ok("POST", "/v1/load_lora_adapter", json=body)
                http.ok("POST", "/resume")
                if waits is not None:
                    assert waits.result(PATIENCE_S)["adapter_version"] == 1
                stale = {"lora_name": f"trl-policy-v{version - 5}"}
                gone = http("POST", "/v1/unload_lora_adapter", json=stale)
                assert gone.status_code == (200 if version > 5 else 404)
                rollout(version, version)
        assert len(http.ok("GET", "/v1/adapters")["data"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
def test_the_reward_of_expert_lora_rises(tmp_path: Path) -> None:
    model = tmp_path / "model"
    train = [sys.executable, "-m", "demo.train_policy"]
    subprocess.run([*train, "model", str(model)], check=True)
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32", model=model) as server:
        command = [*train, "train", str(model), "--url", server.url]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        cards = Http(server.url).ok("GET", "/v1/adapters")["data"]
    rewards = [float(one) for one in re.findall(r"^steps .* reward (\S+)$", done.stdout, re.M)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert [(card["id"], card["version"]) for card in cards] == [("trl-policy", 61)], json.dumps(cards)
