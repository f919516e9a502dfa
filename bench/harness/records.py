# SPDX-License-Identifier: Apache-2.0
"""Records of every bench, and checks of the tree behind them.

python -m bench.harness.records FOLDER   # the state of this tree, as variables for a copy without history
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from moe_lora.report.results import append_result, git_state
from moe_lora.report.results import environment as this_environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
ALLOW_DIRTY = "MOE_LORA_BENCH_ALLOW_DIRTY"
COMMIT = "MOE_LORA_COMMIT"
"""Commit of a copy without history, or with its own history."""
TREES = "MOE_LORA_TREES"
"""Names the git trees of a clean copy, as PATH=ID separated by spaces."""
_PARTS = ("moe_lora", "cli", "bench/harness")

Record = dict[str, Any]
"""{kind, config, result, env}, as `results.read_results` gives it."""


class Recorder:
    """The records of one run, appended to a file on arrival (None: kept in memory).

    Create before measuring: exits if a record may not be written to `out` (see `environment`).  more: added
    to the environment.
    """

    def __init__(self, out: str | Path | None, kind: str = "measured", **more: Any) -> None:
        self.records: list[Record] = []
        self._out, self._kind, self._env = out, kind, environment(out) | more

    def __call__(self, config: dict[str, Any], result: dict[str, Any], kind: str | None = None) -> Record:
        """Keep a record; kind: default: the run's."""
        record: Record = {"kind": kind or self._kind, "config": config, "result": result, "env": self._env}
        if self._out is not None:
            append_result(self._out, **record)
        self.records.append(record)
        return record


def environment(out: str | Path | None) -> dict[str, Any]:
    """`results.environment`, if a record may be written to `out` (None: nothing is written).

    A record names a commit, so tracked files must be as committed, except result files.
    MOE_LORA_BENCH_ALLOW_DIRTY=1 lets a changed tree write outside of bench/results; the record then has
    `git_dirty`.  Call before measuring.  Exits with the reason otherwise.
    git_trees: the trees of `moe_lora`, `cli`, the harness and the bench's folder, if the tree is clean.
    MOE_LORA_COMMIT is the commit of a copy without this history; MOE_LORA_TREES proves its content.  Exits if
    this history has the commit, but not as today's.
    """
    env = this_environment() | git_state(ROOT, without=RESULTS)
    if (given := os.environ.get(COMMIT)) and given != env["git_commit"]:
        if not re.fullmatch("[0-9a-f]{40}", given):
            raise SystemExit(
                f"{COMMIT}={given!r} is no commit; give all 40 digits, as git rev-parse HEAD does"
            )
        if _is_commit(given):
            raise SystemExit(
                f"{COMMIT}={given} is a commit of this repository, which is at {env['git_commit']}; leave it "
                "unset here: it is for copies"
            )
        given_trees = _given_trees()
        env |= {"git_commit": given, "git_dirty": None if given_trees is None else False}
        return env if given_trees is None else env | {"git_trees": given_trees}
    if env["git_dirty"] is False:
        env["git_trees"] = git_trees(ROOT, bench_folder(sys.modules["__main__"]))
    if out is not None and env["git_dirty"]:
        _refuse(Path(out))
    return env


def _is_commit(name: str) -> bool:
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{name}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _refuse(out: Path) -> None:
    changed = f"--out {out}: tracked files differ from the commit that the record would name"
    if out.resolve().is_relative_to(RESULTS):
        raise SystemExit(
            f"{changed}; commit or stash them (git status).  To try a bench, write outside of bench/results, "
            f"with {ALLOW_DIRTY}=1"
        )
    if os.environ.get(ALLOW_DIRTY) != "1":
        raise SystemExit(
            f"{changed}; commit or stash them (git status), or set {ALLOW_DIRTY}=1 for a record that says "
            "git_dirty"
        )


def bench_folder(module: Any) -> str | None:
    """The folder of a module run as `python -m bench.FOLDER.…`, e.g. "bench/cache"; else None."""
    spec = getattr(module, "__spec__", None)
    words = spec.name.split(".") if spec else [""]
    return "/".join(words[:2]) if words[0] == "bench" and len(words) > 2 else None


def git_trees(root: Path, folder: str | None) -> dict[str, str]:
    """Path -> id of the committed tree: package, commands, harness, and the bench's folder."""
    found = {}
    for path in dict.fromkeys([*_PARTS, *([folder] if folder else [])]):
        command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", f"HEAD:{path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[path] = done.stdout.strip()
    return found


def _given_trees() -> dict[str, str] | None:
    """The trees in MOE_LORA_TREES; None without the variable."""
    text = os.environ.get(TREES)
    if text is None:
        return None
    found = dict(word.partition("=")[::2] for word in text.split())
    if not found or not all(re.fullmatch("[0-9a-f]{40}", tree) for tree in found.values()):
        raise SystemExit(
            f"{TREES}={text!r} names no trees; give what python -m bench.harness.records FOLDER prints"
        )
    return found


def _show_state(folder: str) -> None:
    """Print the variables for a bench of `folder` in a copy of this tree.  Exits if the tree is changed."""
    env, trees = environment(None), git_trees(ROOT, folder)
    if not folder.startswith("bench/") or folder not in trees:
        raise SystemExit(f"{folder!r} is no committed folder of benches; give one such as bench/gpu")
    if env["git_dirty"]:
        raise SystemExit("tracked files differ from the commit; commit or stash them (git status)")
    given = " ".join(f"{path}={tree}" for path, tree in trees.items())
    print(f'{COMMIT}={env["git_commit"]} {TREES}="{given}"')


if __name__ == "__main__":
    _show_state(*sys.argv[1:2] or [""])
