# SPDX-License-Identifier: Apache-2.0
"""Limits of containers are counted, in the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lora.core import host, processes

GB = 10**9


@pytest.fixture(autouse=True)
def no_limits_of_this_machine():
    yield
    host.memory_limits.cache_clear()


V2, V1 = (
    {
        "own": "0::/pods/one\n",
        "pods/memory.max": "max\n",
        "pods/one/memory.max": f"{2 * GB}\n",
        "pods/one/memory.current": f"{GB}\n",
        "pods/one/memory.stat": f"anon 5\nfile 7\ninactive_file {GB // 2}\n",
        "pods/cpu.max": "150000 100000\n",
        "pods/one/cpu.max": "max 100000\n",
    },
    {
        "own": "9:name=systemd:/\n4:memory:/pods/one\n2:cpu,cpuacct:/pods/one\n0::/\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
        "memory/memory.stat": "total_inactive_file 0\n",
        "memory/pods/one/memory.limit_in_bytes": f"{2 * GB}\n",
        "memory/pods/one/memory.usage_in_bytes": f"{GB}\n",
        "memory/pods/one/memory.stat": f"inactive_file 3\ntotal_inactive_file {GB // 2}\n",
        "cpu,cpuacct/pods/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/pods/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/pods/one/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/pods/one/cpu.cfs_period_us": "100000\n",
    },
)


def groups(folder: Path, files: dict[str, str], monkeypatch) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(host, "OWN_GROUPS", folder / "own")
    monkeypatch.setattr(host, "GROUPS", folder)
    host.memory_limits.cache_clear()


@pytest.mark.parametrize("files", [V2, V1], ids=["version 2", "version 1"])
def test_limits_of_a_container_and_of_what_is_around_it_count(tmp_path, monkeypatch, files):
    groups(tmp_path, files, monkeypatch)
    monkeypatch.setattr(processes, "usable_core_numbers", lambda: list(range(8)))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 99999999 kB\n")
    monkeypatch.setattr(host, "MEMINFO", meminfo)
    assert host.free_memory_bytes() == 2 * GB - GB // 2, "the page cache can be taken"
    assert host.host_memory_bytes() == 2 * GB
    assert host.processor_limit() == 1.5
    assert processes.usable_cores() == 2
    meminfo.write_text("MemAvailable: 1 kB\n")
    assert host.free_memory_bytes() == 1024, "the host has less left than the container's limit"


def test_groups_named_from_outside_of_the_container_are_found_at_its_root(tmp_path, monkeypatch):
    files = {
        "own": "0::/machine/docker-17\n",
        "memory.max": "1000\n",
        "memory.current": "3000\n",
        "memory.stat": "inactive_file 0\n",
        "cpu.max": "25000 100000\n",
    }
    groups(tmp_path, files, monkeypatch)
    assert host.host_memory_bytes() == 1000
    assert host.free_memory_bytes() == 0
    assert processes.usable_cores() == 1


@pytest.mark.parametrize("own", ["", "0::/\n"], ids=["no group", "no files"])
def test_without_limits_the_host_counts(tmp_path, monkeypatch, own):
    groups(tmp_path, {"own": own}, monkeypatch)
    assert not host.memory_limits()
    assert host.processor_limit() is None
    assert processes.usable_cores() == len(processes.usable_core_numbers())
    monkeypatch.setattr(host, "OWN_GROUPS", tmp_path / "absent")
    host.memory_limits.cache_clear()
    assert not host.memory_limits()
    assert host.processor_limit() is None
