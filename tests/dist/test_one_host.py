"""Roles as processes of one host: kept running, ended together, nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig, ProvisionConfig, RegistryConfig
from moe_lora.config.cluster import ClusterConfig, cluster_text, read_cluster
from moe_lora.dist.host_roles import HostRoles, Role
from moe_lora.dist.one_host import cluster_file, on_loopback, roles_of
from moe_lora.engine.supervisor import RestartPolicy

from .cluster_jobs import alive, until

QUICK = RestartPolicy(max_quick_deaths=3, first_pause_s=0.01)
SLEEPING = Role(name="sleeper", kind="one", words=("-c", "import time; time.sleep(600)"))
FAILING = Role(name="failing", kind="other", words=("-c", "raise SystemExit(3)"))


@pytest.fixture
def cluster(tmp_path) -> ClusterConfig:
    return ClusterConfig(
        engine=EngineConfig(
            model_dir=str(tmp_path / "base"),
            adapters=(("a", str(tmp_path / "a")),),
            num_instances=2,
            decode_buckets=(1, 2),
            eager=True,
        ),
        served_model_name="served",
        front_end=FrontEndConfig(port=8123, placement="loraserve", operating_points=str(tmp_path / "points")),
        provision=ProvisionConfig(target_iar=0.9),
        registry=RegistryConfig(folder=str(tmp_path / "registry"), adapters=("r",)),
    )


def test_the_file_says_what_the_settings_say(cluster, tmp_path):
    everything = on_loopback(cluster, 2, None)
    (tmp_path / "cluster.yaml").write_text(cluster_text(everything))
    assert read_cluster(tmp_path / "cluster.yaml") == everything
    with cluster_file(everything) as descriptor:
        assert read_cluster(f"/dev/fd/{descriptor}") == everything
        assert os.fstat(descriptor).st_mode & 0o077 == 0


def test_relative_paths_are_those_of_the_folder_where_it_was_started(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = ClusterConfig(
        engine=EngineConfig(model_dir="base", adapters=(("a", "a"),)), served_model_name="s", key="k"
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cluster.yaml").write_text(cluster_text(relative))
    engine = read_cluster(tmp_path / "elsewhere" / "cluster.yaml").engine
    assert engine.model_dir == str(tmp_path / "base")
    assert engine.adapters == (("a", str(tmp_path / "a")),)


def test_each_role_has_a_door_of_its_own_and_a_fresh_key(cluster):
    once, again = on_loopback(cluster, 2, None), on_loopback(cluster, 2, None)
    assert once.key != again.key
    assert sorted(once.doors()) == ["controller", "front-end-0", "front-end-1"]
    assert len(set(once.doors().values())) == 3
    names = [role.name for role in roles_of(once, 5, 6)]
    assert names == ["controller", "front-end-0", "front-end-1", "instance-0", "instance-1"]


def test_what_ends_is_started_again_and_what_keeps_ending_ends_all(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    kept = HostRoles([SLEEPING, FAILING], threading.Event(), policy=QUICK)
    try:
        assert kept.over.wait(60)
        assert kept.failed
        assert caplog.text.count("failing started") == 3
        assert "failing ended 3 times" in caplog.text
    finally:
        kept.stop()


def test_one_that_keeps_ending_is_given_up_while_others_stand_in(caplog):
    kept = HostRoles([SLEEPING, replace(FAILING, kind="one")], threading.Event(), policy=QUICK)
    until(lambda: "is not started again" in caplog.text, lambda: caplog.text)
    assert not kept.over.is_set()
    kept.stop()
    assert not kept.failed


def test_stopping_ends_what_runs(caplog):
    caplog.set_level("INFO", logger="moe_lora")
    kept = HostRoles([SLEEPING], threading.Event(), policy=QUICK)
    until(lambda: "sleeper started" in caplog.text, lambda: caplog.text)
    pid = int(re.search(r"sleeper started \(process (\d+)\)", caplog.text)[1])
    kept.stop()
    assert not alive(pid)
    assert not kept.failed


CHILD = """
import os, time
from moe_lora.dist.roles import end_with
end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(600)
"""


def test_a_child_ends_with_its_parent_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child), lambda: "the child outlives its parent")
