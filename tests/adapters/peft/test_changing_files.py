"""Adapter files that somebody writes while they are read."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import content_hash
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import read_adapter, read_files
from moe_lora.core.errors import AdapterError, StorageError
from tests.adapters.peft_folders import alter
from tests.families import make_adapter

READER = """
import sys, torch, json
from pathlib import Path
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

torch.set_num_threads(1)
shape = ModelShape.from_hf_config(json.loads(Path(sys.argv[2]).read_text()))
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
    reader = subprocess.Popen([sys.executable, "-c", READER, *words], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for _ in range(3000):
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
    read_text = Path.read_text

    def switch(path: Path, *args, **keywords):
        text = read_text(path, *args, **keywords)
        if path.name == CONFIG_FILE and not os.path.islink(path):
            fresh = tmp_path / "fresh"
            fresh.symlink_to(other)
            os.replace(fresh, link)
        return text

    monkeypatch.setattr(Path, "read_text", switch)
    config, weights, _ = read_files(link, shape_of("mixtral"))
    assert config.lora_rank == 16
    assert weights == (adapter / WEIGHTS_FILE).read_bytes()


def test_file_exchanged_while_the_other_is_read_is_refused(adapter, shape_of, monkeypatch):
    read_bytes = Path.read_bytes

    def rewrite(path: Path) -> bytes:
        content = read_bytes(path)
        (path.parent / CONFIG_FILE).write_text((path.parent / CONFIG_FILE).read_text() + " ")
        return content

    monkeypatch.setattr(Path, "read_bytes", rewrite)
    with pytest.raises(AdapterError, match="changed while they were read"):
        read_files(adapter, shape_of("mixtral"))


def test_file_that_vanishes_while_it_is_read_is_an_adapter_error(adapter, shape_of, monkeypatch):
    def lose(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", lose)
    with pytest.raises(AdapterError, match="load it again"):
        read_adapter(adapter, shape_of("mixtral"), torch.float32)


def test_store_without_room_says_so(adapter, shape_of, tmp_path):
    store = HostStore(tmp_path / "store")
    packed = read_adapter(adapter, shape_of("mixtral"), torch.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(StorageError, match="free room there"):
            store.put(packed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(store.directory.iterdir()) == []


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
