# SPDX-License-Identifier: Apache-2.0
"""The calls of prime-rl's orchestrator (`prime_rl.utils.client`) and of its chat rollouts, in their order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.live_server import wait_until
from tests.serve.test_controls import Http

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_completion_tokens": 4, "logprobs": True}
SAMPLING |= {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0}


def test_a_policy_is_loaded_in_place_at_each_step_and_rollouts_have_what_training_needs(
    tmp_path: Path,
) -> None:
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        http = Http(server.url)

        def rollout(model: str) -> dict[str, Any]:
            messages = [{"role": "user", "content": "abc"}]
            body = {"model": model, "messages": messages, **SAMPLING}
            answer = http.ok("POST", "/v1/chat/completions", json=body)
            [choice] = answer["choices"]
            assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
            return dict(choice)

        http.ok("GET", "/health")
        assert "demo" in [one["id"] for one in http.ok("GET", "/v1/models")["data"]]
        assert "adapter_version" not in rollout("demo")
        for step in range(1, 5):
            path = (DEMO / "adapters" / ("upper", "reverse")[step % 2]).as_posix()
            http.ok("POST", "/load_lora_adapter", json={"lora_name": "policy", "lora_path": path})
            assert rollout("policy")["adapter_version"] == step
        missing = {"lora_name": "policy", "lora_path": str(tmp_path / "not yet there")}
        assert http("POST", "/load_lora_adapter", json=missing).status_code == 404, "it tries again"
        turn = {"model": "policy", "messages": [{"role": "user", "content": "another"}], **SAMPLING}
        first = http.ok("POST", "/v1/chat/completions", json=turn)
        again = {**turn, "messages": [{"role": "user", "content": "abc"}], "temperature": 0.0}
        tokens = {**again, "tokens": first["prompt_token_ids"] + first["choices"][0]["token_ids"]}
        second = http.ok("POST", "/v1/chat/completions/tokens", json=tokens)
        assert second["prompt_token_ids"] == tokens["tokens"], "the ids are the prompt, not the messages"
        assert second["choices"][0]["adapter_version"] == 4
        # Whole weights are not taken: the pause before them still ends.
        assert http("POST", "/init_broadcaster", json={}).status_code == 404
        http.ok("POST", "/pause?mode=keep&clear_cache=false")
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(rollout, "policy")
            wait_until(lambda: http.num_waiting() == 1, "the rollout waits")
            assert http("POST", "/update_weights", json={"weight_dir": None}).status_code == 404
            http.ok("POST", "/resume")
            assert waits.result(PATIENCE_S)["adapter_version"] == 4
        http.ok("POST", "/v1/unload_lora_adapter", json={"lora_name": "policy"})
