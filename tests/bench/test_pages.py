# SPDX-License-Identifier: Apache-2.0
"""Blocks of pages are tables of valid records: a changed digit, a lost commit or a changed tree fails.

A new number outside of blocks fails too, as do records in files without a page, and a part of a history.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.harness.records import RESULTS, ROOT
from bench.pages import TABLES, blocks, claims, evidence, python_api
from bench.pages.evidence import History, RecordError, exceptions, is_dirty, is_stateless, problem, records
from bench.pages.table import table
from moe_lora.report.results import read_results

STATELESS = {
    "gpu.jsonl": {
        "02bd5e7bfa1d655a858dcdca53449b94409b52e2": 545,
        "37d771ca137fe4bac8a9b61161e0053fa2ddd9a9": 76,
        "a8c6293629799709442a301500eaf602203dbd18": 397,
        "ce4a1e7689a92b3c730df742d73ad29af7044218": 101,
    },
    "lora_kernels_gpu.jsonl": {"ce4a1e7689a92b3c730df742d73ad29af7044218": 54},
}
"""The exceptions of 26 November 2026.  Numbers may fall; device runs pass a state."""
PLANS = ROOT / "docs" / "results" / "plans.md"


@pytest.fixture(autouse=True)
def in_a_clone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with blocks, in a new tree."""
    found = tmp_path / "docs" / "results" / "plans.md"
    found.parent.mkdir(parents=True)
    found.write_text(PLANS.read_text(encoding="utf-8"), encoding="utf-8")
    return found


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits; `moe_lora` differs between them."""
    root = tmp_path / "tree"
    (root / "moe_lora").mkdir(parents=True)
    _git(root, "init", "-q")
    for text in ("1", "2"):
        (root / "moe_lora" / "a.py").write_text(text)
        _git(root, "add", ".")
        _git(root, "commit", "-q", "-m", text)
    return root


def _record(**env: object) -> evidence.Record:
    return {"kind": "measured", "config": {}, "result": {}, "env": {"git_dirty": False, "gpus": [], **env}}


@pytest.fixture
def results(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of records beside another repository's history."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(evidence, "RESULTS", folder)
    for module in (evidence, blocks):
        monkeypatch.setattr(module, "ROOT", repository)
    evidence.history.cache_clear()
    yield folder
    evidence.history.cache_clear()


def _check(root: Path, *options: str) -> Result:
    return CliRunner().invoke(blocks.main, ["--root", str(root), *options])


def test_the_blocks_of_a_page_are_its_records_tables(page: Path, tmp_path: Path) -> None:
    assert list(blocks.complaints(page, tmp_path)) == []


def test_a_changed_digit_in_any_block_fails(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(blocks._BLOCK.finditer(text))
    assert len(found) == 3
    for block in found:
        digit = next(one for one in re.finditer(r"\d", block[3]))
        place = block.start(3) + digit.start()
        page.write_text(f"{text[:place]}{(int(digit[0]) + 1) % 10}{text[place + 1 :]}", encoding="utf-8")
        (complaint,) = blocks.complaints(page, tmp_path)
        assert "plans.md, made anew" in complaint
        assert "bench.pages.blocks --write" in complaint


def test_the_command_fails_on_a_difference_and_writes_it_anew(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("| M* 75 ", "| M* 76 ", 1), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != text
    failed = _check(tmp_path)
    assert failed.exit_code == 1
    assert "-| GPT-OSS-20B" in failed.output
    written = _check(tmp_path, "--write")
    assert written.exit_code == 0, written.output
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            "python -m bench.pages.table nothing",
            "makes no table; use python -m bench.pages.table with one of",
        ),
        ("rm -rf .", "makes no table"),
    ],
)
def test_a_block_of_another_command_is_refused(command: str, reason: str) -> None:
    with pytest.raises(RecordError, match=re.escape(reason)):
        blocks.rewritten(f"<!-- generated: {command} -->\n<!-- end -->\n")


def test_a_block_without_end_is_refused() -> None:
    with pytest.raises(RecordError, match="no `<!-- end -->`"):
        blocks.rewritten("<!-- generated: python -m bench.pages.table plans -->\n| a |\n")


def test_a_block_that_is_spoken_of_in_a_sentence_is_none() -> None:
    text = "Between `<!-- generated: COMMAND -->` and `<!-- end -->` stands a table.\n"
    assert blocks.rewritten(text) == text


def test_writing_leaves_a_page_whose_records_are_invalid(page: Path, tmp_path: Path) -> None:
    text = "<!-- generated: python -m bench.pages.table nothing -->\n| a |\n<!-- end -->\n"
    page.write_text(text, encoding="utf-8")
    failed = _check(tmp_path, "--write")
    assert (failed.exit_code, page.read_text(encoding="utf-8")) == (1, text)
    assert "plans.md: 'python -m bench.pages.table nothing' makes no table" in failed.output


def test_a_new_table_outside_of_blocks_fails(page: Path, tmp_path: Path) -> None:
    with page.open("a", encoding="utf-8") as file:
        file.write("\n| a | b |\n|---|:--|\n| c | d |\n")
    (complaint,) = blocks.complaints(page, tmp_path)
    assert "1 tables outside of blocks, at most 0 may be" in complaint


def test_a_new_number_in_a_sentence_fails(page: Path, tmp_path: Path) -> None:
    most = json.loads(blocks.OPEN_NUMBERS.read_text(encoding="utf-8"))["docs/results/plans.md"]["numbers"]
    with page.open("a", encoding="utf-8") as file:
        file.write("\nA step takes 3.1 ms.\n")
    (complaint,) = blocks.complaints(page, tmp_path)
    assert complaint == (
        f"docs/results/plans.md has {most + 1} numbers outside of blocks, at most {most} may be; make a "
        "block of the new ones, or remove them"
    )


@pytest.mark.parametrize("name", ["docs/results/new.md", "docs/results.md"])
def test_a_page_of_results_has_no_number_beyond_its_count(name: str, tmp_path: Path) -> None:
    """A page without a count has none; a number beside an invalid block is seen."""
    page = tmp_path / name
    page.parent.mkdir(parents=True)
    page.write_text("<!-- generated: no command -->\n<!-- end -->\n" + "It takes 3 ms.\n" * 1000, "utf-8")
    invalid, surplus = blocks.complaints(page, tmp_path)
    assert "makes no table" in invalid
    assert "1000 numbers outside of blocks" in surplus


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Of 1,000 requests 99.5 % took 1.04 to 1.82 times as long on 2 December 2026.", 6),
        ("| a | 1 |\n|---|---|\n| 2x | 3 |\n", 3),
        ("Of bf16 on an H200, P95, S3.", 0),
        ("# 2 heads\n## 3 tails\n", 0),
        ("Commit `2494ba5` took `3 ms`.", 0),
        ("[seven](a.md#8-bits), ![nine](10.png)", 0),
        ("```\n11 ms\n```\n", 0),
        ("<!-- generated: python -m bench.pages.table plans -->\n| 12 |\n<!-- end -->\n", 0),
    ],
)
def test_numbers_outside_of_blocks_code_targets_and_headings_count(text: str, number: int) -> None:
    assert blocks.outside(text)["numbers"] == number


def test_tables_and_numbers_outside_of_blocks_are_counted_where_they_are_left() -> None:
    known = json.loads(blocks.OPEN_NUMBERS.read_text(encoding="utf-8"))
    found = {name: blocks.outside((ROOT / name).read_text(encoding="utf-8")) for name in known}
    assert {name: {kind: found[name][kind] for kind in counts} for name, counts in known.items()} == known
    held = {ROOT / name for name, counts in known.items() if "numbers" in counts}
    results = {page for page in blocks.pages() if page.parent.name == "results" or page.name == "results.md"}
    assert held == {ROOT / "README.md", *results}


def test_every_table_is_on_a_page() -> None:
    text = "".join(one.read_text(encoding="utf-8") for one in blocks.pages())
    assert {name for name in TABLES if f"python -m bench.pages.table {name} -->" not in text} == set()


def test_records_are_valid_by_the_trees_they_name(repository: Path) -> None:
    known = History(repository)
    older, newer = (_git(repository, "rev-parse", f"{commit}:moe_lora") for commit in ("HEAD~", "HEAD"))
    for tree in (older, newer):  # whatever commit they name: it may be squashed
        assert problem("a.jsonl", _record(git_commit="a" * 40, git_trees={"moe_lora": tree}), known) is None
    lost = _record(git_commit=known.commits[0], git_trees={"moe_lora": newer, "cli": newer})
    assert problem("a.jsonl", lost, known) == "trees of cli that are not in this history; run the bench again"


def test_older_records_are_valid_by_their_commit(repository: Path) -> None:
    known = History(repository)
    assert problem("a.jsonl", _record(git_commit=known.commits[1]), known) is None
    assert "is not in this history" in str(problem("a.jsonl", _record(git_commit="a" * 40), known))
    assert "no commit" in str(problem("a.jsonl", _record(git_commit=None), known))


def test_a_tag_alone_keeps_no_commit_in_the_history(repository: Path) -> None:
    _git(repository, "checkout", "-q", "-b", "side", "HEAD~")
    (repository / "b").write_text("")
    _git(repository, "add", ".")
    _git(repository, "commit", "-q", "-m", "side")
    side = _git(repository, "rev-parse", "HEAD")
    _git(repository, "checkout", "-q", "-")
    _git(repository, "tag", "records/side", side)
    assert not History(repository).has_commit(side)
    _git(repository, "merge", "-q", "--no-edit", "-s", "ours", side)
    assert History(repository).has_commit(side)


@pytest.mark.parametrize("place", ["env", "result", "config"])
def test_a_changed_tree_at_any_depth_is_no_evidence(place: str, repository: Path) -> None:
    known = History(repository)
    record = _record(git_commit=known.commits[0])
    record[place]["runs"] = [{"before": {"git_dirty": False}}, {"after": {"git_dirty": True}}]
    assert "a changed tree" in str(problem("a.jsonl", record, known))
    assert is_dirty(record)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            {"result": {"runs": [{"before": {"git_dirty": False}}, {"after": {"git_dirty": True}}]}},
            "a changed tree (git_dirty); run the bench again from a clean tree",
        ),
        (
            {"config": {"before": {"git_commit": "a" * 40, "git_dirty": False}}},
            "commit aaaaaaaa, which is not in this history; merge it, or run the bench again",
        ),
        (
            {"env": {"git_commit": "b" * 40, "git_dirty": False}},
            "commit bbbbbbbb, which is not in this history; merge it, or run the bench again",
        ),
        (
            {"env": {"git_commit": None, "git_dirty": None}},
            "no commit; run the bench again in a git clone",
        ),
    ],
)
def test_an_invalid_record_fails_in_a_file_without_a_page(
    part: dict[str, object], reason: str, results: Path, repository: Path, tmp_path: Path
) -> None:
    valid = _record(git_commit=History(repository).commits[1])
    target = results / "nobody_quotes.jsonl"
    target.write_text(json.dumps(valid), encoding="utf-8")
    assert _check(tmp_path).exit_code == 0
    target.write_text("\n".join(map(json.dumps, (valid, valid | part))), encoding="utf-8")
    failed = _check(tmp_path)
    assert failed.exit_code == 1
    assert failed.output == f"nobody_quotes.jsonl, record 2: {reason}, or delete the record\n"


def test_every_record_is_valid() -> None:
    assert list(evidence.invalid_records()) == []


def test_a_part_of_a_history_is_refused(repository: Path, tmp_path: Path) -> None:
    _git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.raises(RecordError, match="git fetch --unshallow"):
        History(tmp_path / "shallow")
    with pytest.raises(RecordError, match="check records in a git clone"):
        History(tmp_path)


def test_a_copy_inside_another_repository_and_a_machine_without_git_are_told_apart(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "vendored").mkdir()
    with pytest.raises(RecordError, match="lies in another repository"):
        History(repository / "vendored")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecordError, match="git can't be run"):
        History(repository)


def test_a_copy_without_history_compares_its_blocks(
    repository: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    evidence.history.cache_clear()
    try:
        assert evidence.history() is None
        assert "The commits of records are not checked" in capsys.readouterr().err
        assert problem("a.jsonl", _record(git_commit="a" * 40), None) is None
        assert "a changed tree" in str(problem("a.jsonl", _record(git_commit="a" * 40, git_dirty=True), None))
    finally:
        evidence.history.cache_clear()


@pytest.mark.skipif(evidence.history() is None, reason="this copy has no whole history")
def test_a_table_of_invalid_records_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (RESULTS / "provision_plans.jsonl").read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    target = tmp_path / "provision_plans.jsonl"
    target.write_text("\n".join(lines), encoding="utf-8")
    assert "M* 75" in table("plans")
    changed = json.loads(lines[3])
    changed["env"]["git_commit"] = "a" * 40
    target.write_text("\n".join([*lines[:3], json.dumps(changed), *lines[4:]]), encoding="utf-8")
    with pytest.raises(RecordError, match=r"provision_plans\.jsonl quotes commit aaaaaaaa"):
        table("plans")
    target.write_text("", encoding="utf-8")
    with pytest.raises(RecordError, match="no such record"):
        records("provision_plans.jsonl")


def test_a_wrong_answer_under_chaos_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (RESULTS / claims.CHAOS).read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    changed = json.loads(first)
    changed["result"]["complaints"].append("request 3 for base: [1, 2] is not [1, 3]")
    (tmp_path / claims.CHAOS).write_text("\n".join([json.dumps(changed), *others]), encoding="utf-8")
    with pytest.raises(RecordError, match="has wrong answers"):
        claims.failures()


def test_exceptions_only_shrink() -> None:
    for name, counts in exceptions().items():
        assert set(counts) <= set(STATELESS[name])
        assert all(number <= STATELESS[name][commit] for commit, number in counts.items())


def test_records_of_gpus_without_state_are_exceptions() -> None:
    found: dict[str, dict[str, int]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for record in filter(is_stateless, read_results(path)):
            counts = found.setdefault(path.name, {})
            counts[record["env"]["git_commit"]] = counts.get(record["env"]["git_commit"], 0) + 1
    assert found == exceptions()


def test_the_python_page_is_that_of_the_code():
    assert python_api.PAGE.read_text(encoding="utf-8") == python_api.page()
