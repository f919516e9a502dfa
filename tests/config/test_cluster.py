# SPDX-License-Identifier: Apache-2.0
"""A cluster of torchrun jobs on one host, joined over TCP: each can go and come back without the others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.dist.cluster_jobs import Cluster, Host, alive, local_answers, make_requests, until
from tests.patience import PATIENCE_S

REQUESTS = make_requests(6)
NOBODY = "no LLM instance is running: none has dialled in"


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return local_answers(REQUESTS)


class Running:
    """The cluster of this file: two ranks of a LoRA Server, one instance, a front end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.front_end = cluster.front_end()
        self.lora_server = cluster.lora_server()
        self.instance = cluster.instance("instance-1")


@pytest.fixture(scope="module")
def running(tmp_path_factory, expected) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cluster")
    roles = ("front-end", "lora-server", "instance-1", "instance-2")
    cluster = Cluster({role: Host(role, "127.0.0.1", folder / role) for role in roles}, transport="gloo")
    try:
        yield Running(cluster)
    finally:
        cluster.stop()


def metrics(cluster: Cluster) -> str:
    return httpx.get(f"{cluster.url}/metrics", trust_env=False).text


def test_until_an_instance_dials_in_requests_are_told_so(running):
    running.front_end.wait_for("Serving demo at")
    [(status, message)] = running.cluster.drive(REQUESTS[:1]).done()
    assert status == 503
    assert message == f"{NOBODY}, or all have left; send the request again in a while"
    running.front_end.wait_for("LLM instances are awaited at 127.0.0.1:")


def test_tokens_are_those_of_one_local_engine(running, expected):
    running.front_end.wait_for("instance instance-1 dialled in")
    assert running.cluster.answers(REQUESTS) == expected
    assert running.lora_server.count("instance instance-1 joined") == 1


@pytest.mark.slow
def test_lora_server_comes_and_goes_without_the_instance(running, expected):
    [before] = running.instance.workers()
    running.lora_server.stop()
    assert running.cluster.answers(REQUESTS) == expected
    running.lora_server = running.cluster.lora_server()
    running.lora_server.wait_for("instance instance-1 joined", 2)
    assert running.cluster.answers(REQUESTS) == expected
    assert running.instance.workers() == [before]


@pytest.mark.slow
def test_requests_of_an_instance_that_is_killed_go_on_at_the_other(running, expected):
    second = running.cluster.plain_instance("instance-2")
    running.front_end.wait_for("instance instance-2 dialled in")
    drive = running.cluster.drive(REQUESTS * 4)
    busy = r'instance_requests_running{instance="instance-2",model_name="demo"} [1-9]'
    until(lambda: re.search(busy, metrics(running.cluster)), lambda: metrics(running.cluster))
    second.process.kill()
    second.process.wait(PATIENCE_S)
    assert drive.answers() == expected * 4
    assert running.front_end.count("instance instance-2 left") == 1


def test_instance_dials_a_new_front_end_with_its_model_in_place(running, expected):
    [before] = running.instance.workers()
    assert running.front_end.stop() == 0
    running.front_end = running.cluster.front_end()
    running.front_end.wait_for("instance instance-1 dialled in", 2)
    assert running.cluster.answers(REQUESTS) == expected
    assert running.instance.workers() == [before]


def test_torchrun_killed_outright_leaves_no_worker(running):
    [worker] = running.instance.workers()
    os.kill(running.instance.process.pid, signal.SIGKILL)
    running.instance.process.wait(PATIENCE_S)
    until(lambda: not alive(worker), lambda: "the worker outlives its torchrun")
    running.front_end.wait_for("no LLM instance is left; one may dial in at 127.0.0.1:")
    [(status, message)] = running.cluster.drive(REQUESTS[:1]).done()
    assert status == 503
    assert message.startswith(NOBODY)
