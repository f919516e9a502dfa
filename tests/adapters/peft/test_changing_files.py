# SPDX-License-Identifier: Apache-2.0
"""Adapter files that somebody writes while they are read."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore, is_intact
from moe_lora.adapters.packed import content_hash
from moe_lora.adapters.peft import file_check
from moe_lora.adapters.peft.file_check import opened
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.match import match
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.engine.adapters.adapter_store import AdapterStore
from tests.adapters.peft_folders import alter
from tests.families import make_adapter
from tests.forked_programs import start_program

READER = """
import sys, torch, json
from pathlib import Path
from unittest.mock import Mock
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.families import shape_of

torch.set_num_threads(1)
shape = shape_of(json.loads(Path(sys.argv[2]).read_text()))
print("ready", flush=True)
hashes, refused = set(), 0
while not Path(sys.argv[3]).exists():
    try:
        hashes.add(read_adapter(sys.argv[1], shape, torch.float32).content_hash)
    except AdapterError:
        refused += 1
print(len(hashes), refused, flush=True)
"""


@pytest.fixture
def adapter(checkpoint, tmp_path):
    return make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "adapter", lora_rank=16)


def test_file_rewritten_in_place_while_it_is_read_is_refused_and_the_process_lives(
    checkpoint, adapter, tmp_path
):
    content = (adapter / WEIGHTS_FILE).read_bytes()
    done = tmp_path / "done"
    words = (str(adapter), str(checkpoint("mixtral") / "config.json"), str(done))
    reader = start_program(READER, *words, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"ready\n"
    for _ in range(300):
        if reader.poll() is not None:
            break
        with (adapter / WEIGHTS_FILE).open("wb", buffering=0) as file:  # as cp does
            for start in range(0, len(content), 1 << 12):
                file.write(content[start : start + (1 << 12)])
    done.touch()
    out, _ = reader.communicate()
    assert reader.returncode == 0, "the process that read it was ended"
    num_contents, num_refused = map(int, out.split())
    assert num_contents <= 1
    assert num_refused > 0


def test_folder_exchanged_between_its_two_files_is_never_a_mixture(
    checkpoint, adapter, shape_of, tmp_path, monkeypatch
):
    other = shutil.copytree(adapter, tmp_path / "other")
    (other / CONFIG_FILE).write_text((adapter / CONFIG_FILE).read_text().replace("16", "8"))
    link = tmp_path / "link"
    link.symlink_to(adapter)
    read_json = file_check.read_json

    def switch(*args):
        found = read_json(*args)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(other)
        os.replace(fresh, link)
        return found

    monkeypatch.setattr(file_check, "read_json", switch)
    with opened(link, shape_of("mixtral")) as found:
        assert found.match.layers[0][0].lora_rank == 16
        assert os.path.samestat(os.fstat(found.weights.fileno()), (adapter / WEIGHTS_FILE).stat())
    assert link.resolve() == other


def test_file_exchanged_while_the_other_is_read_is_refused(adapter, shape_of):
    with (
        pytest.raises(AdapterError, match="changed while they were read"),
        opened(adapter, shape_of("mixtral")),
    ):
        (adapter / CONFIG_FILE).write_text((adapter / CONFIG_FILE).read_text() + " ")


def test_file_that_vanishes_while_it_is_read_is_an_adapter_error(adapter, shape_of, monkeypatch):
    def lose(path: Path, *_) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(file_check, "open_file", lose)
    with pytest.raises(AdapterError, match="load it again"):
        read_adapter(adapter, shape_of("mixtral"), torch.float32)


def test_where_no_file_can_be_opened_it_says_so_and_not_that_the_adapter_is_bad(
    adapter, shape_of, monkeypatch
):
    def no_handle(*_) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    contents = AdapterContents(shape_of("mixtral"), torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr("moe_lora.adapters.peft.file_check.open_file", no_handle)
        with pytest.raises(StorageError, match=r"Too many open files; raise the limit .* ulimit -n"):
            contents.read("a", str(adapter))
        assert contents.read_all([("a", str(adapter))], leave_out_bad=True) == []
    assert contents.read("a", str(adapter)).name == "a"


def test_file_cut_after_its_header_was_checked_is_refused(adapter, shape_of, monkeypatch):
    def cut(*given):
        os.truncate(adapter / WEIGHTS_FILE, (adapter / WEIGHTS_FILE).stat().st_size - 100)
        return match(*given)

    monkeypatch.setattr(file_check, "match", cut)
    with pytest.raises(AdapterError, match="cut while it was read"):
        read_adapter(adapter, shape_of("mixtral"), torch.float32)


def test_store_without_room_says_so(adapter, shape_of, tmp_path, caplog):
    store = HostStore(tmp_path / "store")
    packed = read_adapter(adapter, shape_of("mixtral"), torch.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(StorageError, match="free room there") as found:
            store.put(packed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) not in str(found.value), "clients are told too"
    assert str(store.directory) in caplog.text
    assert list(store.directory.iterdir()) == []


def test_without_room_what_is_new_is_refused_and_what_is_served_already_is_served_on(
    adapter, shape_of, tmp_path, caplog
):
    contents = AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))
    known = read_adapter(adapter, shape_of("mixtral"), torch.float32).content_hash
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(StorageError):
            contents.read("a", str(adapter))
        with pytest.raises(StorageError):
            contents.read_all([("a", str(adapter))], leave_out_bad=False)
        assert contents.read("a", str(adapter), known).content_hash == known
        [(again, _)] = contents.read_all([("a", str(adapter))], leave_out_bad=True)
        assert again.content_hash == known
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("no copy of it is kept") == 2
    contents.read("a", str(adapter), known)
    assert known in HostStore(tmp_path / "store"), "it is kept once there is room"


KILLED_WRITER = """
import os, sys
from moe_lora.adapters.host_store import HostStore

def blocks():
    yield b"part of an adapter"
    print("writing", flush=True)
    sys.stdin.read()

HostStore(sys.argv[1]).adopt("0" * 64, blocks())
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_that_opens_the_store_and_no_sooner(tmp_path):
    writer = start_program(KILLED_WRITER, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"writing\n"
        HostStore(tmp_path)
        assert [len(list(one.iterdir())) for one in tmp_path.iterdir()] == [1], "it is being written"
    finally:
        writer.kill()
        writer.wait()
    assert len(list(tmp_path.iterdir())) == 1
    HostStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_stops_within_a_file_is_no_want_of_room(tmp_path):
    def blocks() -> Iterator[bytes]:
        yield b"part of an adapter"
        raise ConnectionError("the peer is gone")

    store = HostStore(tmp_path)
    with pytest.raises(ConnectionError, match="the peer is gone"):
        store.adopt("0" * 64, blocks())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_not_be_written_says_why(tmp_path, monkeypatch):
    def replace(*_: object) -> None:
        raise OSError("a reason without a number")

    monkeypatch.setattr("moe_lora.adapters.host_store.os.replace", replace)
    with pytest.raises(StorageError, match=r"on this host \(a reason without a number\); free room"):
        HostStore(tmp_path).adopt("0" * 64, [b"all of it"])
    assert list(tmp_path.iterdir()) == []


OPENS_AND_WRITES = """
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
import torch
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, PackedLayer

layer = PackedLayer(data=torch.ones(9), table=torch.zeros(1, 3, dtype=torch.int64), scale=torch.ones(1))
one = PackedAdapter(name="a", layers=(layer,), max_lora_rank=1, nbytes=36, targets=("q",), content_hash="0")
for number in range(100):
    store = HostStore(sys.argv[1])
    store.put(replace(one, content_hash=f"{sys.argv[2]}-{number}"))
"""


def test_processes_that_open_and_write_a_store_at_once_lose_nothing(tmp_path):
    writers = [start_program(OPENS_AND_WRITES, str(tmp_path), str(number)) for number in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(list(tmp_path.glob("*.packed.safetensors"))) == len(list(tmp_path.iterdir())) == 200


def test_file_that_the_store_has_lost_is_written_again_while_it_is_in_use(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    packed = read_adapter(adapter, shape_of("mixtral"), torch.float32)
    store.put(packed)
    used = store.get(packed.content_hash, "a")
    shutil.rmtree(store.directory)
    assert store.get(packed.content_hash, "b").name == "b"
    assert store.restore(packed.content_hash)
    assert content_hash(HostStore(store.directory).get(packed.content_hash, "a").layers) == used.content_hash
    assert not store.restore("another")


def test_kept_content_that_was_altered_is_not_served(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of("mixtral"), torch.float32, store)
    first = contents.read("a", str(adapter)).content_hash
    alter(store.path(first))
    assert contents.read("a", str(adapter), first).content_hash == first, "the folder has it still"
    alter(store.path(first))
    alter(adapter / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="does not hold what was loaded"):
        contents.read("a", str(adapter), first)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_damaged_copy_of_a_read_folder_is_written_again(is_empty, adapter, shape_of, tmp_path):
    """As after a power cut: the name stands, with other bytes."""
    store = HostStore(tmp_path / "store")
    content = AdapterContents(shape_of("mixtral"), torch.float32, store).read("a", str(adapter)).content_hash
    if is_empty:
        store.path(content).write_bytes(b"")
    else:
        alter(store.path(content))
    again = AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))
    packed = again.read("a", str(adapter))
    kept = AdapterStore(in_files=True, store=again.store).keep(packed)
    assert is_intact(kept)
    inode = store.path(content).stat().st_ino
    again.read("a", str(adapter))
    assert store.path(content).stat().st_ino == inode, "an intact file stays"


def test_a_file_s_bytes_are_on_the_disk_before_its_name(tmp_path, monkeypatch):
    seen = []
    store = HostStore(tmp_path)

    def fsync(handle: int) -> None:
        seen.append((os.fstat(handle).st_size, "0" * 64 in store))

    monkeypatch.setattr(os, "fsync", fsync)
    store.adopt("0" * 64, [b"all", b" of it"])
    assert seen == [(9, False)]


def test_contents_of_two_versions_are_kept_and_none_of_what_is_unloaded(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of("mixtral"), torch.float32, store)
    hashes = []
    for _ in range(3):
        alter(adapter / WEIGHTS_FILE, place=-len(hashes) * 4 - 1)
        hashes.append(contents.read("a", str(adapter)).content_hash)
        contents.serve("a", hashes[-1])
    assert [one in store for one in hashes] == [False, True, True]
    contents.serve("b", hashes[-1])
    contents.forget("a")
    assert [one in store for one in hashes] == [False, False, True]


def age(path: Path) -> None:
    old_s = time.time() - 2 * 24 * 3600
    os.utime(path, (old_s, old_s))


def test_contents_of_earlier_processes_go_unless_used_within_a_day(adapter, shape_of, tmp_path, monkeypatch):
    store, hashes = HostStore(tmp_path / "store"), []

    def load(contents: AdapterContents, number: int) -> None:
        alter(adapter / WEIGHTS_FILE, place=-number * 4 - 1)
        hashes.append(contents.read("a", str(adapter)).content_hash)
        contents.serve("a", hashes[-1])

    first = AdapterContents(shape_of("mixtral"), torch.float32, store)
    for number in range(2):
        load(first, number)
    for one in hashes:
        age(store.path(one))
    again = AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))
    load(again, 2)
    assert [one in store for one in hashes] == [True] * 3, "its adapters may still be on their way"
    monkeypatch.setattr("moe_lora.adapters.host_store._SWEEP_S", 0.0)
    again = AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))
    again.serve("a", again.read("a", str(adapter), hashes[1]).content_hash)
    load(again, 3)
    assert [one in store for one in hashes] == [False, True, True, True]
    age(store.path(hashes[2]))
    age(store.path(hashes[3]))
    load(again, 4)
    assert [one in store for one in hashes] == [False, False, False, True, True], "a served content is used"


def test_files_that_a_server_rank_used_last_days_ago_go(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_lora.adapters.host_store._SWEEP_S", 0.0)
    store = HostStore(tmp_path)
    for name in "abc":
        store.adopt(name, [b"content"])
        if name == "a":
            age(store.path(name))
    assert [name in store for name in "abc"] == [False, True, True]


@pytest.mark.parametrize("use", ["mapped", "restored", "read by hash"])
def test_a_used_file_is_new_for_every_process_s_sweep(use, adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of("mixtral"), torch.float32, store)
    used = contents.read("a", str(adapter)).content_hash
    mapped = store.get(used, "a") if use == "mapped" else None
    age(store.path(used))
    if use == "restored":
        assert store.restore(used)
    elif use == "read by hash":
        contents.read("a", str(adapter), used)
    sweeping = store if use == "mapped" else HostStore(tmp_path / "store")
    sweeping.sweep_s = 0.0
    sweeping.adopt("0" * 64, [b"content"])
    assert used in store
    assert (mapped is not None) == (use == "mapped")


def test_another_user_s_file_is_present(adapter, shape_of, tmp_path, monkeypatch):
    store = HostStore(tmp_path / "store")
    packed = AdapterContents(shape_of("mixtral"), torch.float32, store).read("a", str(adapter))
    inode = store.path(packed.content_hash).stat().st_ino
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError(errno.EPERM, "not its owner")))
    assert not store.put(packed)
    assert store.restore(packed.content_hash)
    assert store.path(packed.content_hash).stat().st_ino == inode


def test_the_file_of_a_refused_load_goes_unless_a_name_uses_it(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of("mixtral"), torch.float32, store)
    used = contents.read("a", str(adapter)).content_hash
    contents.serve("a", used)
    other = AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))
    for refused in (contents, other):
        refused.discard(refused.read("b", str(adapter)).content_hash)
        assert used in store, "another process of the host may use what it wrote"
    alter(adapter / WEIGHTS_FILE)
    refused = contents.read("a", str(adapter)).content_hash
    assert refused in store
    contents.discard(refused)
    assert [one in store for one in (used, refused)] == [True, False]


def test_a_refused_load_leaves_the_file_to_an_equal_load_under_way(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    contents = AdapterContents(shape_of("mixtral"), torch.float32, store)
    for known in (None, contents.read("a", str(adapter)).content_hash):
        content = contents.read("b", str(adapter), known).content_hash
        contents.discard(content)
        assert content in store, "the other load is under way"
        contents.discard(content)
        assert content not in store
        contents.read("a", str(adapter))
    contents.read("b", str(adapter))
    contents.discard(content)
    contents.serve("b", content)
    assert content in store
    contents.read("c", str(adapter))
    contents.forget("b")
    assert content in store
    contents.discard(content)
    assert content not in store


def test_a_refused_load_leaves_the_file_that_another_process_wrote_after_a_loss(adapter, shape_of, tmp_path):
    def contents() -> AdapterContents:
        return AdapterContents(shape_of("mixtral"), torch.float32, HostStore(tmp_path / "store"))

    first, other = contents(), contents()
    used = first.read("a", str(adapter)).content_hash
    first.serve("a", used)
    first.store.remove(used)
    first.read("a", str(adapter), used, loads=False)
    first.forget("a")
    assert used not in other.store
    other.serve("z", other.read("z", str(adapter)).content_hash)
    first.discard(first.read("b", str(adapter)).content_hash)
    assert used in other.store
