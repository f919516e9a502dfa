# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server's rank computes with the kernel that the cluster's settings name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch import server_role
from moe_lora.dist.launch.server_role import build_rank, checked_partition
from moe_lora.dist.lora_server import data_loop as serving
from moe_lora.families import shape_of

MODEL = Path(__file__).parents[3] / "demo" / "model"


def test_lora_kernel_reaches_the_data_loop(tmp_path, monkeypatch):
    server = LoraServerConfig(address=f"{tmp_path}/leader", store_dir=f"{tmp_path}/store")
    config = EngineConfig(model_dir=str(MODEL), device="cpu", lora_kernel="bgmv", lora_server=server)
    used = []
    monkeypatch.setattr(serving, "request_deltas", lambda *operands, kernel: used.append(kernel))
    rank = build_rank(config, 0)
    try:
        nothing = np.empty(0, np.int64)
        request = SimpleNamespace(slot=nothing, generation=nothing, layer=0)
        layout = SimpleNamespace(shape=None)
        session = SimpleNamespace(deltas=lambda request: None, layout=layout)
        assert rank.loop._compute(session, request) == serving.DONE
    finally:
        rank.stop()
        rank.run()
    assert used == ["bgmv"]


@pytest.mark.parametrize(
    ("settings", "host", "problem"),
    [
        ({}, {"host_workers": 1000}, r"lora_server.host_workers=1000.* choose at most"),
        ({"expert_parallel": 2}, {"sites": "all"}, "sites='experts'"),
    ],
)
def test_host_workers_that_cannot_be_are_refused(settings, host, problem):
    """Of an instance's ranks none may have attention from the host while another has it from the device."""
    server = LoraServerConfig(**{"host_workers": 1, **host})
    config = EngineConfig(
        model_dir=str(MODEL), device="cuda", dtype="float32", lora_server=server, **settings
    )
    shape = shape_of(json.loads((MODEL / "config.json").read_text()))
    with pytest.raises(ConfigError, match=problem):
        server_role._host_workers_of_server(config, checked_partition(config, shape, server))
