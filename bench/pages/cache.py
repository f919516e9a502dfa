# SPDX-License-Identifier: Apache-2.0
"""FastLibra's own mean, over ten rates: docs/results/cache.md."""

from __future__ import annotations

from statistics import geometric_mean, mean
from typing import Any

from .evidence import records
from .markdown import table

RATES_FILE = "cache_rates.jsonl"
PAPER = {("fastlibra", "static"): "0.40, 0.66", ("fastlibra", "slora"): "0.50, 0.71"}
PAIRS = (
    *PAPER,
    ("fastlibra", "lru"),
    ("cost-aware", "static"),
    ("cost-aware", "slora"),
    ("cost-aware", "fastlibra"),
)


def rates() -> str:
    """A policy over another, by application: means of the ten rates' ratios, and the worst rate."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in records(RATES_FILE):
        config = one["config"]
        found.setdefault(config["application"], {})[config["policy"]] = one["result"]["points"]
    found = {
        name: cell for name, cell in found.items() if {one for pair in PAIRS for one in pair} <= set(cell)
    }
    rows = []
    for ours, theirs in PAIRS:
        ttfts = [_ratios(cell[ours], cell[theirs], "ttft_ms") for cell in found.values()]
        tpots = [_ratios(cell[ours], cell[theirs], "tpot_ms") for cell in found.values()]
        cells = [f"{mean(one):.2f} ({max(one):.2f})" for one in ttfts]
        overall = [geometric_mean([mean(one) for one in ratios]) for ratios in (ttfts, tpots)]
        beside = PAPER.get((ours, theirs), "")
        rows.append((f"{ours} by {theirs}", *cells, f"{overall[0]:.2f}", f"{overall[1]:.2f}", beside))
    return table(("policies", *found, "TTFT, all", "TPOT, all", "the paper: TTFT, TPOT"), rows)


def _ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> list[float]:
    return [our[name] / their[name] for our, their in zip(ours, theirs, strict=True)]
