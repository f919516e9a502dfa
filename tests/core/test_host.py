"""Folders of processes: none is taken from one that lives, none stays of one that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
