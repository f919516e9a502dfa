# SPDX-License-Identifier: Apache-2.0
"""GET /v1/instances shows the map of devices, and roles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lora.config.devices import LORA_SERVER
from moe_lora.core.request import FleetStats, InstanceStats
from moe_lora.serve.server import create_app

from .conftest import frontend_of


def instance(index: int, *devices: str) -> InstanceStats:
    counts = ("num_running", "num_waiting", "kv_usage", "outstanding_tokens", "num_restarts", "num_resent")
    name = f"instance-{index}"
    return InstanceStats(index=index, name=name, live=True, devices=devices, **dict.fromkeys(counts, 0))


def test_each_instance_and_the_lora_server_show_their_devices(
    server, engine, tokenizer, shared_thread, monkeypatch
):
    async def stats() -> FleetStats:
        return FleetStats(instances=(instance(0, "cuda:0", "cuda:1"), instance(1, "cuda:2", "cuda:3")))

    monkeypatch.setattr(engine, "stats", stats)
    listed = server.get("/v1/instances").json()
    assert [one["devices"] for one in listed["data"]] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert LORA_SERVER not in listed
    frontend = frontend_of(engine, tokenizer, has_server=True)
    frontend.cluster = replace(frontend.cluster, devices={LORA_SERVER: (4, 5)})
    shared_thread[0].app = create_app(frontend)
    assert server.get("/v1/instances").json()[LORA_SERVER] == {"devices": ["cuda:4", "cuda:5"]}


@pytest.mark.parametrize(("prefill", "roles"), [((), ["both"] * 2), (("instance-1",), ["decode", "prefill"])])
def test_each_instance_shows_its_role(server, engine, tokenizer, shared_thread, monkeypatch, prefill, roles):
    async def stats() -> FleetStats:
        return FleetStats(instances=(instance(0), instance(1)))

    monkeypatch.setattr(engine, "stats", stats)
    frontend = frontend_of(engine, tokenizer)
    front_end = replace(frontend.cluster.front_end, prefill_instances=prefill)
    engine_config = replace(frontend.cluster.engine, num_instances=2)
    frontend.cluster = replace(frontend.cluster, engine=engine_config, front_end=front_end)
    shared_thread[0].app = create_app(frontend)
    assert [one["role"] for one in server.get("/v1/instances").json()["data"]] == roles
