# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.cluster_file import thread_share
from moe_lora.dist.launch.local import checked
from moe_lora.dist.launch.roles import seed_of

CONTROLLER = "controller: {address: 'h:3', engines_address: 'h:4'}"


@pytest.mark.parametrize(
    ("num_threads", "num_instances", "num_cores", "share"),
    [(None, 1, 8, 8), (None, 3, 8, 2), (None, 4, 2, 1), (1, 4, 2, 1), (2, 4, 8, 2), (1, 4, 8, 1)],
)
def test_cores_are_shared_out(num_threads, num_instances, num_cores, share):
    assert thread_share(num_threads, num_instances, num_cores) == share


@pytest.mark.parametrize(("num_threads", "num_instances", "most"), [(3, 4, 2), (9, 1, 8), (2, 16, 1)])
def test_more_threads_than_cores_are_refused(num_threads, num_instances, most):
    with pytest.raises(ConfigError, match=f"there are 8 cores; choose at most {most}"):
        thread_share(num_threads, num_instances, 8)


def test_seeds_differ_between_instances_and_incarnations():
    seeds = [seed_of(5, f"instance-{index}", starts) for index in range(3) for starts in (0, 1, None, None)]
    assert len(set(seeds)) == len(seeds)


def test_seed_of_a_started_instance_is_the_same_each_time():
    assert seed_of(5, "instance-0", 0) == seed_of(5, "instance-0", 0) == seed_of(4, "instance-0", 0) + 1


@pytest.mark.parametrize(
    ("of_two", "more", "named"),
    [
        ("port: 82, host: h", CONTROLLER, "host, front_ends.two.port"),
        ("admin_address: /a", CONTROLLER, "admin_address"),
        (
            "port: 81",
            "controllers: {a: {address: 'h:3', engines_address: 'h:4'}}\nleadership: {store: 'etcd://h:5'}",
            "controllers, leadership",
        ),
    ],
)
def test_one_server_refuses_addresses_of_roles_apart(tmp_path, of_two, more, named):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model_dir: m\nfront_end: {port: 81}\n"
        "front_ends:\n  one: {engines_address: 'h:1'}\n"
        f"  two: {{engines_address: 'h:2', {of_two}}}\n{more}\n"
    )
    with pytest.raises(ConfigError, match=f"{named}: all front ends of one server have the addresses in"):
        checked(read_cluster(file))
