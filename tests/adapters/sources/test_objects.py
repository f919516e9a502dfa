# SPDX-License-Identifier: Apache-2.0
"""Adapters in object storage, over fsspec's file system in memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fsspec
import pytest

from moe_lora.adapters import sources
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.sources import objects
from moe_lora.core.errors import AdapterError, PeerUnreachableError
from tests.adapters.peft_folders import peft_folder
from tests.forked_programs import start_program

LIMIT = 1 << 20


@pytest.fixture
def memory(tmp_path: Path):
    system = fsspec.filesystem("memory")
    system.put(str(peft_folder(tmp_path / "source", 1)), "/bucket/support", recursive=True)
    yield system
    system.rm("/bucket", recursive=True)


def fetch(tmp_path: Path) -> Path:
    return objects.fetch("memory://bucket/support", tmp_path / "cache", LIMIT)


def test_files_are_fetched_once_for_each_state(memory, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    assert (first / WEIGHTS_FILE).read_bytes() == (tmp_path / "source" / WEIGHTS_FILE).read_bytes()
    assert (first / CONFIG_FILE).is_file()
    stamp = (first / WEIGHTS_FILE).stat().st_mtime_ns
    assert fetch(tmp_path) == first
    assert (first / WEIGHTS_FILE).stat().st_mtime_ns == stamp
    memory.put(str(peft_folder(tmp_path / "source", 2) / WEIGHTS_FILE), f"/bucket/support/{WEIGHTS_FILE}")
    second = fetch(tmp_path)
    assert second != first
    assert (first / WEIGHTS_FILE).is_file()
    assert (second / WEIGHTS_FILE).read_bytes() != (first / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_incomplete_folder_is_fetched_again(is_cut, memory, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    if is_cut:
        (first / WEIGHTS_FILE).write_bytes(b"")
    else:
        (first / WEIGHTS_FILE).unlink()
    assert fetch(tmp_path) == first
    assert (first / WEIGHTS_FILE).read_bytes() == (tmp_path / "source" / WEIGHTS_FILE).read_bytes()
    assert [first] == list(first.parent.iterdir())


def test_the_last_two_states_of_each_address_stay(memory, tmp_path: Path) -> None:
    """The state before is perhaps in a load; the cache does not grow with each version."""
    memory.put(str(tmp_path / "source"), "/bucket/another", recursive=True)
    another = objects.fetch("memory://bucket/another", tmp_path / "cache", LIMIT)
    places = []
    for number in range(4):
        memory.pipe_file(f"/bucket/support/{CONFIG_FILE}", b" " * number)
        places.append(fetch(tmp_path))
        os.utime(places[-1], (number, number))
    assert set(another.parent.iterdir()) == {another, *places[2:]}


@pytest.mark.parametrize("is_old", [True, False])
def test_the_longest_unused_addresses_make_room_unless_used_within_a_day(
    is_old, memory, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sources, "_KEPT_ADAPTERS", 2)
    content = peft_folder(tmp_path / "source", 1)
    limit = sum(one.stat().st_size for one in content.iterdir())
    beside = tmp_path / "cache" / "objects" / "a file of the user"
    places = {}

    def fetched(name: str) -> None:
        memory.put(str(content), f"/bucket/{name}", recursive=True)
        places[name] = objects.fetch(f"memory://bucket/{name}", tmp_path / "cache", limit)

    for number, name in enumerate(("first", "second", "third")):
        fetched(name)
        if is_old:
            os.utime(places[name], (number, number))
        if name == "first":
            beside.write_bytes(bytes(10 * limit))
        if name == "second":
            fetched("first")  # in use again
            os.utime(places["first"], (2, 2) if is_old else None)
    left = [name for name, place in places.items() if place.exists()]
    assert left == (["first", "third"] if is_old else ["first", "second", "third"])
    assert beside.exists()


WRITER = """
import sys
from pathlib import Path
import fsspec
from moe_lora.adapters.sources import objects

def get_file(self, *names):
    print("writing", flush=True)
    sys.stdin.read()

memory = fsspec.filesystem("memory")
memory.put(sys.argv[1], "/bucket/support", recursive=True)
type(memory).get_file = get_file
objects.fetch("memory://bucket/support", Path(sys.argv[2]), 1 << 20)
"""


def test_the_files_of_a_killed_process_are_removed_by_the_next_fetch(memory, tmp_path: Path) -> None:
    words = str(tmp_path / "source"), str(tmp_path / "cache")
    writer = start_program(WRITER, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"writing\n"
    finally:
        writer.kill()
        writer.wait()
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 1
    place = fetch(tmp_path)
    assert list(place.parent.iterdir()) == [place]


def test_files_that_change_during_the_transfer_are_refused(memory, tmp_path: Path, monkeypatch) -> None:
    get = memory.get_file

    def changing(path: str, place: str) -> None:
        get(path, place)
        memory.pipe_file(f"/bucket/support/{CONFIG_FILE}", b'{"peft_type": "LORA"}')

    monkeypatch.setattr(type(memory), "get_file", lambda self, *args: changing(*args))
    with pytest.raises(AdapterError, match="changed during the transfer"):
        fetch(tmp_path)
    assert list((tmp_path / "cache" / "objects").iterdir()) == []


def test_missing_and_large_adapters_are_refused(memory, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="does not exist"):
        objects.fetch("memory://bucket/nobody", tmp_path, LIMIT)
    with pytest.raises(AdapterError, match=r"sources\.max_gb"):
        objects.fetch("memory://bucket/support", tmp_path, 10)


def test_a_failing_storage_is_a_passing_failure(memory, tmp_path: Path, monkeypatch) -> None:
    def broken(*args, **words) -> None:
        raise RuntimeError("slow down")

    monkeypatch.setattr(type(memory), "ls", broken)
    with pytest.raises(PeerUnreachableError, match="slow down"):
        fetch(tmp_path)


def test_files_fetched_again_during_a_look_for_unused_ones_stay(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "_KEPT_ADAPTERS", 1)
    places = [tmp_path / "objects" / f"{number:064x}-x" for number in range(3)]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        (place / "file").write_bytes(bytes(10))
        os.utime(place, (number, number))
    look = Path.rglob

    def fetch_beside(self: Path, pattern: str):
        if self == places[2]:
            os.utime(places[0])  # in another thread
        return look(self, pattern)

    monkeypatch.setattr(Path, "rglob", fetch_beside)
    sources.remove_unused(tmp_path, 10)
    assert [place.exists() for place in places] == [True, False, True]
