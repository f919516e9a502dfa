# SPDX-License-Identifier: Apache-2.0
"""Results as columns for the terminal or as a markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]], title: str, *, markdown: bool = False) -> str:
    """The rows in columns under a title; a row without a column has an empty cell there."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    if markdown:
        lines = [columns, ["---"] * len(columns), *cells]
        return "\n".join([f"\n**{title.strip()}**\n", *(f"| {' | '.join(line)} |" for line in lines)])
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [columns, *cells]
    )
    return "\n".join([title, *padded])
