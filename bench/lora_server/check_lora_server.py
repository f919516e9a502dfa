# SPDX-License-Identifier: Apache-2.0
"""Does every combination of the LoRA Server give the bits and tokens of the local backend?

    python -m bench.lora_server.check_lora_server --out FILE.jsonl
        [--only transport=shm --only layout=EP2-PP1,EP4-PP2]

bench/README.md describes the comparison.  One JSON line per combination, a summary at the end.  Exit status 1
for a difference or a failed run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.harness.records import environment
from moe_lora.report.results import append_result
from tests.dist.combinations import FACTORS, is_possible, title
from tests.dist.covering import Row, all_rows
from tests.dist.forked_cluster import Outcome, Tokens, local_tokens, served_tokens
from tests.dist.served_models import ServedModel, make_served_model

Expected = Callable[[str, str], tuple[ServedModel, Tokens]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested checks; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FACTOR=VALUE[,VALUE]",
        help=f"restrict a factor; factors and values: {_choices()}",
    )
    options = parser.parse_args(arguments)
    try:
        rows = all_rows(restricted(options.only), is_possible)
    except ValueError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"--only {' --only '.join(options.only)} leaves no combination that a model can have")
    package = logging.getLogger("moe_lora")
    level = package.level
    package.setLevel(logging.ERROR)
    try:
        complaints = check_all(rows, options.out)
    finally:
        package.setLevel(level)
    summarise(rows, complaints)
    return 1 if any(complaints) else 0


def restricted(only: Sequence[str]) -> dict[str, Sequence[str]]:
    """The factors restricted by `only`.  Raises ValueError for unknown ones."""
    factors: dict[str, Sequence[str]] = dict(FACTORS)
    for text in only:
        name, _, values = text.partition("=")
        chosen = values.split(",")
        if name not in FACTORS or not set(chosen) <= set(FACTORS[name]):
            raise ValueError(f"--only {text}: choose among {_choices()}")
        factors[name] = [value for value in factors[name] if value in chosen]
    return factors


def _choices() -> str:
    return "; ".join(f"{name}={','.join(values)}" for name, values in FACTORS.items())


def check_all(rows: Sequence[Row], out: Path) -> list[list[str]]:
    """Faults of each combination."""
    env = environment(out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="moe_lora-") as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        expected = _references(Path(folder))
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=title(row))
            result = check(row, expected)
            append_result(out, config=row, result=result, env=env, kind="measured")
            found.append(result["complaints"])
            for complaint in result["complaints"]:
                progress.console.print(f"{title(row)}: {complaint}", highlight=False)
            progress.advance(task)
    return found


def _references(folder: Path) -> Expected:
    """(family, dtype) -> the model, and the local backend's answers."""

    @cache
    def model(family: str) -> ServedModel:
        with redirect_stderr(StringIO()):  # progress bars of transformers
            return make_served_model(family, folder / family)

    @cache
    def find(family: str, dtype: str) -> tuple[ServedModel, Tokens]:
        return model(family), local_tokens(model(family), dtype)

    return find


def check(row: Row, expected: Expected) -> dict[str, Any]:
    """Run one combination; fields of its `result`."""
    model, tokens = expected(row["family"], row["dtype"])
    started_s = time.perf_counter()
    try:
        outcome = served_tokens(model, row)
    except Exception as error:  # other combinations are checked all the same
        return {"complaints": [f"could not be run: {error!r}"]}
    return {
        "complaints": outcome.complaints(tokens),
        "num_tokens": sum(map(len, outcome.tokens)),
        **_counts(outcome),
        "time_s": round(time.perf_counter() - started_s, 3),
    }


def _counts(outcome: Outcome) -> dict[str, int]:
    names = ("num_sites", "num_added", "num_wrong", "num_requests", "num_fallback_rows")
    sums = {name: sum(getattr(tally, name) for tally in outcome.tallies) for name in names}
    return {**sums, "num_evictions": outcome.num_evictions}


def summarise(rows: Sequence[Row], complaints: Sequence[Sequence[str]]) -> None:
    """Print checked and failed combinations for each value of each factor."""
    table = Table("factor", "value", "checked", "failed")
    for name, values in FACTORS.items():
        for value in values:
            of_value = [
                bool(wrong) for row, wrong in zip(rows, complaints, strict=True) if row[name] == value
            ]
            if of_value:
                table.add_row(name, value, str(len(of_value)), str(sum(of_value)))
        table.add_section()
    console = Console()
    console.print(table)
    num_failed = sum(map(bool, complaints))
    console.print(f"{len(rows)} combinations checked, {num_failed} failed", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
