# SPDX-License-Identifier: Apache-2.0
"""The valid records of bench/results: clean trees of this history.

A record names the git trees of `moe_lora`, `cli` and the bench's folders; an older record names a commit.
exceptions.json lists old records of GPUs without a state.  The list only shrinks.  Invalid records are
deleted, and stay in the git history.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

from bench.harness.records import RESULTS, ROOT, Record
from moe_lora.report.results import read_results

EXCEPTIONS = Path(__file__).with_name("exceptions.json")
Config = dict[str, Any]


class RecordError(ValueError):
    """A page quotes an invalid record, or no record."""


class History:
    """Commits up to HEAD, and their trees.  Raises RecordError without a clone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        if Path(_git(root, "rev-parse", "--show-toplevel")) != root.resolve():
            raise RecordError(f"{root} lies in another repository; check records in a git clone")
        if _git(root, "rev-parse", "--is-shallow-repository") == "true":
            raise RecordError(f"{root} has a part of its history only; run git fetch --unshallow")
        self.commits = tuple(_git(root, "rev-list", "HEAD").split())
        self._known = frozenset(self.commits)
        self._trees: dict[str, frozenset[str]] = {}

    def has_commit(self, commit: str) -> bool:
        return commit in self._known

    def has_tree(self, path: str, tree: str) -> bool:
        """A commit of the history has this tree at the path."""
        if path not in self._trees:
            asked = "".join(f"{commit}:{path}\n" for commit in self.commits)
            found = _git(self._root, "cat-file", "--batch-check=%(objectname)", given=asked)
            self._trees[path] = frozenset(found.split())
        return tree in self._trees[path]


def _git(root: Path, *arguments: str, given: str = "") -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RecordError(f"git can't be run ({error}); check records where it is installed") from error
    if done.returncode:
        raise RecordError(f"{root}: git {arguments[0]}: {done.stderr.strip()}; check records in a git clone")
    return done.stdout.strip()


@cache
def history() -> History | None:
    """The history of this repository; None, with a line on stderr: a copy without the whole of it."""
    try:
        return History(ROOT)
    except RecordError as error:
        click.echo(f"The commits of records are not checked: {error}", err=True)
        return None


@cache
def exceptions() -> dict[str, dict[str, int]]:
    """File -> commit -> number of records of a GPU without state."""
    found: dict[str, dict[str, int]] = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))["records"]
    return found


def _dicts(value: Any) -> Iterator[Config]:
    """The value and its parts, as far as they are dicts."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _dicts(inner)


def is_dirty(value: Any) -> bool:
    """The value names a changed tree, at any depth."""
    return any(part.get("git_dirty") for part in _dicts(value))


def is_stateless(record: Record) -> bool:
    """A record of a GPU names a commit without the state of the copy."""
    env = record["env"]
    return bool(env.get("gpus")) and env.get("git_dirty") is None and not env.get("git_trees")


def problem(name: str, record: Record, known: History | None) -> str | None:
    """The reason against a record of this file; None: the record is valid.

    known: None: no history, and only a changed tree is a reason.
    """
    if is_dirty(record):
        return "a changed tree (git_dirty); run the bench again from a clean tree"
    if known is None:
        return None
    env = record["env"]
    states = (env, *(part for part in _dicts(record) if "git_commit" in part and part is not env))
    return next((reason for state in states if (reason := _lost(name, state, known))), None)


def _lost(name: str, state: Config, known: History) -> str | None:
    """The reason against the state of a copy: its trees or commit are not in the history."""
    commit = state.get("git_commit")
    if trees := state.get("git_trees"):
        lost = [path for path, tree in trees.items() if not known.has_tree(path, tree)]
        return (
            f"trees of {', '.join(lost)} that are not in this history; run the bench again" if lost else None
        )
    if commit is None:
        return "no commit; run the bench again in a git clone"
    if not known.has_commit(commit):
        return f"commit {commit[:8]}, which is not in this history; merge it, or run the bench again"
    if state.get("git_dirty") is None and commit not in exceptions().get(name, {}):
        return f"commit {commit[:8]} without the state of its tree; pass MOE_LORA_TREES to the device"
    return None


def invalid_records() -> Iterator[str]:
    """File, number, reason and way out of each invalid record, quoted or not."""
    for path in sorted(RESULTS.glob("*.jsonl")):
        for number, record in enumerate(read_results(path), start=1):
            if reason := problem(path.name, record, history()):
                yield f"{path.name}, record {number}: {reason}, or delete the record"


def records(name: str, keep: Callable[[Config, Config], Any] = lambda config, result: True) -> list[Record]:
    """The records of a file, as far as `keep` accepts config and result.

    Raises RecordError for an invalid record, and without any record.
    """
    found = [one for one in read_results(RESULTS / name) if keep(one["config"], one["result"])]
    if not found:
        raise RecordError(f"{name} has no such record")
    for reason in _problems(name, found):
        raise RecordError(f"{name} quotes {reason}")
    return found


def _problems(name: str, found: list[Record]) -> Iterator[str]:
    return (reason for one in found if (reason := problem(name, one, history())) is not None)
