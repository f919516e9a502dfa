# SPDX-License-Identifier: Apache-2.0
"""Result files and the environment they record."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.report import append_result, environment, read_results, write_json
from moe_lora.report.results import check_targets, git_state, write_text


def append(path: Path, number: int) -> None:
    append_result(path, config={"number": number}, result={"x": 1.5}, env={}, kind="measured")


def test_appended_records_are_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "r.jsonl"
    append(path, 1)
    append(path, 2)
    assert [record["config"]["number"] for record in read_results(path)] == [1, 2]
    assert set(read_results(path)[0]) == {"config", "result", "env", "kind"}
    assert [item.name for item in path.parent.iterdir()] == ["r.jsonl"]


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    threads = [threading.Thread(target=append, args=(path, number)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {record["config"]["number"] for record in read_results(path)} == set(range(12))


def test_file_stays_as_it_was_if_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match=r"JSON compliant|not JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_pipe_is_written_to_and_a_link_keeps_pointing(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    target.write_text("before")
    link.symlink_to(target)
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_targets_that_cant_be_written_are_refused_by_option(tmp_path: Path) -> None:
    for given, words in (
        ({"out": tmp_path}, "--out=.* is a folder"),
        ({"report": Path(__file__) / "x"}, "--report=.*no folder"),
        ({"out": tmp_path / "x", "report": f"{tmp_path}/../{tmp_path.name}/x"}, "--out and --report"),
    ):
        with pytest.raises(ValueError, match=words):
            check_targets(**given)
    check_targets(out=tmp_path / "x", report=None)
    assert not list(tmp_path.iterdir())
    check_targets(out=tmp_path / "a" / "b" / "x")
    assert (tmp_path / "a" / "b").is_dir()


def test_no_file_that_is_read_is_written(tmp_path: Path) -> None:
    read = tmp_path / "read"
    read.write_text("before")
    (tmp_path / "link").symlink_to(read)
    (tmp_path / "hard").hardlink_to(read)
    for name in ("read", "link", "hard", "../" + tmp_path.name + "/read"):
        with pytest.raises(ValueError, match=r"--out=.* is a file to read too; write to another"):
            check_targets([None, "no such file", read], out=tmp_path / name)
    check_targets([read, "/dev/null"], out=tmp_path / "new", report="/dev/null")


@pytest.mark.parametrize(
    "words",
    [
        ("report", "FILE", "--out", "FILE"),
        ("operating-points", "--simulate", "FILE", "--out", "FILE", "--slo-ttft-s", "1", "--slo-tpot-s", "1"),
        ("provision", "--trace", "FILE", "--model", "DBRX", "--out", "FILE"),
        ("provision", "--trace", __file__, "--model", "DBRX", "--hardware", "FILE", "--report", "FILE"),
        ("provision", "--trace", __file__, "--model", "DBRX", "--popularity", "trace:FILE", "--out", "FILE"),
        ("replay", "--trace", "FILE", "--append-result", "FILE"),
        ("replay", "--trace", __file__, "--prompts", "FILE", "--save-result", "FILE"),
    ],
)
def test_commands_refuse_to_write_a_file_that_they_read(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    result = CliRunner().invoke(main, [word.replace("FILE", str(file)) for word in words])
    assert result.exit_code != 0
    assert "is a file to read too" in result.output
    assert file.read_text() == "before"


def test_a_file_in_a_folder_without_the_right_to_write_is_refused_and_a_device_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("before")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for name in ("x", "new"):
        with pytest.raises(ValueError, match=rf"--out=.*the folder {tmp_path} can't be written; write else"):
            check_targets(out=tmp_path / name)
    check_targets(out="/dev/null")


def test_a_full_disk_is_an_error_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text("/dev/full", "after")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "plan.yaml"
    target.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        write_text(target, "after")
    assert [one.name for one in tmp_path.iterdir()] == ["plan.yaml"]
    assert target.read_text() == "before"


def test_kind_must_say_how_the_numbers_came_about(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured, simulated, emulated"):
        append_result(tmp_path / "r", config={}, result={}, env={}, kind="guessed")


def test_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, 1)
    path.write_text(path.read_text() + '{"config": 1}\n')
    with pytest.raises(ValueError, match="line 2: needed keys"):
        read_results(path)


def test_environment_names_versions_but_not_the_machine() -> None:
    found = environment()
    assert found["python"] == platform.python_version()
    assert found["cpu_cores"] >= 1
    assert found["packages"]["numpy"]
    assert socket.gethostname() not in json.dumps(found).split('"')


def test_git_commit_is_recorded_and_changes_are_noticed(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"git_commit": None, "git_dirty": None}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert git_state(tmp_path) == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["git_dirty"] is True
