# SPDX-License-Identifier: Apache-2.0
"""Blocks of the pages, made again and compared: `make results-check`.

Between `<!-- generated: python -m bench.pages.table NAME -->` and `<!-- end -->` stands a table of records.
The check fails on a difference, and on an invalid record of any file; without the whole git history it checks
no commits, and says so.  On the results pages, and on the pages in open_numbers.json, it fails on a new table
or number outside of blocks.
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
from .evidence import RecordError, invalid_records
from .table import table

OPEN_NUMBERS = Path(__file__).with_name("open_numbers.json")
_BLOCK = re.compile(r"^(<!-- generated: ([^\n]*?) -->\n)(.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"python -m bench\.pages\.table ([\w-]+)")
_MADE = re.compile(
    r"<!-- (?:generated|settings|options|vllm|docstrings): .*?<!-- end -->|^```.*?^```",
    re.DOTALL | re.MULTILINE,
)
_NO_TEXT = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)|^#.*$", re.MULTILINE)
"""Inline code, targets of links, headings."""
_NUMERAL = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")


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
    """Differences, invalid records, and new tables and numbers outside of blocks."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(root))
    try:
        yield from _differences(name, text, rewritten(text))
    except RecordError as error:
        yield f"{name}: {error}"
    yield from _surplus(name, text)


def _differences(name: str, text: str, made: str) -> Iterator[str]:
    lines = difflib.unified_diff(
        text.splitlines(), made.splitlines(), name, f"{name}, made anew", lineterm="", n=0
    )
    if difference := "\n".join(lines):
        yield f"{difference}\nrun python -m bench.pages.blocks --write, and look at the change"


def _surplus(name: str, text: str) -> Iterator[str]:
    limits = json.loads(OPEN_NUMBERS.read_text(encoding="utf-8")).get(name, {})
    if name.startswith("docs/results"):
        limits = {"tables": 0, "numbers": 0} | limits
    for kind, most in limits.items():
        if (here := outside(text)[kind]) > most:
            yield (
                f"{name} has {here} {kind} outside of blocks, at most {most} may be; make a block of the new "
                "ones, or remove them"
            )


def outside(text: str) -> dict[str, int]:
    """Tables and numbers outside of generated blocks and code.  No numbers: link targets, headings."""
    written = _MADE.sub("", text)
    tables = re.findall(r"^\|[ :|-]*---[ :|-]*\|$", written, re.MULTILINE)
    return {"tables": len(tables), "numbers": len(_NUMERAL.findall(_NO_TEXT.sub("", written)))}


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
    """Compare all blocks with their records, and check all records."""
    found_pages = [page for page in pages(root) if page.exists()]
    if write:
        for page in found_pages:
            _write(page)
    found = list(invalid_records())
    found += [one for page in found_pages for one in complaints(page, root)]
    num_blocks = sum(len(_BLOCK.findall(page.read_text(encoding="utf-8"))) for page in found_pages)
    click.echo("\n".join(found) or f"{num_blocks} blocks are their records' tables.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
