# SPDX-License-Identifier: Apache-2.0
"""Folders of processes: none is taken from one that lives, none stays of one that was killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from moe_lora.core import host
from moe_lora.core.address import unix_socket
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import OwnFolder

HOLDS_ONE = """
import sys
from pathlib import Path
from moe_lora.core.host import OwnFolder
folder = OwnFolder(Path(sys.argv[1]))
(folder.path / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_folder_of_a_killed_process_goes_when_the_next_one_is_made(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(other.stdout.readline().strip())
    with OwnFolder(tmp_path) as own:
        assert sorted(tmp_path.iterdir()) == sorted((own, folder))
        other.kill()
        other.communicate()
        assert (folder / "file").exists()
        with OwnFolder(tmp_path) as second:
            assert sorted(tmp_path.iterdir()) == sorted((own, second)), "and no other's"
    assert not list(tmp_path.iterdir())


def test_folder_can_be_removed_twice_and_only_its_user_enters(tmp_path):
    folder = OwnFolder(tmp_path, "some-")
    assert folder.path.name.startswith("some-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def fail(number: int):
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize(
    ("where", "what", "number"),
    [
        (host.os, "open", errno.EMFILE),
        (host.fcntl, "flock", errno.ENOLCK),
        (Path, "rename", errno.ENOSPC),
    ],
)
def test_folder_that_can_not_be_made_leaves_nothing_behind(tmp_path, monkeypatch, where, what, number):
    before = host.num_open_files()
    with monkeypatch.context() as patched:
        patched.setattr(where, what, fail(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            OwnFolder(tmp_path)
    assert not list(tmp_path.iterdir())
    assert host.num_open_files() == before


@pytest.mark.parametrize("number", [errno.EBADF, errno.EOPNOTSUPP])
def test_where_folders_have_no_locks_one_is_made_and_none_is_taken_for_a_killed_processs(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(host.fcntl, "flock", fail(number))
    with OwnFolder(tmp_path) as one, OwnFolder(tmp_path) as two:
        assert sorted(tmp_path.iterdir()) == sorted((one, two))
    assert not list(tmp_path.iterdir())


def test_folder_of_a_process_killed_before_it_had_its_name_goes_later(tmp_path):
    prefix = host._of_host("some-")
    old, new, locked = (tmp_path / f"new-{prefix}{name}" for name in ("old", "new", "locked"))
    for folder in (old, new, locked):
        folder.mkdir()
    for folder in (old, locked):
        os.utime(folder, (time.time() - 3600,) * 2)
    with host.folder_locked(locked), OwnFolder(tmp_path, "some-") as own:
        assert sorted(tmp_path.iterdir()) == sorted((own, new, locked)), "these may be in use"
    with OwnFolder(tmp_path, "some-") as own:
        assert sorted(tmp_path.iterdir()) == sorted((own, new))


def test_hosts_that_share_a_home_take_nothing_from_each_other(tmp_path, monkeypatch):
    """As where a lock is not seen by another host: its process would take the folder for a killed one's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shared, states, left = tmp_path / "shared", [], []
    shared.mkdir()
    for name in ("one", "two/../x"):
        monkeypatch.setattr(host.platform, "node", lambda name=name: name)
        states.append(host.state_folder(None))
        own = OwnFolder(shared, "some-")
        os.close(own._handle)  # its process was killed, as far as others can tell
        left.append(own.path)
        assert all(folder.exists() for folder in left)
    assert {state.parent for state in states} == {tmp_path / "moe_lora"}
    assert len(set(states)) == 2
    with OwnFolder(shared, "some-"):
        assert [folder.exists() for folder in left] == [True, False], "its own is cleaned up"


def test_contents_of_an_earlier_version_are_told_of_until_they_are_moved(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    former = tmp_path / "moe_lora"
    (former / "contents-1").mkdir(parents=True)
    host.state_folder(str(tmp_path / "given"))
    assert not caplog.records
    folder = host.state_folder(None)
    assert f"contents-1 in {former}" in caplog.text
    caplog.clear()
    (former / "contents-1").rename(folder / "contents-1")
    host.state_folder(None)
    assert not caplog.records


def test_open_files_are_counted_where_the_system_tells_them(monkeypatch):
    before = host.num_open_files()
    with open(os.devnull):
        assert host.num_open_files() == before + 1
    with monkeypatch.context() as patched:
        patched.setattr(host.os, "listdir", fail(errno.ENOENT))
        assert host.num_open_files() == 0
        patched.setattr(host.os, "listdir", fail(errno.EMFILE))
        with pytest.raises(OSError, match="Too many"):
            host.num_open_files()


def test_a_folder_for_sockets_names_a_long_tmpdir(tmp_path, monkeypatch):
    long = tmp_path / (107 * "x")
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=rf"TMPDIR={long} is \d+ bytes too long for the paths of sockets"):
        host.socket_folder("engines")
    assert not list(long.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with host.socket_folder("engines") as folder, unix_socket(str(folder / "engines")):
        assert folder.parent == Path("/tmp")
