# SPDX-License-Identifier: Apache-2.0
"""The calls of verl's SGLang rollout (`AsyncHttpServerAdapter`) in a training step, with our files."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType
from safetensors.torch import load_file

from moe_lora.integrations.verl import SendsSafetensors
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.test_controls import Http

NAME = "verl_actor_lora_name"
SAMPLING = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


class Adapter:
    """verl's side: collects the trained weights, and posts what `wrap_lora_params` gives."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def wrap_lora_params(
        self, peft_config: dict[str, Any], weights: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        return {}, [pickle.dumps(dict(weights))]

    def update_weights(self, folder: Path) -> Any:
        given = json.loads((folder / "adapter_config.json").read_text())
        known = {key: value for key, value in given.items() if key in LoraConfig.__dataclass_fields__}
        config = LoraConfig(**{**known, "task_type": TaskType.CAUSAL_LM}).to_dict()
        weights = load_file(folder / "adapter_model.safetensors").items()
        models = self._http.ok("GET", "/v1/models")["data"]
        if any(one["id"] == NAME for one in models):
            self._http.ok("POST", "/unload_lora_adapter", json={"lora_name": NAME})
        sent, files = self.wrap_lora_params(
            config, ((key, value.to(torch.float32)) for key, value in weights)
        )
        copies = [base64.b64encode(one).decode() for one in files]
        body = {"lora_name": NAME, "config_dict": sent, "serialized_named_tensors": copies}
        return self._http("POST", "/load_lora_adapter_from_tensors", json=body)


class OurAdapter(SendsSafetensors, Adapter):
    pass


def test_a_step_releases_memory_resumes_it_and_serves_the_next_adapter(tmp_path: Path) -> None:
    options = ("--eager", "--dtype", "float32", "--lora-dir", str(DEMO / "adapters"))
    with demo_server(tmp_path / "log", *options) as server:
        http = Http(server.url)

        def rollout(model: str) -> list[int]:
            body = {"input_ids": [1, 40, 41, 42], "sampling_params": SAMPLING, "lora_path": model}
            found: list[int] = http.ok("POST", "/generate", json=body)["output_ids"]
            return found

        http.ok("GET", "/health_generate")
        http.ok("GET", "/flush_cache")
        expected = {name: rollout(name) for name in ("upper", "reverse")}
        for name in expected:
            http.ok("POST", "/release_memory_occupation", json={"tags": ["kv_cache", "weights"]})
            http.ok("POST", "/resume_memory_occupation", json={"tags": ["weights"]})
            assert OurAdapter(http).update_weights(DEMO / "adapters" / name).json()["success"]
            http.ok("POST", "/resume_memory_occupation", json={"tags": ["kv_cache"]})
            http.ok("GET", "/flush_cache")
            assert rollout(NAME) == expected[name]
        refused = Adapter(http).update_weights(DEMO / "adapters" / "upper")
        assert (refused.status_code, "pickle" in refused.text) == (400, True)
