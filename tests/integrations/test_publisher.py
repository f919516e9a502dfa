# SPDX-License-Identifier: Apache-2.0
"""Versions published by a trainer on the server's host, through shared memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moe_lora.core.errors import AdapterError
from moe_lora.integrations.publisher import Publisher
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.live_server import wait_until
from tests.serve.test_controls import Http


def test_versions_in_shared_memory_outlive_their_folder_and_an_instance(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        http = Http(server.url)
        publisher = Publisher(server.url, "policy", shared=shared)
        texts = []
        for version, name in enumerate(("upper", "reverse", "upper"), 1):
            tensors = load_file(DEMO / "adapters" / name / "adapter_model.safetensors")
            config = json.loads((DEMO / "adapters" / name / "adapter_config.json").read_text())
            assert publisher.publish(tensors, config) == version
            assert not list(shared.iterdir())
            answer = http.complete("policy")
            assert answer["adapter_version"] == version
            texts.append(answer["text"])
        assert texts[0] == texts[2] != texts[1]
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.engine_pids() not in ([], [pid]), "the next process has started")
        wait_until(lambda: http("GET", "/health").status_code == 200, "the next process serves")
        assert http.complete("policy")["text"] == texts[2]
        with pytest.raises(AdapterError, match="NaN or infinite"):
            publisher.publish({key: tensor / 0 for key, tensor in tensors.items()}, config)
        assert not list(shared.iterdir())
        assert http.complete("policy")["text"] == texts[2]
        publisher.close()
