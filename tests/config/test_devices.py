# SPDX-License-Identifier: Apache-2.0
"""Devices of a host's ranks: the order, the sums refused, sharing only where it is listed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config.cluster import cluster_text, read_cluster
from moe_lora.config.devices import (
    LORA_SERVER,
    DeviceShare,
    assign_devices,
    devices_text,
    narrowed,
    shares_of,
)
from moe_lora.core.errors import ConfigError

COUNTS = st.integers(1, 5)
SERVERS = st.integers(0, 5)


def flat(devices) -> list[int]:
    return list(itertools.chain.from_iterable(devices.values()))


def test_instances_come_first_then_the_lora_server():
    assert assign_devices(2, 2, 3, 8) == {
        "instance-0": (0, 1),
        "instance-1": (2, 3),
        LORA_SERVER: (4, 5, 6),
    }
    assert assign_devices(2, 1, 0, 2) == {"instance-0": (0,), "instance-1": (1,)}


@given(COUNTS, COUNTS, SERVERS, st.integers(0, 5))
def test_each_rank_has_a_device_of_its_own_in_order(instances, ranks, servers, spare):
    needed = instances * ranks + servers
    assert flat(assign_devices(instances, ranks, servers, needed + spare)) == list(range(needed))


@given(COUNTS, COUNTS, SERVERS, st.data())
def test_too_few_devices_are_refused_with_the_sum(instances, ranks, servers, data):
    needed = instances * ranks + servers
    found = data.draw(st.integers(0, needed - 1))
    with pytest.raises(ConfigError) as refusal:
        assign_devices(instances, ranks, servers, found)
    said = str(refusal.value)
    assert f"= {needed} device" in said
    assert f"this host has {found};" in said
    assert "devices: in the cluster file" in said


@given(COUNTS, COUNTS, SERVERS)
def test_one_more_instance_moves_no_other(instances, ranks, servers):
    before = assign_devices(instances, ranks, 0, 100)
    after = assign_devices(instances + 1, ranks, servers, 100)
    assert {role: after[role] for role in before} == before


@given(COUNTS, COUNTS, SERVERS, st.data())
def test_only_listed_roles_share_and_the_map_is_stable(instances, ranks, servers, data):
    names = list(assign_devices(instances, ranks, servers, 100))
    listed = data.draw(st.sets(st.sampled_from(names)))
    given_devices = {
        role: tuple(
            data.draw(
                st.lists(
                    st.integers(0, 9),
                    min_size=servers if role == LORA_SERVER else ranks,
                    max_size=servers if role == LORA_SERVER else ranks,
                    unique=role != LORA_SERVER,
                )
            )
        )
        for role in sorted(listed)
    }
    found = assign_devices(instances, ranks, servers, 60, given_devices)
    assert list(found) == names
    assert {role: found[role] for role in listed} == given_devices
    others = flat({role: numbers for role, numbers in found.items() if role not in listed})
    assert len(set(others)) == len(others)
    assert not set(others) & set(flat(given_devices))
    assert assign_devices(instances, ranks, servers, 60, found) == found
    for role, numbers in found.items():
        for share, number in zip(shares_of(role, found), numbers, strict=True):
            assert share == DeviceShare(number, flat(found).count(number))


@pytest.mark.parametrize(
    ("counts", "listed", "visible", "reason"),
    [
        (
            (2, 2, 3, 4),
            {},
            None,
            r"2 instances x 2 ranks \+ 3 LoRA Server ranks = 7 devices, this host has 4; .*or list them "
            r"under devices: in the cluster file",
        ),
        ((2, 1, 0, 1), {}, None, r"2 instances x 1 rank = 2 devices, this host has 1; "),
        ((1, 1, 1, 1), {}, None, r"1 instance x 1 rank \+ 1 LoRA Server rank = 2 devices, this host has 1;"),
        ((2, 1, 0, 1), {}, "3", r"this host has 1 \(CUDA_VISIBLE_DEVICES=3\); "),
        (
            (2, 2, 2, 4),
            {LORA_SERVER: (0, 1)},
            None,
            r"2 instances x 2 ranks = 4 devices, this host has 4, and devices: takes 2 of them; ",
        ),
        (
            (1, 1, 2, 2),
            {"instance-0": (0,)},
            None,
            r"2 LoRA Server ranks = 2 devices, .* \(devices: \{lora_server: \[0, 0\]\}\)",
        ),
        (
            (2, 1, 0, 4),
            {"instance-2": (0,)},
            None,
            "devices.instance-2: this host starts no instance-2; choose",
        ),
        ((1, 1, 0, 4), {LORA_SERVER: (0,)}, None, "this host starts no lora_server; choose from instance-0"),
        (
            (1, 2, 0, 4),
            {"instance-0": (0,)},
            None,
            r"devices.instance-0=\[0\] lists 1 device, .* has 2 ranks",
        ),
        ((1, 1, 2, 4), {LORA_SERVER: (1,)}, None, r"the LoRA Server has 2 ranks; list one device for each"),
        ((1, 1, 0, 4), {"instance-0": (4,)}, None, "no device 4, this host has 4; choose from 0 to 3"),
        (
            (1, 1, 0, 0),
            {"instance-0": (0,)},
            "",
            r"this host has 0 \(CUDA_VISIBLE_DEVICES=\); leave devices:",
        ),
    ],
)
def test_refusals_state_the_numbers_and_the_way_out(counts, listed, visible, reason):
    with pytest.raises(ConfigError, match=reason):
        assign_devices(*counts, listed, visible)


@pytest.mark.parametrize(
    ("visible", "numbers", "found"),
    [
        (None, (2, 3), "2,3"),
        ("4,5,6,7", (0, 3), "4,7"),
        ("GPU-aa, GPU-bb ,GPU-cc", (2, 1), "GPU-cc,GPU-bb"),
        ("", (0,), ""),
        ("-1", (0,), "-1"),
        ("NoDevFiles", (0,), "NoDevFiles"),
    ],
)
def test_a_process_sees_its_devices_among_the_visible_ones(visible, numbers, found):
    assert narrowed(visible, numbers) == found


@pytest.mark.parametrize("visible", ["4,5", "4,5,-1,6", "4,5,,6", "GPU-aa,GPU-bb"])
def test_a_device_beyond_the_visible_ones_is_refused(visible):
    with pytest.raises(ConfigError, match=rf"no device 2: CUDA_VISIBLE_DEVICES={visible} lists 2 devices"):
        narrowed(visible, (0, 2))


@given(st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True), st.data())
def test_narrowing_twice_is_narrowing_once_by_both(entries, data):
    visible = ",".join(map(str, entries))
    first = data.draw(st.lists(st.sampled_from(range(len(entries))), min_size=1, unique=True))
    second = data.draw(st.lists(st.sampled_from(range(len(first))), min_size=1, unique=True))
    assert narrowed(narrowed(visible, first), second) == narrowed(visible, [first[one] for one in second])


def test_the_log_names_shared_and_idle_devices():
    shared = {"instance-0": (0, 1), LORA_SERVER: (1,)}
    assert devices_text(shared, 3) == (
        "instance-0 cuda:0, cuda:1; lora_server cuda:1; cuda:1 shared by 2 ranks; idle cuda:2"
    )


@pytest.fixture
def read(tmp_path):
    def read_text(text: str):
        (tmp_path / "cluster.yaml").write_text(f"model_dir: base\n{text}")
        return read_cluster(tmp_path / "cluster.yaml")

    return read_text


SHARED = """
engine: {num_instances: 2, expert_parallel: 2}
lora_server: {layout: EP2-PP1, address: /run/server, store_dir: store}
devices: {instance-0: [0, 1], instance-1: [2, 3], lora_server: [0, 3]}
"""


def test_each_role_reads_its_devices_and_their_sharers(read):
    cluster = read(SHARED)
    assert cluster.devices == {"instance-0": (0, 1), "instance-1": (2, 3), LORA_SERVER: (0, 3)}
    one = cluster.instance("instance-1")
    assert one.device_shares == (DeviceShare(2, 1), DeviceShare(3, 2))
    assert one.device == "cuda", "a listed device is never left for the CPU"
    assert cluster.instance("another").device_shares == ()
    assert cluster.instance("another").device == "auto"
    ranks = [cluster.lora_server_rank(rank) for rank in range(2)]
    assert [one.device_shares for one in ranks] == [(DeviceShare(0, 2),), (DeviceShare(3, 2),)]
    with pytest.raises(
        ConfigError, match=r"devices\.lora_server lists 2 devices, .* rank 2 of this host .LOCAL_RANK"
    ):
        cluster.lora_server_rank(2)


def test_a_file_without_devices_leaves_the_choice_open(read):
    cluster = read("devices:")
    assert cluster.devices == {}
    assert cluster.instance().device_shares == ()


def test_the_file_that_roles_read_has_the_devices(read, tmp_path):
    cluster = read(SHARED)
    (tmp_path / "again.yaml").write_text(cluster_text(cluster))
    assert read_cluster(tmp_path / "again.yaml") == cluster


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "devices: [0, 1]",
            r"devices=\[0, 1\] must be a mapping of roles to device numbers, as in devices: \{",
        ),
        ("devices: 2", "devices=2 must be a mapping"),
        ("devices: {instance-0: 0}", "devices.instance-0=0 must be a list of device numbers from 0 on"),
        ("devices: {instance-0: []}", r"devices.instance-0=\[\] must be a list of device numbers"),
        ("devices: {instance-0: [-1]}", r"devices.instance-0=\[-1\] must be a list"),
        ("devices: {instance-0: [true]}", r"devices.instance-0=\[True\] must be a list"),
        ("devices: {instance-0: ['cuda:0']}", "devices.instance-0=.* must be a list of device numbers"),
        ("devices: {instance-0: [0.0]}", "must be a list of device numbers"),
        ("devices: {instance-0: }", "devices.instance-0=None must be a list"),
        ("devices: {0: [0]}", "devices: 0 is not the name of a role; give names as in"),
        ("devices: {'': [0]}", "devices: '' is not the name of a role"),
        ("devices: {instance-0: [0, 1]}", r"lists 2 devices, but the instance has 1 rank;"),
        (
            "engine: {tensor_parallel: 2}\ndevices: {instance-0: [1, 1]}",
            "ranks of one instance can't share a device; give each rank a device of its own",
        ),
        ("devices: {lora_server: [1]}", "devices.lora_server: the file has no lora_server section"),
        ("lora_server: {}\ndevices: {lora-server: [1]}", "devices.lora-server .* did you mean lora_server"),
        ("engine: {device: cpu}\ndevices: {instance-0: [0]}", "devices and engine.device='cpu' do not go"),
    ],
)
def test_devices_that_can_not_be_are_refused_when_the_file_is_read(read, text, reason):
    with pytest.raises(ConfigError, match=reason):
        read(text)
