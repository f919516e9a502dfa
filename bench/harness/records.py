"""What every bench writes beside its figures, and which tree it may write from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from moe_lora.report.results import append_result, git_state, is_commit
from moe_lora.report.results import environment as this_environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
ALLOW_DIRTY = "MOE_LORA_BENCH_ALLOW_DIRTY"
COMMIT = "MOE_LORA_COMMIT"
"""Names the commit that a copy was made of, which has no history, or one of its own."""

Record = dict[str, Any]
"""{kind, config, result, env}, as `results.read_results` gives it."""


class Recorder:
    """The records of one run, appended to a file as they come (None: kept here only).

    Made before anything is measured: it exits if a record may not be written to `out` (see `environment`).
    more: added to the environment.
    """

    def __init__(self, out: str | Path | None, kind: str = "measured", **more: Any) -> None:
        self.records: list[Record] = []
        self._out, self._kind, self._env = out, kind, environment(out) | more

    def __call__(self, config: dict[str, Any], result: dict[str, Any], kind: str | None = None) -> Record:
        """Keep one; kind: another one than the run's."""
        record: Record = {"kind": kind or self._kind, "config": config, "result": result, "env": self._env}
        if self._out is not None:
            append_result(self._out, **record)
        self.records.append(record)
        return record


def environment(out: str | Path | None) -> dict[str, Any]:
    """What `results.environment` says, if a record of it may be written to `out` (None: nothing is written).

    A record names a commit, so tracked files must be as committed; result files, which benches change
    themselves, don't count.  MOE_LORA_BENCH_ALLOW_DIRTY=1 lets a changed tree write outside of
    bench/results; the record says `git_dirty`.  Call it before measuring.  Exits with the reason otherwise.
    MOE_LORA_COMMIT says the commit of a copy with no history or another; whether it is as committed is not
    known then.  Exits if this history has that commit, but as another one than today's.
    """
    env = this_environment() | git_state(ROOT, without=RESULTS)
    if (given := os.environ.get(COMMIT)) and given != env["git_commit"]:
        if not re.fullmatch("[0-9a-f]{40}", given):
            raise SystemExit(
                f"{COMMIT}={given!r} is no commit; give all 40 digits, as git rev-parse HEAD does"
            )
        if is_commit(ROOT, given):
            raise SystemExit(
                f"{COMMIT}={given} is a commit of this repository, which is at {env['git_commit']}; leave it "
                "unset here: it is for copies"
            )
        env |= {"git_commit": given, "git_dirty": None}
    if out is not None and env["git_dirty"]:
        _refuse(Path(out))
    return env


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
