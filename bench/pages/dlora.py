# SPDX-License-Identifier: Apache-2.0
"""Queueing of simulated replicas, from dlora_replicas.jsonl: docs/results/dlora.md."""

from __future__ import annotations

from .evidence import records
from .markdown import table

FILE = "dlora_replicas.jsonl"
SYSTEMS = {
    ("rate", "round robin"): "round robin",
    ("rate", "proactive"): "proactive: shortest pending time",
    ("rate", "proactive + migration"): "proactive and migration",
    ("slora", "round robin"): "S-LoRA",
}


def queueing() -> str:
    """Mean (P99) queueing in seconds, a row a system and a column a rate."""
    found: dict[str, dict[float, str]] = {}
    for one in records(FILE, lambda config, result: config["part"] in ("rate", "slora")):
        name = SYSTEMS[one["config"]["part"], one["config"]["system"]]
        result = one["result"]
        cell = f"{result['mean_queue_s']:.3f} ({result['p99_queue_s']:.1f})"
        found.setdefault(name, {})[one["config"]["work"]["rate_per_s"]] = cell
    rates = sorted({rate for cells in found.values() for rate in cells})
    rows = [(name, *(found[name][rate] for rate in rates)) for name in SYSTEMS.values()]
    return table(("", *(f"{rate:.0f} requests/s" for rate in rates)), rows)
