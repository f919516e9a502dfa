# SPDX-License-Identifier: Apache-2.0
"""What the process keeper and torchrun give each role: counted, written into the file, kept at a restart."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.harness.processes import lora_server_processes
from moe_lora.assemble import serve, serve_host
from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig, read_cluster
from moe_lora.config.devices import LORA_SERVER, DeviceShare
from moe_lora.core.errors import ConfigError
from moe_lora.core.processes import RestartPolicy
from moe_lora.dist.launch import cluster_file as host_settings
from moe_lora.dist.launch import host_roles, local, roles, server_role
from moe_lora.dist.launch.cluster_file import cluster_file, count_devices, log_devices, placed, use_devices
from moe_lora.dist.launch.host_roles import HostRoles, Role
from moe_lora.dist.launch.local import local_instances, local_lora_server
from moe_lora.dist.launch.roles import JobPlace, serve_instance
from moe_lora.dist.launch.server_role import serve_lora_server
from moe_lora.dist.lora_server.server_rank import own_device
from moe_lora.engine.ranks.rank import Rank, rank_device, resolved
from tests.dist.cluster_jobs import until

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo" / "model"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    """This process's, without CUDA_VISIBLE_DEVICES; a test may change it."""
    found = {name: value for name, value in os.environ.items() if name != VISIBLE}
    monkeypatch.setattr(os, "environ", found)
    return found


@pytest.fixture
def four(monkeypatch, environment) -> None:
    """A host with four devices."""
    monkeypatch.setattr(host_settings, "count_devices", lambda: 4)


def cluster_of(server: str | None = None, **engine) -> ClusterConfig:
    settings = {"num_threads": None, "model_dir": str(DEMO), **engine}
    return ClusterConfig(
        engine=EngineConfig(**settings),
        served_model_name="served",
        lora_server=None if server is None else LoraServerConfig(layout=server),
        front_end=FrontEndConfig(port=0),
    )


def test_the_count_is_that_of_torch():
    assert count_devices.__wrapped__() == torch.cuda.device_count()


def counted(monkeypatch, folder: Path, module: str) -> int:
    """By a process that finds a driver and this module torch."""
    (folder / "torch.py").write_text(module)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return count_devices.__wrapped__()


def test_a_process_with_the_same_environment_counts(monkeypatch, tmp_path):
    """torch itself reads CUDA_VISIBLE_DEVICES, indices and UUIDs; whatever it prints before is no count."""
    module = """
import os
from types import SimpleNamespace
print("a word of the driver")
cuda = SimpleNamespace(device_count=lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
"""
    monkeypatch.setenv(VISIBLE, "GPU-aa,GPU-bb,GPU-cc")
    assert counted(monkeypatch, tmp_path, module) == 3


def test_a_torch_that_can_not_be_asked_is_told_with_its_last_word(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="can't count the CUDA devices of this host: ImportError: broken"):
        counted(monkeypatch, tmp_path, "raise ImportError('broken')")


def test_nothing_is_counted_for_the_cpu(monkeypatch):
    monkeypatch.setattr(host_settings, "count_devices", lambda: pytest.fail("counted"))
    cluster = cluster_of("EP2-PP1", device="cpu", num_instances=9)
    assert placed(cluster) is cluster


def test_without_devices_all_is_as_it_was_unless_some_are_listed(monkeypatch, environment):
    monkeypatch.setattr(host_settings, "count_devices", lambda: 0)
    cluster = cluster_of("EP2-PP1", num_instances=2)
    assert placed(cluster) is cluster
    with pytest.raises(ConfigError, match="no device 0, this host has 0; leave devices: out"):
        placed(replace(cluster, devices={"instance-0": (0,)}))


def test_the_keeper_assigns_once_and_says_so(four, environment, caplog):
    caplog.set_level(logging.INFO, logger="moe_lora")
    cluster = placed(cluster_of("EP1-PP1", num_instances=2))
    assert cluster.devices == {"instance-0": (0,), "instance-1": (1,), LORA_SERVER: (2,)}
    assert placed(cluster) == cluster
    environment[VISIBLE] = "4,5,6,7"
    log_devices(cluster)
    assert (
        "devices (CUDA_VISIBLE_DEVICES=4,5,6,7): instance-0 cuda:0; instance-1 cuda:1; lora_server cuda:2; "
        "idle cuda:3"
    ) in caplog.text


@pytest.mark.parametrize("start", [serve, lambda cluster: serve_host(cluster, 2)])
def test_too_few_devices_end_the_command_before_anything_starts(four, start, monkeypatch):
    monkeypatch.setattr(local, "HostRoles", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match=r"2 instances x 2 ranks \+ 3 LoRA Server ranks = 7 devices, this"):
        start(cluster_of("EP1-PP3", num_instances=2, expert_parallel=2))


class Kept:
    """In place of `HostRoles`: what it was to keep running, as each process would read it."""

    roles: tuple[Role, ...] = ()
    cluster: ClusterConfig

    def __init__(self, given, **_: object) -> None:
        Kept.roles = tuple(given)
        Kept.cluster = read_cluster(f"/dev/fd/{given[0].fds[0]}")

    async def ready(self) -> None:
        raise ConfigError("seen")

    async def stop(self) -> None:
        pass


def kept(monkeypatch, context) -> None:
    """Enter the context up to the point at which its processes would be there."""
    monkeypatch.setattr(local, "HostRoles", Kept)

    async def enter() -> None:
        async with context:
            pass

    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(enter())


def test_instances_of_one_host_have_devices_of_their_own(four, monkeypatch, tmp_path):
    cluster = cluster_of(num_instances=2, expert_parallel=2, num_threads=1, state_dir=str(tmp_path))
    kept(monkeypatch, local_instances(cluster))
    assert [role.name for role in Kept.roles] == ["instance-0", "instance-1"]
    configs = [Kept.cluster.instance(role.name) for role in Kept.roles]
    assert [[one.number for one in config.device_shares] for config in configs] == [[0, 1], [2, 3]]
    assert {config.device for config in configs} == {"cuda"}


def test_ranks_of_the_lora_server_come_after_the_instances(four, monkeypatch, tmp_path):
    cluster = cluster_of("EP2-PP1", num_instances=2, state_dir=str(tmp_path))
    kept(monkeypatch, local_lora_server(cluster))
    assert [role.environment["LOCAL_RANK"] for role in Kept.roles] == ["0", "1"]
    ranks = [Kept.cluster.lora_server_rank(int(role.environment["LOCAL_RANK"])) for role in Kept.roles]
    assert [one.device_shares for one in ranks] == [(DeviceShare(2),), (DeviceShare(3),)]


def test_the_library_leaves_room_for_instances_too(four, monkeypatch, tmp_path):
    """`lora_server_processes` and `engine_processes` follow each other, and map the same cluster."""
    monkeypatch.setattr(local, "HostRoles", Kept)
    config = EngineConfig(model_dir=str(DEMO), num_instances=3, state_dir=str(tmp_path))
    with (
        pytest.raises(ConfigError, match="seen"),
        lora_server_processes(config, LoraServerConfig(layout="EP1-PP1")),
    ):
        pass
    assert Kept.cluster.devices[LORA_SERVER] == (3,)


def test_several_front_ends_read_the_same_map(four, monkeypatch, tmp_path):
    seen = []

    async def run(given, *_: object) -> bool:
        seen.extend((role.name, read_cluster(f"/dev/fd/{role.fds[0]}").devices) for role in given)
        return True

    monkeypatch.setattr(host_roles, "run_roles", run)
    cluster = cluster_of(num_instances=2, num_threads=None, state_dir=str(tmp_path))
    assert serve_host(cluster, 2) == 0
    assert [name for name, _ in seen] == [
        "controller",
        "front-end-0",
        "front-end-1",
        "instance-0",
        "instance-1",
    ]
    assert all(found == {"instance-0": (0,), "instance-1": (1,)} for _, found in seen)


def test_devices_are_shared_only_where_the_file_says_so(four, monkeypatch, tmp_path):
    cluster = cluster_of("EP1-PP1", num_instances=4, num_threads=None, state_dir=str(tmp_path))
    listed = {f"instance-{one}": (one // 2,) for one in range(4)} | {LORA_SERVER: (1,)}
    kept(monkeypatch, local_lora_server(replace(cluster, devices=listed)))
    shares = [Kept.cluster.instance(f"instance-{one}").device_shares for one in range(4)]
    assert shares == [(DeviceShare(0, 2),)] * 2 + [(DeviceShare(1, 3),)] * 2
    assert Kept.cluster.lora_server_rank(0).device_shares == (DeviceShare(1, 3),)


SEEN = """
import os, sys
from moe_lora.config.cluster import read_cluster
from moe_lora.dist.launch.cluster_file import use_devices
use_devices(read_cluster(sys.argv[1]).instance(sys.argv[2]).device_shares)
with open(sys.argv[3], "a") as file:
    print(os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[4:], file=file)
"""


@contextmanager
def restarted(cluster: ClusterConfig, name: str, seen: Path) -> Iterator[None]:
    """A role that ends whenever it has said which devices it sees."""
    with cluster_file(cluster) as file:
        role = Role(
            name=name, kind="one", words=("-c", SEEN, f"/dev/fd/{file}", name, str(seen)), fds=(file,)
        )

        async def keep() -> None:
            quick = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.02)
            found = HostRoles([role], policy=quick)
            await asyncio.to_thread(
                until, lambda: seen.exists() and len(seen.read_text().splitlines()) > 2, lambda: str(seen)
            )
            await found.stop()

        asyncio.run(keep())
        yield


def test_a_role_keeps_its_devices_when_it_is_started_again(four, environment, tmp_path):
    environment[VISIBLE] = "GPU-a,GPU-b,GPU-c,GPU-d"
    cluster = placed(cluster_of(num_instances=2, expert_parallel=2))
    with restarted(cluster, "instance-1", tmp_path / "seen"):
        lines = (tmp_path / "seen").read_text().splitlines()
    assert {line.split()[0] for line in lines} == {"GPU-c,GPU-d"}
    assert [line.split()[-1] for line in lines[:3]] == ["0", "1", "2"], "each is another start"


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> ClusterConfig:
        where = "front_end: {engines_address: /run/engines}\n"
        server = "lora_server: {layout: EP2-PP1, address: /run/server, store_dir: store}\n"
        (tmp_path / "cluster.yaml").write_text(f"model_dir: base\n{where}{server}{text}")
        return read_cluster(tmp_path / "cluster.yaml")

    return write


def test_place_is_what_torchrun_says(environment):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    assert JobPlace.here().on_host == 0
    environment["RANK"] = "5"
    assert JobPlace.here().on_host == 5
    environment["LOCAL_RANK"] = "1"
    assert JobPlace.here().on_host == 1


@pytest.mark.parametrize(
    ("place", "devices_given", "visible", "seen"),
    [
        (JobPlace(), "", None, None),
        (JobPlace(local_rank=2), "", None, "2"),
        (JobPlace(local_rank=2), "", "4,5,6", "6"),
        (JobPlace(local_rank=2), "", "", ""),
        (JobPlace(local_rank=2), "engine: {device: cpu}", None, None),
        (JobPlace(), "devices: {west: [3]}", None, "3"),
        (JobPlace(), "devices: {west: [3]}", "GPU-a,GPU-b,GPU-c,GPU-d", "GPU-d"),
        (JobPlace(local_rank=2), "devices: {west: [3]}", None, "3"),
        (JobPlace(local_rank=2), "devices: {east: [3]}", None, "2"),
        (JobPlace(0, 2, True, 0), "engine: {expert_parallel: 2}", "6,7", "6,7"),
        (JobPlace(1, 2, True, 1), "engine: {expert_parallel: 2}", "6,7", "6,7"),
        (JobPlace(1, 2, True, 1), "engine: {expert_parallel: 2}\ndevices: {west: [4, 2]}", None, "4,2"),
    ],
)
def test_an_instance_sees_the_devices_of_its_place(
    place, devices_given, visible, seen, file, environment, monkeypatch, tmp_path
):
    if visible is not None:
        environment[VISIBLE] = visible
    environment["XDG_STATE_HOME"] = str(tmp_path)
    monkeypatch.setattr(roles, "_serve_engine", lambda *_: 0)
    monkeypatch.setattr("moe_lora.engine.ranks.follower.follow_rank_0", lambda: None)
    monkeypatch.setattr(roles.signal, "signal", lambda *_: None)
    assert serve_instance(file(devices_given), place, "west") == 0
    assert environment.get(VISIBLE) == seen


def test_a_local_rank_beyond_the_visible_devices_is_refused(file, environment, tmp_path):
    environment |= {VISIBLE: "4,5", "XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="no device 2: CUDA_VISIBLE_DEVICES=4,5 lists 2 devices"):
        serve_instance(file(""), JobPlace(local_rank=2), "west")


@pytest.mark.parametrize(
    ("place", "devices_given", "visible", "seen", "index"),
    [
        (JobPlace(1, 2, True, 1), "", None, None, 1),
        (JobPlace(1, 2, True, 0), "", None, None, 0),
        (JobPlace(1, 2), "", "6,7", "6,7", 1),
        (JobPlace(1, 2, True, 1), "devices: {lora_server: [2, 3]}", None, "3", 0),
        (JobPlace(1, 2, True, 1), "devices: {lora_server: [0, 2]}", "5,6,7", "7", 0),
    ],
)
def test_a_lora_server_rank_has_the_device_of_its_local_rank(
    place, devices_given, visible, seen, index, file, environment, monkeypatch
):
    if visible is not None:
        environment[VISIBLE] = visible
    configs = []
    monkeypatch.setattr(server_role, "serve_rank", lambda config, *_: configs.append(config) or 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert serve_lora_server(file(devices_given), place) == 0
    assert environment.get(VISIBLE) == seen
    on_cuda = replace(configs[0], device="cuda")
    assert own_device(on_cuda, place.on_host) == torch.device("cuda", index)


def test_a_lora_server_rank_never_shares_a_device_unasked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(model_dir="", device="cuda")
    with pytest.raises(ConfigError, match="local rank 2 of the LoRA Server has no device, torch finds 2"):
        own_device(config, 2)
    assert own_device(replace(config, device="cpu"), 2) == torch.device("cpu")


def test_ranks_of_an_instance_take_what_its_processes_see_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    assert [rank_device(torch.device("cuda"), 2, rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(
        ConfigError, match=r"of 4 ranks .* torch finds 2; .* let CUDA_VISIBLE_DEVICES list more"
    ):
        rank_device(torch.device("cuda"), 4, 3)


def names_of(device: str, **settings) -> tuple[str, ...]:
    rank = object.__new__(Rank)
    rank.device, rank.config = torch.device(device), EngineConfig(model_dir="", **settings)
    return rank.device_names


def test_an_engine_names_its_devices_as_the_keeper_numbers_them():
    shares = (DeviceShare(2), DeviceShare(5))
    assert names_of("cuda:0", expert_parallel=2, device_shares=shares) == ("cuda:2", "cuda:5")
    assert names_of("cuda", expert_parallel=2) == ("cuda:0", "cuda:1")
    assert names_of("cpu", expert_parallel=2) == ("cpu", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_a_listed_device_that_is_away_is_not_left_for_the_cpu(file):
    config = file("devices: {west: [3]}").instance("west")
    with pytest.raises(ConfigError, match=r"torch finds no CUDA device; .* no devices: in the cluster file"):
        resolved(config, {})


def test_without_shares_a_process_sees_what_it_saw(environment):
    use_devices(())
    assert VISIBLE not in environment
