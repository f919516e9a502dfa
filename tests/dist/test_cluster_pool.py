# SPDX-License-Identifier: Apache-2.0
"""A cluster whose instances share their adapters over TCP, and find each other again."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.patience import PATIENCE_S

from .cluster_jobs import ADAPTERS, Cluster, Host, Job, local_answers, make_requests, until

REQUESTS = make_requests(12)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return local_answers(REQUESTS)


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    roles = ("front-end", "instance-1", "instance-2")
    cluster = Cluster(
        {role: Host(role, "127.0.0.1", tmp_path / role) for role in roles},
        transport="gloo",
        pool=True,
        max_loras=2,
    )
    try:
        yield cluster
    finally:
        cluster.stop()


def held(cluster: Cluster) -> list[int]:
    """Adapters of each instance."""
    text = httpx.get(f"{cluster.url}/metrics", trust_env=False).text
    return [
        int(float(value)) for value in re.findall(r"^moe_lora:instance_pool_adapters{.*} (\S+)", text, re.M)
    ]


def until_divided(cluster: Cluster) -> None:
    until(lambda: sum(held(cluster)) == len(ADAPTERS) and min(held(cluster)) > 1, lambda: str(held(cluster)))


def until_all_are_there(front_end: Job, times: int) -> None:
    front_end.wait_for("Serving demo at", times)
    for name in ("instance-1", "instance-2"):
        front_end.wait_for(f"instance {name} dialled in", times)


def test_instances_divide_the_adapters_and_outlive_front_end_and_holder(cluster, expected):
    front_end = cluster.front_end()
    instances = [cluster.plain_instance(name) for name in ("instance-1", "instance-2")]
    until_all_are_there(front_end, 1)
    assert cluster.answers(REQUESTS) == expected
    until_divided(cluster)
    assert cluster.answers(REQUESTS) == expected
    assert front_end.stop() == 0
    front_end = cluster.front_end()
    until_all_are_there(front_end, 2)
    assert cluster.answers(REQUESTS) == expected
    assert sum(held(cluster)) == len(ADAPTERS), "the new front end knew who holds what"
    instances[0].process.kill()
    instances[0].process.wait(PATIENCE_S)
    assert cluster.answers(REQUESTS) == expected
    until(lambda: max(held(cluster)) == len(ADAPTERS), lambda: str(held(cluster)))
    cluster.plain_instance("instance-1")
    front_end.wait_for("instance instance-1 dialled in", 3)
    until_divided(cluster)
    assert cluster.answers(REQUESTS) == expected
