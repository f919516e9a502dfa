# SPDX-License-Identifier: Apache-2.0
"""Moved requests: queueing of running instances, pauses of streams, plans: docs/results/dlora.md."""

from __future__ import annotations

from .evidence import records
from .markdown import table


def instances() -> str:
    """Mean (longest) queueing of four running instances, a column a round of requests."""
    found = {
        (one["config"]["round"], one["config"]["system"]): one["result"]
        for one in records("dlora_instances.jsonl")
    }
    rounds = sorted({number for number, _ in found})
    systems = list(dict.fromkeys(system for _, system in found))  # migration last
    rows = []
    for system in systems:
        results = (found[number, system] for number in rounds)
        rows.append(
            (
                system.replace(" +", " and"),
                *(f"{one['mean_queue_s']:.3f} ({one['worst_queue_s']:.1f})" for one in results),
            )
        )
    moved = (found[number, systems[-1]] for number in rounds)
    counts = (f"{sum(one['num_moves'].values())} ({one['num_failed_moves']})" for one in moved)
    rows.append(("requests moved (failed)", *counts))
    head = (f"{found[number, systems[0]]['num_requests']} requests" for number in rounds)
    return table(("", *head), rows)


def pauses() -> str:
    """Longest gap in a stream from the move on, median / P99 in ms, by prompt and requests beside."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for one in records("dlora_pause.jsonl"):
        config, result = one["config"], one["result"]
        ms = (f"{1e3 * result[key]:.1f}" for key in ("pause_p50_s", "pause_p99_s"))
        found.setdefault((config["num_prompt"], config["num_beside"]), {})[config["kind"]] = " / ".join(ms)
    rows = [
        (f"{prompt} tokens, {beside or 'none'}", *(cells[kind] for kind in ("None", "tokens", "kv")))
        for (prompt, beside), cells in found.items()
    ]
    return table(("prompt, others at the source", "left alone", "moved by tokens", "with KV"), rows)


def planning() -> str:
    """Processor time of a plan, and its slowest instance above the bound: median (most) of the problems."""
    found: dict[int, dict[str, list[str]]] = {}
    for one in records("dlora_solver.jsonl", lambda config, result: "over_bound" in result):
        config, result = one["config"], one["result"]
        cells = [_spread(result["cpu_ms"], 1.0, 0), _spread(result["over_bound"], 100.0, 1)]
        found.setdefault(config["num_replicas"], {})[config["form"]] = cells
    rows = [(str(size), *forms["fast"], *forms["relaxed"]) for size, forms in sorted(found.items())]
    head = ("fast, ms", "above the bound, %", "as in the paper, ms", "above the bound, %")
    return table(("instances", *head), rows)


def _spread(values: dict[str, float], scale: float, digits: int) -> str:
    median, most = (values[key] * scale for key in ("median", "most"))
    return f"{median:.{digits}f} ({most:.{digits}f})"
