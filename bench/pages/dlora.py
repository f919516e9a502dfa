# SPDX-License-Identifier: Apache-2.0
"""Merging, batching and queueing of simulated replicas, from dlora_*.jsonl: docs/results/dlora.md."""

from __future__ import annotations

from .evidence import records
from .markdown import table

FILE, BATCHING_FILE, WORTH_FILE = "dlora_replicas.jsonl", "dlora_batching.jsonl", "dlora_worth.jsonl"
LOADS = ((1.0, "at the SLO's rate"), (0.5, "at half of it"))
WAYS = {"bytes": "original bytes", "residual": "exact residual"}
SYSTEMS = {
    ("rate", "round robin"): "round robin",
    ("rate", "proactive"): "proactive: shortest pending time",
    ("rate", "proactive + migration"): "proactive and migration",
    ("slora", "round robin"): "S-LoRA",
}


def batching() -> str:
    """Average latency over unmerged steps, by load and machine; and S-LoRA's at the SLO's rate."""
    found: dict[tuple[float, str, float], dict[str, float]] = {}
    slora: dict[float, float] = {}
    for one in records(BATCHING_FILE, lambda config, result: config["part"] in ("batching", "slora")):
        config, average_s = one["config"], one["result"]["average_s"]
        if config["part"] == "slora":
            slora[config["largest_share"]] = average_s  # on the first machine's load
        else:
            key = config["load"], config["machine"]["name"], config["largest_share"]
            found.setdefault(key, {})[config["system"]] = average_s
    rows = []
    for load, words in LOADS:
        for share in sorted({share for _, _, share in found}):
            cells = [f"{share:.0%}, {words}"]
            for machine in ("artifact", "paper"):
                averages = found[load, machine, share]
                cells += [
                    f"{averages[one] / averages['unmerged']:.2f}" for one in ("dlora", "auto", "merged")
                ]
            beside = slora.get(share) if load == 1.0 else None
            cells.append("" if beside is None else f"{beside / found[load, 'paper', share]['unmerged']:.2f}")
            rows.append(tuple(cells))
    head = ("largest adapter's share", "80 %: `dlora`", "`auto`", "merged only", "38.9 %: `dlora`", "`auto`")
    return table((*head, "merged only", "S-LoRA"), rows)


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


def restores() -> str:
    """Seconds to merge and to take out, both ways of restoring, and the kept share of changed bytes."""
    rows = []
    for one in records("merge_restore.jsonl"):
        result = one["result"]
        for way, words in WAYS.items():
            seconds = (f"{result[f'{way}_{step}_s']:.2f} s" for step in ("first_merge", "merge", "take_out"))
            kept = result[f"{way}_kept_bytes"] / result["changed_bytes"]
            dtype = one["config"]["dtype"].removeprefix("torch.")
            rows.append((f"{dtype}, {words}", *seconds, f"{result['copy_s']:.2f} s", f"{kept:.0%}"))
    return table(("", "first merge", "merge", "take out", "a copy of the bytes", "bytes kept"), rows)


def worth() -> str:
    """Average latency (P90) over unmerged steps, by the largest adapter's share: both policies."""
    return _worth((0.8, 0.389), ("dlora", "auto"), ("average_s", "p90_s"))


def worth_of_less() -> str:
    """Average latency over unmerged steps where deltas are cheap: both policies."""
    return _worth((0.2, 0.1, 0.05, 0.02), ("dlora", "auto"), ("average_s",))


def _worth(deltas: tuple[float, ...], systems: tuple[str, ...], keys: tuple[str, ...]) -> str:
    """A column a share of deltas and system; cells by the first key (by the second)."""
    found = {
        (one["config"]["largest_share"], one["config"]["machine"]["delta_share"], one["config"]["system"]): (
            one["result"]
        )
        for one in records(WORTH_FILE)
    }
    columns = [(delta, system) for delta in deltas for system in systems]
    rows = []
    for share in sorted({share for share, _, _ in found}):
        cells = []
        for delta, system in columns:
            ours, unmerged = found[share, delta, system], found[share, delta, "unmerged"]
            first, *more = (f"{ours[key] / unmerged[key]:.2f}" for key in keys)
            cells.append(" ".join([first, *(f"({ratio})" for ratio in more)]))
        rows.append((f"{share:.0%}", *cells))
    head = (f"deltas {delta * 100:g} %: `{system}`" for delta, system in columns)
    return table(("largest adapter's share of requests", *head), rows)
