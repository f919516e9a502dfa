# SPDX-License-Identifier: Apache-2.0
"""Records name a commit, so a changed tree writes none into bench/results, and elsewhere only when asked."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness import records
from bench.harness.records import ALLOW_DIRTY, COMMIT, TREES, Recorder, environment
from moe_lora.report.results import environment as this_environment
from moe_lora.report.results import read_results

BENCH = Path(records.__file__).parents[1]


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A committed repository with a program and a result file, in place of this one."""
    root = tmp_path / "tree"
    (root / "bench" / "results").mkdir(parents=True)
    (root / "program.py").write_text("1")
    (root / "bench" / "results" / "old.jsonl").write_text("")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        subprocess.run(command, check=True)
    monkeypatch.setattr(records, "ROOT", root)
    monkeypatch.setattr(records, "RESULTS", root / "bench" / "results")
    monkeypatch.delenv(ALLOW_DIRTY, raising=False)
    monkeypatch.delenv(COMMIT, raising=False)
    monkeypatch.delenv(TREES, raising=False)
    return root


def _commit(root: Path, message: str) -> None:
    for arguments in (["add", "."], ["commit", "-q", "-m", message]):
        command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        subprocess.run(command, check=True)


def _tree_ids(root: Path, *paths: str) -> dict[str, str]:
    command = ["git", "-C", str(root), "rev-parse", *(f"HEAD:{path}" for path in paths)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(zip(paths, found.stdout.split(), strict=True))


def _change(root: Path) -> None:
    (root / "program.py").write_text("2")


def test_a_committed_tree_records_its_commit(tree):
    env = environment(tree / "bench" / "results" / "old.jsonl")
    assert len(env["git_commit"]) == 40
    assert env["git_dirty"] is False
    assert set(env) == set(this_environment()) | {"git_trees"}


def test_a_record_names_the_trees_of_the_package_and_of_the_bench(tree):
    for path in ("moe_lora", "cli", "bench/harness", "bench/cache"):
        (tree / path).mkdir(parents=True)
        (tree / path / "a.py").write_text(path)
    _commit(tree, "second")
    asked = _tree_ids(tree, "moe_lora", "cli", "bench/harness")
    assert environment(None)["git_trees"] == asked
    assert records.git_trees(tree, "bench/cache") == asked | _tree_ids(tree, "bench/cache")
    _change(tree)
    assert "git_trees" not in environment(None), "a changed tree is not the committed one"


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("bench.cache.bench_cache", "bench/cache"),
        ("bench.cluster.simulated.cluster_simulated", "bench/cluster"),
        ("pytest.__main__", None),
        ("bench", None),
    ],
)
def test_the_folder_of_a_bench_is_the_running_modules(name, folder):
    assert records.bench_folder(SimpleNamespace(__spec__=SimpleNamespace(name=name))) == folder
    assert records.bench_folder(SimpleNamespace(__spec__=None)) is None


def test_a_changed_tree_writes_no_record_into_bench_results(tree, monkeypatch):
    _change(tree)
    for allowed in ("", "1"):
        monkeypatch.setenv(ALLOW_DIRTY, allowed)
        with pytest.raises(SystemExit, match=r"old\.jsonl: tracked files differ.*commit or stash"):
            environment(tree / "bench" / "results" / "old.jsonl")


def test_a_changed_tree_writes_elsewhere_only_when_asked_and_the_record_says_so(tree, tmp_path, monkeypatch):
    _change(tree)
    with pytest.raises(SystemExit, match=f"set {ALLOW_DIRTY}=1"):
        environment(str(tmp_path / "new.jsonl"))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    assert environment(str(tmp_path / "new.jsonl"))["git_dirty"] is True


def test_a_way_round_into_bench_results_is_seen(tree, tmp_path, monkeypatch):
    _change(tree)
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    (tmp_path / "link").symlink_to(tree / "bench" / "results")
    with pytest.raises(SystemExit):
        environment(tmp_path / "link" / "new.jsonl")


def test_records_added_by_a_run_that_was_stopped_do_not_count_as_changes(tree):
    (tree / "bench" / "results" / "old.jsonl").write_text("{}\n")
    assert environment(tree / "bench" / "results" / "old.jsonl")["git_dirty"] is False


def test_nothing_is_refused_where_nothing_is_written(tree):
    _change(tree)
    assert environment(None)["git_dirty"] is True


def test_a_tree_outside_of_git_is_not_refused(tree):
    subprocess.run(["rm", "-rf", str(tree / ".git")], check=True)
    assert environment(tree / "bench" / "results" / "old.jsonl")["git_commit"] is None


def test_a_copy_records_the_commit_that_it_was_made_of(tree, monkeypatch):
    _change(tree)
    monkeypatch.setenv(COMMIT, environment(None)["git_commit"])
    assert environment(None)["git_dirty"] is True, "that is this history's"
    for _ in range(2):  # a history of its own, then none
        monkeypatch.setenv(COMMIT, "a" * 40)
        copied = environment(tree / "bench" / "results" / "old.jsonl")
        assert (copied["git_commit"], copied["git_dirty"]) == ("a" * 40, None)
        subprocess.run(["rm", "-rf", str(tree / ".git")], check=True)
    monkeypatch.setenv(COMMIT, "HEAD")
    with pytest.raises(SystemExit, match=r"MOE_LORA_COMMIT='HEAD' is no commit; give all 40 digits"):
        environment(None)


def test_a_copy_records_the_trees_that_it_was_made_of(tree, monkeypatch):
    subprocess.run(["rm", "-rf", str(tree / ".git")], check=True)
    monkeypatch.setenv(COMMIT, "a" * 40)
    monkeypatch.setenv(TREES, f"moe_lora={'b' * 40} bench/gpu={'c' * 40}")
    env = environment(tree / "bench" / "results" / "old.jsonl")
    assert (env["git_commit"], env["git_dirty"]) == ("a" * 40, False)
    assert env["git_trees"] == {"moe_lora": "b" * 40, "bench/gpu": "c" * 40}
    for wrong in ("", "moe_lora", "moe_lora=abc"):
        monkeypatch.setenv(TREES, wrong)
        with pytest.raises(SystemExit, match=r"MOE_LORA_TREES=.*names no trees; give what python -m"):
            environment(None)


def test_the_state_for_a_copy_is_that_of_a_committed_tree(tree, monkeypatch, capsys):
    for folder in ("", "moe_lora", "bench/nothing"):
        with pytest.raises(
            SystemExit, match=f"'{folder}' is no committed folder of benches; give one such as"
        ):
            records._show_state(folder)
    (tree / "bench" / "gpu").mkdir()
    (tree / "bench" / "gpu" / "a.py").write_text("")
    _commit(tree, "second")
    records._show_state("bench/gpu")
    _change(tree)
    with pytest.raises(SystemExit, match="tracked files differ"):
        records._show_state("bench/gpu")
    subprocess.run(["rm", "-rf", str(tree / ".git")], check=True)
    commit, _, trees = capsys.readouterr().out.strip().partition(" ")
    for variable, value in (commit.split("=", 1), trees.split("=", 1)):
        monkeypatch.setenv(variable, value.strip('"'))
    copied = environment(None)
    assert (set(copied["git_trees"]), copied["git_dirty"]) == ({"bench/gpu"}, False)


def test_a_commit_of_an_earlier_day_is_not_taken_for_a_copys(tree, monkeypatch):
    earlier = environment(None)["git_commit"]
    _change(tree)
    named = ("-c", "user.name=n", "-c", "user.email=e@x")
    subprocess.run(["git", "-C", str(tree), *named, "commit", "-qam", "later"], check=True)
    monkeypatch.setenv(COMMIT, earlier)
    with pytest.raises(
        SystemExit, match=r"is a commit of this repository, which is at \w{40}; leave it unset"
    ):
        environment(None)


def test_recorder_keeps_what_it_writes(tree, tmp_path):
    record = Recorder(tmp_path / "new.jsonl", kind="simulated", device="here")
    record({"case": 1}, {"seconds": 2.0})
    record({"case": 2}, {"seconds": 3.0}, kind="measured")
    assert read_results(tmp_path / "new.jsonl") == record.records
    assert [one["kind"] for one in record.records] == ["simulated", "measured"]
    assert record.records[0]["env"]["device"] == "here"
    unwritten = Recorder(None)
    assert unwritten({}, {"a": 1})["result"] == {"a": 1}


def test_every_bench_takes_its_environment_from_here():
    for path in BENCH.rglob("*.py"):
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        sources = {node.module for node in imports if "environment" in {name.name for name in node.names}}
        assert sources <= {"bench.harness.records"} or path.name == "records.py", path.name
