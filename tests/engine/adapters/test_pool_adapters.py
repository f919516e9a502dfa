# SPDX-License-Identifier: Apache-2.0
"""Adapters of a pool on two or three of its instances, in one process: held, fetched, dropped."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import adapter_without_data, facts_of, has_data, layout_of
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.cache.orders import Copy
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, StorageError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.transport import make_transport
from moe_lora.engine.adapters.adapter_store import ShardSizes
from moe_lora.engine.adapters.copies import Arenas, BringAdapter, ClearSlot, RankCopier
from moe_lora.engine.adapters.pool_fetch import fetch_layers
from moe_lora.engine.adapters.pool_store import PoolAdapters
from moe_lora.families import shape_of
from moe_lora.kernels.operands import SlotTable
from tests.families import make_adapter, make_checkpoint

PAGE_BYTES = 1024


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, ModelShape]:
    folder = tmp_path_factory.mktemp("pool")
    base = make_checkpoint("mixtral", folder / "base")
    shape = shape_of(json.loads((base / "config.json").read_text()))
    make_adapter("mixtral", base, folder / "other", 3)
    return make_adapter("mixtral", base, folder / "a", 5), shape


@pytest.fixture
def folder(place, tmp_path) -> str:
    """The adapter's directory, one's own to change."""
    return str(shutil.copytree(place[0], tmp_path / "a"))


@pytest.fixture(scope="module")
def packed(place) -> PackedAdapter:
    return read_adapter(*place, torch.float32, "a")


@pytest.fixture(params=["shm", "gloo"])
def instances(place, request) -> Iterator[Callable[[], PoolAdapters]]:
    """Makes instances of a pool, at most one of each name."""
    names = iter(("one", "two", "three"))
    with ExitStack() as stack:

        def make() -> PoolAdapters:
            transport = stack.enter_context(make_transport(request.param, name=next(names)))
            return PoolAdapters(
                transport, lambda path, name, _: read_adapter(path, place[1], torch.float32, name)
            )

        yield make


def bare(packed: PackedAdapter) -> PackedAdapter:
    return adapter_without_data(facts_of(packed))


def holder_of(instance: PoolAdapters, packed: PackedAdapter) -> bytes:
    """Have an instance hold an adapter; where it does."""
    instance.keep(instance.prepare(packed))
    source = instance.source(packed.content_hash)
    assert source is not None
    return source


def fetched(reader, packed: PackedAdapter, until: Callable[[int], None] = lambda layer: None) -> bool:
    """Whether what is fetched is the adapter.  until: called before each layer."""
    targets = [torch.zeros(layer.nbytes, dtype=torch.uint8) for layer in packed.layers]
    read = reader.read
    reader.read = lambda number, out: (until(number), read(number, out))
    there = fetch_layers(reader, targets)
    assert facts_of(there) == facts_of(packed)
    return all(
        torch.equal(target, layer.data.view(torch.uint8))
        and torch.equal(head.table, layer.table)
        and torch.equal(head.scale, layer.scale)
        for target, layer, head in zip(targets, packed.layers, there.layers, strict=True)
    )


def counted(instance: PoolAdapters) -> tuple[int, int, int]:
    """(fetched from peers, from disk, sources that failed)."""
    counters = instance.counters()
    return tuple(counters[f"pool_{name}"] for name in ("peer_fetches", "disk_fetches", "failed_sources"))


def test_what_one_holds_the_other_fetches_and_does_not_keep(instances, packed):
    one, two = instances(), instances()
    source = holder_of(one, packed)
    assert one.at_hand(packed.content_hash) is not None
    assert has_data(one.find(packed.content_hash))
    kept = two.keep(bare(packed), "nowhere")
    two.set_sources(packed.content_hash, [source])
    assert fetched(two.reader(packed.content_hash), packed)
    assert not has_data(kept)
    assert not has_data(two.find(packed.content_hash))
    assert counted(two) == (1, 0, 0)
    assert two.counters()["pool_fetched_bytes"] == packed.nbytes
    assert (two.counters()["pool_bytes"], two.counters()["pool_adapters"]) == (0, 0)
    assert one.counters()["pool_bytes"] == layout_of(facts_of(packed)).num_bytes
    assert (one.place(packed.content_hash), two.place(packed.content_hash)) == ("host", "peer")


def test_held_adapter_is_not_kept_a_second_time(instances, packed):
    one = instances()
    holder_of(one, packed)
    again = one.keep(one.prepare(packed))
    assert one.counters()["pool_adapters"] == 1
    one.forget(again)
    assert has_data(one.find(packed.content_hash))
    assert one.orphans() == []
    one.free_orphan(packed.content_hash)
    assert one.counters()["pool_adapters"] == 1


def test_what_is_not_kept_any_more_can_be_fetched_until_it_is_freed(instances, packed):
    one, two = instances(), instances()
    source = holder_of(one, packed)
    two.keep(bare(packed), "nowhere")
    two.set_sources(packed.content_hash, [source])
    one.forget(bare(packed))
    assert one.orphans() == [packed.content_hash]
    assert fetched(two.reader(packed.content_hash), packed)
    one.keep(bare(packed))
    assert (one.orphans(), one.source(packed.content_hash)) == ([], source)
    one.forget(bare(packed))
    one.free_orphan(packed.content_hash)
    assert (one.orphans(), one.counters()["pool_bytes"]) == ([], 0)
    one.keep(one.prepare(packed))
    one.forget(bare(packed))
    one.drop(packed.content_hash)
    assert not one.knows(packed.content_hash)


def test_holder_that_lets_go_in_the_middle_is_left_for_the_next_one(instances, packed):
    first, second, reading = instances(), instances(), instances()
    sources = [holder_of(first, packed), holder_of(second, packed)]
    reading.keep(bare(packed), "nowhere")
    reading.set_sources(packed.content_hash, sources)

    def end(layer: int) -> None:
        if layer == 1:
            first.close()

    assert fetched(reading.reader(packed.content_hash), packed, end)
    assert counted(reading) == (1, 0, 1)


def test_without_any_holder_the_directory_is_read(instances, packed, folder):
    one, two = instances(), instances()
    two.keep(bare(packed), folder)
    two.set_sources(packed.content_hash, [holder_of(one, packed)])
    one.drop(packed.content_hash)
    assert fetched(two.reader(packed.content_hash), packed)
    assert counted(two) == (0, 1, 1)
    two.set_sources(packed.content_hash, [])
    assert two.place(packed.content_hash) == "disk"


@pytest.mark.parametrize("instances", ["shm"], indirect=True)
def test_source_for_which_no_file_is_left_is_a_source_that_failed(instances, packed, folder, monkeypatch):
    def attach(descriptor: bytes) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    one, two = instances(), instances()
    two.keep(bare(packed), folder)
    two.set_sources(packed.content_hash, [holder_of(one, packed)])
    monkeypatch.setattr(two._transport, "attach", attach)
    assert fetched(two.reader(packed.content_hash), packed)
    assert counted(two) == (0, 1, 1)


@pytest.mark.parametrize("instances", ["shm"], indirect=True)
def test_windows_leave_files_for_what_is_fetched_and_read(instances, packed, folder, monkeypatch):
    one, two = instances(), instances()
    monkeypatch.setattr("moe_lora.engine.adapters.pool_store.num_open_files", lambda: two._max_files - 9)
    with pytest.raises(StorageError, match=r"Too many open files.*raise the limit with ulimit -n"):
        two.prepare(packed)
    two.keep(bare(packed), folder)
    two.set_sources(packed.content_hash, [holder_of_elsewhere(one, packed, monkeypatch)])
    assert fetched(two.reader(packed.content_hash), packed)
    assert counted(two) == (1, 0, 0)


def holder_of_elsewhere(instance: PoolAdapters, packed: PackedAdapter, monkeypatch) -> bytes:
    """`holder_of` in a process that has files left."""
    with monkeypatch.context() as patch:
        patch.setattr("moe_lora.engine.adapters.pool_store.num_open_files", lambda: 9)
        return holder_of(instance, packed)


def test_directory_that_can_not_be_read_is_tried_once(packed):
    tries = []

    def read(path: str, name: str, content_hash: str) -> PackedAdapter:
        tries.append(path)
        assert len(tries) == 1
        raise ValueError("whatever it is")

    with make_transport("shm", name="one") as transport:
        one = PoolAdapters(transport, read)
        one.keep(bare(packed), "folder")
        with pytest.raises(ValueError, match="whatever it is"):
            fetched(one.reader(packed.content_hash), packed)


@pytest.mark.parametrize("what", ["another adapter", "nothing"])
def test_directory_that_has_not_what_was_loaded_is_refused(what, instances, packed, folder, place):
    one = instances()
    one.keep(bare(packed), folder)
    shutil.rmtree(folder)
    if what == "another adapter":
        shutil.copytree(place[0].parent / "other", folder)
    with pytest.raises(AdapterError, match=r"is not what was loaded|adapter_config.json"):
        fetched(one.reader(packed.content_hash), packed)
    with pytest.raises(AdapterError):
        one.fetch_held(packed.content_hash, [])
    assert one.counters()["pool_bytes"] == 0


def test_a_holder_is_made_from_another_one(instances, packed):
    one, two, three = instances(), instances(), instances()
    two.keep(bare(packed), "nowhere")
    two.hold(two.fetch_held(packed.content_hash, [holder_of(one, packed)]))
    one.drop(packed.content_hash)
    assert has_data(two.find(packed.content_hash))
    three.keep(bare(packed), "nowhere")
    three.set_sources(packed.content_hash, [two.source(packed.content_hash)])
    assert fetched(three.reader(packed.content_hash), packed)


def test_an_adapter_that_is_unloaded_before_it_is_fetched_is_not_found(instances, packed):
    one = instances()
    one.forget(one.keep(bare(packed), "nowhere"))
    with pytest.raises(AdapterNotFoundError, match="no adapter of content"):
        one.fetch_held(packed.content_hash, [])


def test_what_is_held_for_others_is_checked(instances, packed):
    wrong, right, two = instances(), instances(), instances()
    sources = [holder_of(wrong, packed), holder_of(right, packed)]
    wrong.find(packed.content_hash).layers[1].data[3] += 1
    two.keep(bare(packed), "nowhere")
    two.hold(two.fetch_held(packed.content_hash, sources))
    assert torch.equal(two.find(packed.content_hash).layers[1].data, packed.layers[1].data)
    assert counted(two) == (1, 0, 1)


def test_load_that_is_not_kept_leaves_nothing(instances, packed):
    one = instances()
    files = num_memory_files()
    one.undo_prepare(one.prepare(packed))
    assert one.source(packed.content_hash) is None
    assert num_memory_files() == files
    one.keep(bare(packed))
    one.undo_prepare(bare(packed))
    assert one.knows(packed.content_hash)


def num_memory_files() -> int:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:moe_lora" in name for name in names)


@pytest.mark.parametrize("instances", ["shm"], indirect=True)
def test_memory_of_an_adapter_goes_with_it(instances, packed):
    def mapped() -> set[str]:
        gc.collect()
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in lines if "memfd:moe_lora" in line}

    one, two = instances(), instances()
    mapped()  # what earlier tests left is gone
    before = num_memory_files(), mapped()
    source = holder_of(one, packed)
    two.keep(bare(packed), "nowhere")
    two.set_sources(packed.content_hash, [source])
    assert fetched(two.reader(packed.content_hash), packed)
    assert mapped() - before[1]
    one.drop(packed.content_hash)
    num_files, num_mapped = num_memory_files(), mapped()
    assert num_files <= before[0], "those of earlier tests may go meanwhile"
    assert num_mapped <= before[1]


class Device:
    """A small arena and the copier over it."""

    def __init__(self, pool: PoolAdapters, shape: ModelShape, packed: PackedAdapter) -> None:
        self.layer_pages = ShardSizes(shape, PAGE_BYTES, [np.ones(1, bool)]).layer_pages(packed.layers)
        total = sum(self.layer_pages)
        self.arena = torch.full((total * PAGE_BYTES,), 0x7F, dtype=torch.uint8)
        self.host = torch.zeros(total * PAGE_BYTES, dtype=torch.uint8)
        self.slots = SlotTable(2, shape.num_layers, shape.num_entries, torch.device("cpu"))
        whole = np.ones(shape.num_entries, bool)
        arenas = Arenas(self.arena, self.host, PAGE_BYTES)
        self.copier = RankCopier(arenas, self.slots, shape, whole, pool.find, pool)

    def has(self, packed: PackedAdapter) -> bool:
        """Whether slot 0 leads to the adapter's matrices."""
        starts = [0, self.layer_pages[0] * PAGE_BYTES]
        bytes_right = all(
            torch.equal(self.arena[start : start + layer.nbytes], layer.data.view(torch.uint8))
            for start, layer in zip(starts, packed.layers, strict=True)
        )
        ranks = torch.stack([layer.table[:, 2] for layer in packed.layers])
        return bytes_right and torch.equal(self.slots.lora_rank[0].long(), ranks)


@pytest.mark.parametrize("instances", ["shm"], indirect=True)
def test_fetched_adapter_is_on_the_device_and_comes_back_from_the_host_arena(instances, packed, place):
    one, two = instances(), instances()
    source = holder_of(one, packed)
    two.keep(bare(packed), "nowhere")
    two.set_sources(packed.content_hash, [source])
    device = Device(two, place[1], packed)
    order = BringAdapter(0, packed.content_hash, (0, device.layer_pages[0]), None)
    assert device.copier.fetches(order)
    device.copier.carry_out(order)
    assert device.has(packed)
    pages = tuple(range(sum(device.layer_pages)))
    device.copier.carry_out(Copy(0, 1, True, False, pages, pages))
    device.copier.carry_out(ClearSlot(0))
    device.arena.fill_(0)
    one.close()
    back = BringAdapter(
        0, packed.content_hash, (0, device.layer_pages[0]), Copy(1, 1, True, True, pages, pages)
    )
    assert not device.copier.fetches(back)
    device.copier.carry_out(back)
    assert device.has(packed)


@pytest.mark.gpu
def test_layers_arrive_on_a_gpu_through_buffers_of_this_process(instances, packed):
    one, two = instances(), instances()
    source = holder_of(one, packed)
    two.keep(bare(packed), "nowhere")
    two.set_sources(packed.content_hash, [source])
    sizes = [layer.nbytes for layer in packed.layers]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8, device="cuda")
    reader = two.reader(packed.content_hash)
    assert reader is not None
    fetch_layers(reader, arena.split(sizes))
    torch.cuda.synchronize()
    assert torch.equal(arena.cpu(), torch.cat([layer.data.view(torch.uint8) for layer in packed.layers]))


@pytest.mark.parametrize("instances", ["shm"], indirect=True)
def test_adapter_that_was_dropped_comes_back_from_the_host_arena(instances, packed, place):
    one = instances()
    holder_of(one, packed)
    device = Device(one, place[1], packed)
    order = BringAdapter(0, packed.content_hash, (0, device.layer_pages[0]), None)
    assert not device.copier.fetches(order)
    copy = device.copier.begin(order)
    one.drop(packed.content_hash)
    assert list(copy)
    assert device.has(packed), "a copy ends with the bytes it began with"
    pages = tuple(range(sum(device.layer_pages)))
    device.copier.carry_out(Copy(0, 1, True, False, pages, pages))
    device.arena.fill_(0)
    back = BringAdapter(
        0, packed.content_hash, (0, device.layer_pages[0]), Copy(1, 1, True, True, pages, pages)
    )
    device.copier.carry_out(back)
    assert device.has(packed)
