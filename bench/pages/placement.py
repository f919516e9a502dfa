# SPDX-License-Identifier: Apache-2.0
"""Placements by a model and in simulated clusters: docs/results/placement.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from bench.placement.bench_clusters import FORECASTS, PLACED, POPULARITIES, ROUTED, SIZES

from .evidence import records
from .markdown import table

FILE, CLUSTERS_FILE, SIMULATED_FILE = "placement.jsonl", "placement_clusters.jsonl", "cluster_simulated.jsonl"
METHODS = {
    "loraserve": "loraserve",
    "optimal": "optimal",
    "optimal_bounded": "optimal, at most 5 % a step",
    "random": "random",
    "contiguous": "contiguous",
    "disjoint": "disjoint",
    "everywhere": "everywhere, equal shares",
}
ROUTERS = ("rank_aware", "shortest_pending_time", "random", "first_fit", "least_outstanding")
Column = tuple[str, int]
"""Popularity, servers."""


def shifting() -> str:
    """A shifting skew, 25 adapters on 4 servers: a row a method."""
    return _quality("25x4", "shifting")


def production() -> str:
    """LoRAServe's production mix, 300 adapters on 12 servers: a row a method."""
    return _quality("300x12", "production")


def _quality(size: str, popularity: str) -> str:
    """Demand is forecast; rank 128 takes 2.7 times as long."""
    wanted = {"part": "quality", "size": size, "popularity": popularity, "points": "tp1", "forecast": True}
    (record,) = records(FILE, lambda config, result: config == wanted)
    rows = []
    for method, name in METHODS.items():
        found = record["result"][method]
        loads = "worst_padded_load_over_lp_bound", "worst_load_over_lp_bound", "rank_mixing"
        held = f"{found['mean_held']:.1f} / {found['most_held']:.0f}"
        copied = f"{100 * found['copied_share_per_step']:.1f} %"
        rows.append((name, *(f"{found[key]:.2f}" for key in loads), held, copied))
    head = ("worst padded load", "worst own load", "rank mixing", "held, mean / most", "copied")
    return table((f"{popularity}, {size.replace('x', ' adapters on ')} servers", *head), rows)


def clusters() -> str:
    """Highest rates of a server and ratios to routers, means of the draws (worst), and adapters held."""
    peaks = _peaks()
    columns = [(popularity, size) for popularity in reversed(POPULARITIES) for size in SIZES]
    rows: list[Sequence[str]] = []
    for name in (*PLACED, *(f"everywhere, {router}" for router in ROUTED)):
        rates = (_mean(peaks[name][column].values()) for column in columns)
        rows.append((f"`{name}`", *rates, _held(name)))
    for name in PLACED:
        for router in ROUTED:
            beside = f"everywhere, {router}"
            ratios = (
                _mean(rate / peaks[beside][column][seed] for seed, rate in peaks[name][column].items())
                for column in columns
            )
            rows.append((f"`{name}` by `{router}`", *ratios, ""))
    return table(("", *_words(columns), "held on 12, production"), rows)


def forecasts() -> str:
    """Highest rates of a server by the forecast, means of the draws (worst)."""
    peaks = _peaks()
    columns = [(popularity, size) for popularity in reversed(POPULARITIES) for size in SIZES[:2]]
    rows = [
        (
            f"`{name}`{forecast or ', last interval'}",
            *(_mean(peaks[name + forecast][column].values()) for column in columns),
        )
        for name in PLACED
        for forecast in FORECASTS
    ]
    return table(("", *_words(columns)), rows)


def routers() -> str:
    """Toppings' 60 servers: attainment and mean time per token, a row a router."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for one in records(SIMULATED_FILE, lambda config, result: config["study"] == "toppings"):
        config, result = one["config"], one["result"]
        column = f"{config['model'].replace('_', ' ')}, {config['rate_per_s']:g}/s"
        cell = f"{100 * result['slo_attainment']:.1f} %, {1000 * result['mean_tpt_s']:.0f} ms"
        found[config["system"]][column] = cell
    columns = list(found[ROUTERS[0]])
    rows = [(f"`{name}`", *(found[name][column] for column in columns)) for name in (*ROUTERS, *PLACED)]
    return table(("", *columns), rows)


def _peaks() -> dict[str, dict[Column, dict[int, float]]]:
    """System -> column -> draw -> highest rate of a server."""
    found: dict[str, dict[Column, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in records(CLUSTERS_FILE):
        config = one["config"]
        cell = found[config["system"]][config["popularity"], config["num_servers"]]
        cell[config["seed"]] = one["result"]["peak_per_s"] / config["num_servers"]
    return found


def _held(system: str) -> str:
    cell = (system, "production", max(SIZES))
    found = records(
        CLUSTERS_FILE,
        lambda config, result: (config["system"], config["popularity"], config["num_servers"]) == cell,
    )
    most = max(one["result"]["most_held"] for one in found)
    return f"{fmean(one['result']['mean_held'] for one in found):.1f} / {most:.0f}"


def _mean(values: Iterable[float]) -> str:
    found = list(values)
    return f"{fmean(found):.2f} ({min(found):.2f})"


def _words(columns: Iterable[Column]) -> list[str]:
    return [f"{popularity}, {size} servers" for popularity, size in columns]
