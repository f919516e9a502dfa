# SPDX-License-Identifier: Apache-2.0
"""Steps with a LoRA Server, and rates beside coupled instances: docs/results.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import geometric_mean, mean

from .evidence import records
from .markdown import table

RATES_FILE = "slo_rates.jsonl"
SERVER, SAME, SLOWER = "server", "coupled, kernels 1", "coupled, kernels 2"


def overlap() -> str:
    """Hidden share of the server's time, and steps over the base model's, by requests."""
    found = [(one["config"]["num_requests"], one["result"]) for one in records("overlap.jsonl")]
    rows = [
        (
            "server's time hidden behind base computation (goal 90 %)",
            *(f"{r['hidden_share']:.0%}" for _, r in found),
        ),
        ("step over the base model's, server", *(f"{r['remote_over_base']['median']:.2f}" for _, r in found)),
        ("the same, adapters in the engine", *(f"{r['local_over_base']['median']:.2f}" for _, r in found)),
    ]
    return table(("requests", *(str(number) for number, _ in found)), rows)


def rates() -> str:
    """Rates within the SLOs, means over seeds (least), and ratios of the server, means (least).

    A row a model, arrivals and GPUs with all systems; then geometric means over the models.  Faster kernels
    count at least the rate of slower kernels: their setting is the first seed's best, not each seed's.
    """
    found: dict[tuple[int, str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in records(RATES_FILE):
        config = one["config"]
        cell = found[config["num_gpus"], config["arrivals"], config["model"]]
        cell[config["system"]][config["seed"]] = one["result"]["rate_per_s"]
    rows: list[Sequence[str]] = []
    over: dict[tuple[int, str], list[tuple[list[float], list[float]]]] = defaultdict(list)
    for (num_gpus, arrivals, model), cell in found.items():
        if {SERVER, SAME, SLOWER} <= set(cell):
            cell[SAME] = {seed: max(rate, cell[SLOWER][seed]) for seed, rate in cell[SAME].items()}
            ratios = [_ratios(cell[SERVER], cell[one]) for one in (SAME, SLOWER)]
            over[num_gpus, arrivals].append((ratios[0], ratios[1]))
            own = (list(cell[one].values()) for one in (SERVER, SAME, SLOWER))
            rows.append((f"{model}, {num_gpus}, {arrivals}", *map(_per_s, own), *map(_times, ratios)))
    for (num_gpus, arrivals), pairs in over.items():
        if len(pairs) < 2:
            continue
        means = [geometric_mean([mean(pair[at]) for pair in pairs]) for at in (0, 1)]
        least = [min(min(pair[at]) for pair in pairs) for at in (0, 1)]
        cells = [f"**{value:.2f}** ({low:.2f})" for value, low in zip(means, least, strict=True)]
        rows.append((f"**{len(pairs)} models, {num_gpus}, {arrivals}**", "", "", "", *cells))
    head = ("model, GPUs, arrivals", "LoRA Server", "coupled", "coupled, kernels half as fast")
    return table((*head, "server over coupled", "over coupled, kernels half as fast"), rows)


def _ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    return [ours[seed] / theirs[seed] for seed in ours]


def _per_s(values: Sequence[float]) -> str:
    return f"{mean(values):.0f} ({min(values):.0f})"


def _times(values: Sequence[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f})"
