# SPDX-License-Identifier: Apache-2.0
"""Blocks of the pages, made again and compared: `make results-check`.

Between `<!-- generated: python -m bench.pages.table NAME -->` and `<!-- end -->` stands a table of records.
The check fails on a difference and on an invalid record in a block.  On pages of results, and on those that
open_tables.json names, it fails on a new table outside of blocks.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from bench.harness.records import ROOT

from . import TABLES
from .evidence import RecordError
from .table import table

OPEN_TABLES = Path(__file__).with_name("open_tables.json")
_BLOCK = re.compile(r"^(<!-- generated: ([^\n]*?) -->\n)(.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"python -m bench\.pages\.table ([\w-]+)")
_MADE = re.compile(
    r"<!-- (?:generated|settings|options|vllm|docstrings): .*?<!-- end -->|^```.*?^```",
    re.DOTALL | re.MULTILINE,
)


def pages(root: Path = ROOT) -> list[Path]:
    """The pages with blocks, and without."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "bench" / "README.md"]


def rewritten(text: str) -> str:
    """The page with new blocks.  Raises RecordError for an unknown command and an invalid record."""
    if len(re.findall("^<!-- generated:", text, re.MULTILINE)) != len(_BLOCK.findall(text)):
        raise RecordError("a block has no `<!-- end -->`")

    def made(found: re.Match[str]) -> str:
        command = _COMMAND.fullmatch(found[2])
        if command is None or command[1] not in TABLES:
            names = ", ".join(sorted(TABLES))
            raise RecordError(
                f"{found[2]!r} makes no table; use python -m bench.pages.table with one of {names}"
            )
        return f"{found[1]}{table(command[1])}\n{found[4]}"

    return _BLOCK.sub(made, text)


def complaints(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Differences, invalid records, and new tables outside of blocks."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(root))
    try:
        made = rewritten(text)
    except RecordError as error:
        yield f"{name}: {error}"
        return
    lines = difflib.unified_diff(
        text.splitlines(), made.splitlines(), name, f"{name}, made anew", lineterm="", n=0
    )
    if difference := "\n".join(lines):
        yield f"{difference}\nrun python -m bench.pages.blocks --write, and look at the change"
    known = json.loads(OPEN_TABLES.read_text(encoding="utf-8"))
    most = known.get(name, 0 if name.startswith("docs/results/") else None)
    if most is not None and (here := open_tables(text)) > most:
        yield f"{name} has {here} tables outside of blocks, at most {most} may be; make the new one a block"


def open_tables(text: str) -> int:
    """Tables outside of generated blocks and code."""
    return len(re.findall(r"^\|[ :|-]*---[ :|-]*\|$", _MADE.sub("", text), re.MULTILINE))


def _write(page: Path) -> None:
    """Write the blocks of a page anew.  A page with an invalid record stays."""
    text = page.read_text(encoding="utf-8")
    with suppress(RecordError):
        if (made := rewritten(text)) != text:
            page.write_text(made, encoding="utf-8")


@click.command()
@click.option("--write", is_flag=True, help="Write the blocks anew.")
@click.option("--root", type=click.Path(path_type=Path), default=ROOT, help="The tree of the pages.")
def main(write: bool, root: Path) -> None:
    """Compare all blocks with their records."""
    found_pages = [page for page in pages(root) if page.exists()]
    if write:
        for page in found_pages:
            _write(page)
    found = [one for page in found_pages for one in complaints(page, root)]
    num_blocks = sum(len(_BLOCK.findall(page.read_text(encoding="utf-8"))) for page in found_pages)
    click.echo("\n".join(found) or f"{num_blocks} blocks are their records' tables.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
