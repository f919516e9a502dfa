# SPDX-License-Identifier: Apache-2.0
"""Merging on a running engine, from dlora_engine*.jsonl: docs/results/dlora.md."""

from __future__ import annotations

from statistics import median
from typing import Any

from .evidence import records
from .markdown import table

SYSTEMS = {"merged": "merged only", "dlora": "`dlora`", "auto": "`auto`"}
RATIOS = ("average_s", "p90_s", "worst_ttft_s")
COUNTS = ("num_merges", "steps_merged", "steps_mixed")


def engine() -> str:
    """Policies over unmerged steps of the same round, adapters on attention."""
    return _engine("dlora_engine.jsonl")


def engine_experts() -> str:
    """Likewise, adapters also on experts."""
    return _engine("dlora_engine_experts.jsonl")


def _engine(name: str) -> str:
    """Latency a token, its P90 and the longest wait, median (least to most); sums of the rounds."""
    found: dict[tuple[float, str], dict[int, dict[str, Any]]] = {}
    for one in records(name, lambda config, result: config["part"] == "skew"):
        config = one["config"]
        key = config["largest_share"], config["system"]
        found.setdefault(key, {})[config["round"]] = one["result"]
    rows = []
    for share in sorted({share for share, _ in found}):
        for system, words in SYSTEMS.items():
            ours, unmerged = found[share, system], found[share, "unmerged"]
            ratios = ([ours[n][key] / unmerged[n][key] for n in ours] for key in RATIOS)
            merges, merged, mixed = (sum(one[key] for one in ours.values()) for key in COUNTS)
            rows.append((f"{share:.0%}, {words}", *map(_spread, ratios), f"{merges}; {merged:,}, {mixed:,}"))
    head = ("largest adapter's share", "average latency a token", "P90", "longest wait for a first token")
    return table((*head, "merges; merged, mixed steps"), rows)


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
