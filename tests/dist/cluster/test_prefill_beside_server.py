# SPDX-License-Identifier: Apache-2.0
"""Prompts on instances with adapters of their own, answers beside a LoRA Server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora.api import InProcessClient
from moe_lora.config import FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.cluster.controller import capacity_controller
from moe_lora.engine.build import build_engine
from moe_lora.engine.moving import KvTransfer
from moe_lora.engine.sequence import Sequence
from moe_lora.families import shape_of
from tests.dist.lora_server.cluster import Cluster
from tests.engine.publishing import runs_of

from .test_migration import CONFIG, answer, ask, logprobs, tokens
from .test_prefill_first import DECODE, PREFILL, made, moved_answer, over_a_link
from .test_prompt_handoff import both_engines, published_meanwhile


def cluster_of(server: LoraServerConfig) -> ClusterConfig:
    return ClusterConfig(
        engine=replace(CONFIG, num_instances=2, async_scheduling="off"),
        served_model_name="demo",
        lora_server=server,
        front_end=FrontEndConfig(prefill_instances=("instance-0",)),
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[list[InProcessClient]]:
    with Cluster(shape_of(read_config(Path(CONFIG.model_dir))), "EP2-PP1") as server:
        cluster = cluster_of(server.config)
        named = {PREFILL: cluster.instance("instance-0"), DECODE: cluster.instance("instance-1")}
        clients = [InProcessClient(build_engine(replace(one, instance=name))) for name, one in named.items()]
        for client in clients:
            client._send = over_a_link(client)
        yield clients
        for client in clients:
            client.shut_down()


def test_tokens_are_those_of_one_instance_and_the_lease_comes_before_the_kv(engines, monkeypatch):
    leases = []
    expect = KvTransfer.expect

    def expecting(transfer: KvTransfer, sequence: Sequence) -> None:
        leases.append(sequence.adapter.lease)
        expect(transfer, sequence)

    monkeypatch.setattr(KvTransfer, "expect", expecting)

    async def both() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone"))
        before = [(await one.stats()).lora_server_requests for one in engines]
        fleet = made(engines)
        moved = await moved_answer(fleet, "moved")
        after = [(await one.stats()).lora_server_requests for one in engines]
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        assert before[0] == after[0] == 0, "the prompt's instance asks no server"
        assert after[1] > before[1]

    asyncio.run(both())
    assert leases
    assert None not in leases


@pytest.mark.parametrize("on_publish", ["keep", "switch"])
def test_publication_during_early_kv_mixes_no_versions(on_publish):
    with (
        Cluster(shape_of(read_config(Path(CONFIG.model_dir)))) as server,
        both_engines(lora_server=server.config) as engines,
    ):
        publishing = published_meanwhile(engines, "both", on_publish)
        fleet, outputs, (first, second) = asyncio.run(publishing)
    if on_publish == "keep":
        assert runs_of(outputs) == [(1, tuple(first))]
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
    else:
        assert runs_of(outputs) == [(2, tuple(second))]


def test_only_instances_for_answers_the_server_and_the_controller_have_the_server(monkeypatch):
    cluster = cluster_of(LoraServerConfig(address="/server", store_dir="/store"))
    assert cluster.instance("instance-0").lora_server is None
    assert cluster.instance("instance-1").lora_server == cluster.lora_server
    assert cluster.lora_server_rank(0).lora_server == cluster.lora_server
    addresses = []
    monkeypatch.setattr(
        capacity_controller, "LoraServerAdmin", lambda address, keys: addresses.append(address)
    )
    capacity_controller.make_capacity_controller(cluster, None)
    assert addresses == ["/server"]
