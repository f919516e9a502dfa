# SPDX-License-Identifier: Apache-2.0
"""The registry as one process sees it: versions, states, files, refusals."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.registry.content_store import MANIFEST_FILE
from moe_lora.adapters.registry.registry import DATABASE_FILE, SCHEMA_VERSION, Registry
from moe_lora.core.errors import AdapterError, AdapterExistsError, AdapterNotFoundError, RegistryError
from tests.adapters.peft_folders import BASE, OTHER_BASE, alter, peft_folder


@pytest.fixture
def registry(tmp_path):
    with Registry(tmp_path / "registry", create=True) as opened:
        yield opened


@pytest.fixture
def source(tmp_path):
    """content → PEFT folder."""
    return lambda content, **options: peft_folder(tmp_path / f"source-{content}", content, **options)


def stored(registry: Registry) -> set[str]:
    """Names in the store, those of unfinished work too."""
    return {place.name for place in (registry.folder / "store").iterdir()} - {".lock"}


def test_an_added_adapter_has_its_facts_and_its_files(registry, source):
    folder = source(1, lora_rank=3)
    added = registry.add("x", folder, base_hash=BASE, owner="me")
    assert (added.name, added.version, added.state, added.owner) == ("x", 1, "ready", "me")
    assert (added.lora_rank, added.alpha, added.targets) == (3, 4.0, ("k_proj", "q_proj"))
    assert added.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    shutil.rmtree(folder)
    resolved = registry.resolve("x", BASE)
    assert resolved == added
    assert {path.name for path in Path(resolved.path).iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE}


@pytest.mark.parametrize(
    ("key", "fields", "expected"),
    [
        ("q_proj", {"rank_pattern": {"q_proj": 9}}, 9),
        ("q_proj", {"r": 64, "rank_pattern": {"q_proj": 4}}, 4),
        ("q_proj", {"r": 64, "rank_pattern": {"k_proj": 4}}, 64),
        ("mlp.experts", {"r": 64, "rank_pattern": {"down_proj": 4}}, 4),
        ("mlp.experts.base_layer", {"r": 64, "rank_pattern": {"experts.down_proj": 4}}, 4),
        ("mlp.experts", {"r": 64, "rank_pattern": {"weight": 4}}, 64),
    ],
)
def test_the_rank_is_the_largest_of_the_tensors(registry, tmp_path, key, fields, expected):
    folder = peft_folder(tmp_path / "a", 1, target_parameters=["experts.down_proj", "gate.weight"], **fields)
    weights = {f"base_model.model.{key}.lora_A.weight": np.zeros((expected, 8), np.float32)}
    save_file(weights, folder / WEIGHTS_FILE)
    assert registry.add("x", folder, base_hash=BASE, max_lora_rank=expected).lora_rank == expected


def test_new_content_is_a_new_version_and_the_same_content_is_none(registry, source):
    first = registry.add("x", source(1), base_hash=BASE)
    assert registry.add("x", source(1), base_hash=BASE) == first
    assert registry.add("x", source(2), base_hash=BASE).version == 2
    assert registry.add("x", source(1), base_hash=BASE).version == 3, "back to what was"
    assert [one.version for one in registry.versions("x")] == [1, 2, 3]
    assert registry.get("x").version == 3
    assert registry.get("x", 1) == first
    assert len(stored(registry)) == 2


def test_an_addition_corrects_the_rank_of_all_rows_of_a_content(registry, source):
    for name in "xy":
        registry.add(name, source(1, lora_rank=3), base_hash=BASE)
    registry.remove("y")
    with registry._database.writing() as connection:
        connection.execute("UPDATE adapters SET lora_rank = 64")  # of a former reader
    assert registry.add("x", source(1, lora_rank=3), base_hash=BASE).lora_rank == 3
    [removed] = registry.versions("y")
    assert (removed.lora_rank, removed.state) == (3, "removed")


def test_names_share_content_until_the_last_is_removed(registry, source):
    path = Path(registry.add("x", source(1), base_hash=BASE).path)
    registry.add("y", source(1), base_hash=BASE)
    registry.remove("x")
    assert path.is_dir()
    registry.remove("y")
    assert not path.exists()
    assert stored(registry) == set()


def test_removing_the_current_version_brings_back_the_one_before(registry, source):
    registry.add("x", source(1), base_hash=BASE)
    registry.add("x", source(2), base_hash=BASE)
    assert [one.version for one in registry.remove("x", 2)] == [2]
    assert registry.resolve("x", BASE).version == 1
    assert registry.add("x", source(3), base_hash=BASE).version == 3, "numbers are not used again"
    with pytest.raises(AdapterError, match="was removed"):
        registry.resolve("x", BASE, 2)


def test_what_is_not_there_is_named(registry, source):
    registry.add("x", source(1), base_hash=BASE)
    registry.remove("x")
    for call in (
        lambda: registry.get("x"),
        lambda: registry.remove("x"),
        lambda: registry.get("x", 7),
        lambda: registry.versions("nobody"),
        lambda: registry.resolve("nobody", BASE),
        lambda: registry.resolve("\ud800", BASE),
    ):
        with pytest.raises(AdapterNotFoundError, match="registry"):
            call()


def test_an_adapter_of_another_base_is_refused_and_its_name_stays_that_bases(registry, source):
    registry.add("x", source(1), base_hash=BASE)
    with pytest.raises(AdapterError, match="bbbbbbbbbbbb, this one is cccccccccccc"):
        registry.resolve("x", OTHER_BASE)
    with pytest.raises(AdapterExistsError, match="choose another name"):
        registry.add("x", source(2), base_hash=OTHER_BASE)
    assert len(stored(registry)) == 1
    registry.remove("x")
    assert registry.add("x", source(2), base_hash=OTHER_BASE).version == 2


def test_lists_are_of_current_versions_by_name_and_can_be_read_in_parts(registry, source):
    for name in ("b", "a", "d", "c"):
        registry.add(name, source(1), base_hash=BASE)
    registry.add("a", source(2), base_hash=BASE)
    registry.add("e", source(1), base_hash=OTHER_BASE)
    registry.remove("d")
    assert [(one.name, one.version) for one in registry.adapters(base_hash=BASE)] == [
        ("a", 2),
        ("b", 1),
        ("c", 1),
    ]
    first = registry.adapters(limit=2)
    assert [one.name for one in first] == ["a", "b"]
    assert [one.name for one in registry.adapters(after=first[-1].name, limit=2)] == ["c", "e"]
    assert registry.adapters(state="broken") == []


DAMAGE = {
    "altered": lambda folder: alter(folder / WEIGHTS_FILE),
    "cut short": lambda folder: os.truncate(folder / WEIGHTS_FILE, 20),
    "lost": lambda folder: (folder / WEIGHTS_FILE).unlink(),
    "config altered": lambda folder: alter(folder / CONFIG_FILE),
    "manifest lost": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "manifest altered": lambda folder: alter(folder / MANIFEST_FILE),
    "all lost": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_noticed_named_and_repaired_by_adding_again(registry, source, damage):
    added = registry.add("x", source(1), base_hash=BASE)
    registry.add("twin", source(1), base_hash=BASE)
    registry.add("whole", source(2), base_hash=BASE)
    DAMAGE[damage](Path(added.path))
    with pytest.raises(AdapterError, match=f"{added.path}.*(lost|altered).*add it again from its source"):
        registry.resolve("x", BASE)
    assert [one.name for one in registry.adapters(state="broken")] == ["twin", "x"]
    assert [(one.name, problem is None) for one, problem in registry.check()] == [
        ("twin", False),
        ("whole", True),
        ("x", False),
    ]
    assert registry.add("x", source(1), base_hash=BASE) == added
    assert registry.resolve("twin", BASE).state == "ready"
    assert all(problem is None for _, problem in registry.check())


def test_files_that_come_back_by_themselves_are_ready_again(registry, source):
    path = Path(registry.add("x", source(1), base_hash=BASE).path)
    path.rename(path.with_name("elsewhere"))
    [(_, problem)] = registry.check()
    assert problem is not None
    path.with_name("elsewhere").rename(path)
    assert registry.check()[0][1] is None
    assert registry.get("x").state == "ready"


def test_linked_files_stay_where_they_are_and_are_watched_there(registry, source):
    folder = source(1)
    added = registry.add("x", folder, base_hash=BASE, link=True)
    assert (Path(added.path) / WEIGHTS_FILE).resolve() == folder / WEIGHTS_FILE
    (folder / WEIGHTS_FILE).rename(folder / "moved")
    with pytest.raises(AdapterError, match=f"a link to {folder / WEIGHTS_FILE}.* is lost"):
        registry.resolve("x", BASE)
    (folder / "moved").rename(folder / WEIGHTS_FILE)
    assert registry.add("x", folder, base_hash=BASE).version == 1, "now copied"
    shutil.rmtree(folder)
    assert registry.resolve("x", BASE).state == "ready"
    registry.add("x", source(1), base_hash=BASE, link=True)
    assert not (Path(added.path) / WEIGHTS_FILE).is_symlink(), "a copy does not become a link"


@pytest.mark.parametrize("name", ["", "a,b", "a\nb", "x" * 300, "\ud800", "nul\0"])
def test_names_that_can_not_be_served_are_refused(registry, source, name):
    with pytest.raises(AdapterError, match="the name"):
        registry.add(name, source(1), base_hash=BASE)
    assert stored(registry) == set()


@pytest.mark.parametrize("owner", ["a\nb", "x" * 300, "\ud800"])
def test_owners_that_can_not_be_shown_are_refused(registry, source, owner):
    with pytest.raises(AdapterError, match="owner"):
        registry.add("x", source(1), base_hash=BASE, owner=owner)


BAD_FOLDERS = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no config": (lambda folder: (folder / CONFIG_FILE).unlink(), CONFIG_FILE),
    "config that is no JSON": (lambda folder: (folder / CONFIG_FILE).write_text("{"), "not valid JSON"),
    "another kind": (lambda folder: (folder / CONFIG_FILE).write_text('{"peft_type": "IA3"}'), "IA3"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), WEIGHTS_FILE),
    "weights cut short": (lambda folder: os.truncate(folder / WEIGHTS_FILE, 30), "copy it again"),
    "a pickle": (lambda folder: (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin"), "pickle"),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_folders_that_are_no_adapter_are_refused_and_leave_nothing(registry, source, kind):
    damage, named = BAD_FOLDERS[kind]
    folder = source(1)
    damage(folder)
    with pytest.raises(AdapterError, match=named):
        registry.add("x", folder, base_hash=BASE)
    assert stored(registry) == set()
    assert registry.adapters() == []


def test_a_folder_of_something_else_does_not_become_a_registry(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for create in (False, True):
        with pytest.raises(RegistryError, match="not a registry"):
            Registry(tmp_path, create=create)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    with pytest.raises(RegistryError, match="moe-lora adapters add"):
        Registry(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("version", "way_out"), [(SCHEMA_VERSION + 1, "or a later one"), (0, "to a new registry")]
)
def test_another_schema_version_is_refused_with_both_versions(tmp_path, registry, version, way_out):
    database = sqlite3.connect(registry.folder / DATABASE_FILE)
    database.execute(f"PRAGMA user_version = {version}")
    database.close()
    with pytest.raises(
        RegistryError, match=f"has schema version {version}, this .*{SCHEMA_VERSION}.*{way_out}"
    ):
        Registry(registry.folder)


def test_another_programs_database_and_a_damaged_one_are_refused(tmp_path):
    database = sqlite3.connect(tmp_path / DATABASE_FILE)
    database.execute("CREATE TABLE mine (x)")
    database.close()
    with pytest.raises(RegistryError, match="another program"):
        Registry(tmp_path)
    (tmp_path / DATABASE_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(RegistryError, match=r"file is not a database.*backup"):
        Registry(tmp_path)


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="file/x can't be opened: Not a directory"):
        Registry(tmp_path / "file" / "x", create=True)


def test_unfinished_work_of_a_killed_writer_goes_when_the_registry_is_opened_again(registry, source):
    registry.add("x", source(1), base_hash=BASE)
    (left := registry.folder / "store" / ".staged-killed").mkdir()
    (left / WEIGHTS_FILE).write_bytes(b"part")
    with Registry(registry.folder) as again:
        assert len(stored(again)) == 1
        assert again.resolve("x", BASE).version == 1


def test_a_registry_that_became_read_only_is_served_and_refuses_changes(registry, source, monkeypatch):
    registry.add("x", source(1), base_hash=BASE)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(RegistryError, match=r"Read-only file system.*check disk and permissions"):
        registry.add("y", source(2), base_hash=BASE)
    assert registry.resolve("x", BASE).version == 1
    assert [one.name for one in registry.adapters()] == ["x"]


def test_a_registry_can_be_moved(tmp_path, source):
    with Registry(tmp_path / "here", create=True) as registry:
        registry.add("x", source(1), base_hash=BASE)
    (tmp_path / "here").rename(tmp_path / "there")
    with Registry(tmp_path / "there") as registry:
        assert registry.resolve("x", BASE).path.startswith(str(tmp_path / "there"))


def test_nothing_of_it_needs_torch():
    modules = "moe_lora.adapters.registry.registry, moe_lora.adapters.registry.base_model"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
