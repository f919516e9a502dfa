# SPDX-License-Identifier: Apache-2.0
"""A cluster over four hosts that only TCP joins: network namespaces, one of which is cut off for a while."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .cluster_jobs import Cluster, Job, local_answers, make_requests
from .namespaces import Network, Unavailable

pytestmark = pytest.mark.slow
ROLES = ("front-end", "lora-server", "instance-1", "instance-2")
NUM_REQUESTS = 240
CUT_S = 6.0
"""Longer than peers may be silent (3 s) before they count as gone."""


@pytest.fixture
def network(tmp_path) -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(ROLES, tmp_path))
        except Unavailable as error:
            pytest.skip(f"this machine can't make network namespaces: {error}")
        yield network


@pytest.fixture(
    params=[
        "gloo",
        pytest.param(
            "nixl",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
            ),
        ),
    ]
)
def cluster(network, request, monkeypatch) -> Iterator[Cluster]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # UCX would find that these hosts share a memory
    hosts = network.hosts
    cluster = Cluster(hosts, transport=request.param)
    try:
        yield cluster
    finally:
        cluster.stop()


def start(cluster: Cluster) -> dict[str, Job]:
    jobs = {"front-end": cluster.front_end(), "lora-server": cluster.lora_server()}
    jobs |= {name: cluster.instance(name) for name in ("instance-1", "instance-2")}
    for name in ("instance-1", "instance-2"):
        jobs["front-end"].wait_for(f"instance {name} dialled in")
    return jobs


def test_tokens_hold_while_server_and_instance_are_cut_off_from_each_other(cluster, network):
    requests = make_requests(NUM_REQUESTS)
    expected = local_answers(requests)
    jobs = start(cluster)
    assert cluster.answers(requests[:24]) == expected[:24]

    drive = cluster.drive(requests, pause_s=0.2)
    time.sleep(2.0)
    network.cut("lora-server", "instance-1")
    time.sleep(CUT_S)
    network.cut("lora-server", "instance-1", apart=False)
    assert drive.answers() == expected
    assert jobs["instance-1"].count("lost the LoRA Server") >= 1
    assert jobs["instance-2"].count("lost the LoRA Server") == 0

    jobs["lora-server"].wait_for("instance instance-1 joined", 2)
    jobs["instance-2"].stop()
    before = network.num_bytes_to("lora-server")
    assert cluster.answers(requests[:24]) == expected[:24]
    assert network.num_bytes_to("lora-server") - before > 24 * 10_000  # rows, not beats alone
