# SPDX-License-Identifier: Apache-2.0
"""Errors of the admission estimators, from provision_estimator.jsonl: docs/explanation/estimator.md."""

from __future__ import annotations

from typing import Any

from .evidence import records
from .markdown import table

FILE = "provision_estimator.jsonl"
POINTS = 0.02
"""The goal: the largest difference to the simulation."""


def errors() -> str:
    """Cells within the goal and the worst cell, of both estimators."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for one in records(FILE):
        kind = "Zipf" if one["config"]["shape"].startswith("zipf") else "others"
        cells.setdefault(kind, []).extend(one["result"]["cells"])
    shapes = {one["config"]["shape"] for one in records(FILE)}
    rows = []
    for kind, found in cells.items():
        names = sorted(shape for shape in shapes if shape.startswith("zipf") == (kind == "Zipf"))
        worst = max(found, key=lambda cell: _error(cell, "corrected"))
        counts = (f"{sum(_error(cell, name) <= POINTS for cell in found)}" for name in ("paper", "corrected"))
        paper, corrected = counts
        most = 100 * max(_error(cell, "paper") for cell in found)
        ours = f"{100 * _error(worst, 'corrected'):.1f} (standard error {100 * worst['standard_error']:.1f})"
        rows.append(("; ".join(names), str(len(found)), paper, f"{most:.1f}", corrected, ours))
    head = ("popularity", "cells", "paper: within 2 points", "paper: worst")
    return table((*head, "corrected: within 2 points", "corrected: worst"), rows)


def _error(cell: dict[str, Any], name: str) -> float:
    return float(abs(cell[name] - cell["simulated"]))
