# SPDX-License-Identifier: Apache-2.0
"""Who belongs to the devices that put to each other, and settings that can't."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.config.optional_parts import EmulationConfig, StepProfile
from moe_lora.core.errors import ConfigError, LoraServerError
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.dist.lora_server.reach import DeviceMembers
from tests.dist.lora_server.cluster import Cluster
from tests.dist.lora_server.shapes import model_shape


def config_of(**settings: Any) -> EngineConfig:
    server = LoraServerConfig(
        address="/nowhere/leader", device_puts="ibgda", layout=settings.pop("layout", "EP1")
    )
    return EngineConfig(model_dir="none", lora_server=server, **settings)


def join(members: DeviceMembers, name: str) -> tuple[str, int, int, int]:
    return asyncio.run(members.join(None, name))  # type: ignore[arg-type]


def test_instances_are_numbered_as_they_come_and_each_comes_once():
    members = DeviceMembers(config_of(num_instances=2, max_num_seqs=48))
    found = [join(members, name) for name in ("", "instance-1", "", "instance-0")]
    assert [one[1:] for one in found] == [(-1, 2, 48), (0, 2, 48), (-1, 2, 48), (1, 2, 48)]
    assert len({one[0] for one in found}) == 1
    for late in ("instance-1", "instance-7"):
        with pytest.raises(LoraServerError, match=f"{late} comes too late"):
            join(members, late)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"expert_parallel": 2}, "an instance of 2 ranks"),
        ({"layout": "DP2"}, "needs a layout EPx-PPy"),
        ({"num_instances": 25}, "takes up to 24 instances"),
        ({"lora_kernel": "bgmv"}, "nor with lora_kernel='bgmv'"),
        ({"emulation": EmulationConfig(step_profile=StepProfile())}, "goes neither with a step_profile"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        config_of(**settings)


def test_both_sides_refuse_to_start_where_there_is_no_gpu():
    shape = model_shape(0)
    with Cluster(shape) as cluster, pytest.raises(ConfigError, match="set lora_server"):
        cluster.client(device_puts="ibgda")
    cluster = Cluster(shape, device_puts="ibgda")
    with pytest.raises(ConfigError, match="set lora_server"):
        cluster.start(0)


def test_a_client_without_puts_has_no_such_backend():
    with Cluster(model_shape(0)) as cluster:
        client: LoraServerClient = cluster.client()
        assert client.pushed is None
