# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_cluster's simulated records, beside the papers' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.harness.records import Record
from bench.harness.tables import table

Shown = tuple[list[dict[str, str]], str]
"""Rows of a table, and its title."""

# LoRAServe, sections V-F and V-G: LoRAServe by the system named, "up to".
PAPER = {
    "random": {"throughput": "2", "TTFT": "1/9", "servers": "0.50"},
    "contiguous": {"throughput": "2", "TTFT": "1/9", "servers": "0.50"},
    "everywhere, rank_aware": {"throughput": "1.20", "TTFT": "", "servers": "0.83"},
}
# Toppings, section 7.4, its simulation: mean time per token of rank_aware by the router named.
PAPER_TPT = {"shortest_pending_time": "0.78", "random": "0.77", "first_fit": "0.43"}


def summary_tables(records: Sequence[Record], *, markdown: bool = False) -> str:
    """Every study of the records, with its cells in sequence."""
    tables = []
    for cell in _cells(records):
        study = cell[0]["config"]["study"]
        rows, title = _SHOWN[study](cell)
        tables.append(table(rows, f"\n{title}", markdown=markdown))
    return "\n".join(["All of this is simulated; no engine ran.", *tables])


def _cells(records: Sequence[Record]) -> list[list[Record]]:
    keys = ("study", "model", "popularity", "num_servers", "rate_per_s")
    cells: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        config = record["config"]
        cells.setdefault(tuple(config.get(key) for key in keys), []).append(record)
    return list(cells.values())


def _weak_scaling(cell: Sequence[Record]) -> Shown:
    config, reference = cell[0]["config"], cell[0]["result"]
    rows = []
    for record in cell:
        name, result = record["config"]["system"], record["result"]
        row = {
            "system": name,
            "requests/s": f"{result['peak_per_s']:.1f}",
            "a server": f"{result['peak_per_s'] / config['num_servers']:.2f}",
            "loraserve by it": _ratio(reference["peak_per_s"], result["peak_per_s"]),
            "paper": PAPER.get(name, {}).get("throughput", ""),
        }
        for share, point in zip(("0.8", "1"), result["points"], strict=True):
            row[f"P95 TTFT s at {share}"] = f"{point['p95_ttft_s']:.2f}"
            row[f"TBT ms at {share}"] = f"{1e3 * point['mean_tbt_s']:.0f}"
        row["held, mean / most"] = f"{point['mean_held']:.1f} / {point['most_held']:.0f}"
        row["fetches"] = f"{point['num_fetches']:.0f}"
        rows.append(row)
    title = "{model}: {popularity}, {num_adapters} adapters on {num_servers} servers".format(**config)
    return rows, title


def _fewest_servers(cell: Sequence[Record]) -> Shown:
    config, reference = cell[0]["config"], cell[0]["result"]
    rows = [
        {
            "system": record["config"]["system"],
            "servers": f"{record['result']['num_servers']:g}",
            "loraserve by it": _ratio(reference["num_servers"], record["result"]["num_servers"]),
            "paper": PAPER.get(record["config"]["system"], {}).get("servers", ""),
        }
        for record in cell
    ]
    title = "{model}: fewest servers for {rate_per_s:.1f} requests/s, {num_adapters} adapters".format(
        **config
    )
    return rows, title


def _toppings(cell: Sequence[Record]) -> Shown:
    config = cell[0]["config"]
    ours = next(record["result"] for record in cell if record["config"]["system"] == "rank_aware")
    rows = []
    for record in cell:
        name, result = record["config"]["system"], record["result"]
        rows.append(
            {
                "system": name,
                "in SLO %": f"{100 * result['slo_attainment']:.1f}",
                "by the mean %": f"{100 * result['slo_attainment_of_mean']:.1f}",
                "TPT ms": f"{1e3 * result['mean_tpt_s']:.1f}",
                "rank_aware by it": _ratio(ours["mean_tpt_s"], result["mean_tpt_s"]),
                "paper": PAPER_TPT.get(name, ""),
                "TPOT ms": f"{1e3 * result['mean_tpot_s']:.1f}",
                "P95 TTFT s": f"{result['p95_ttft_s']:.2f}",
                "most held": f"{result['most_held']:.0f}",
                "decisions / cpu s": _whole(result.get("decisions_per_cpu_s")),
                "placement cpu s": _seconds(result.get("placement_cpu_s")),
            }
        )
    title = "{model}: {rate_per_s:g} requests/s, {num_adapters} adapters on {num_servers} servers".format(
        **config
    )
    base_ms = 1e3 * ours["mean_tpt_without_lora_s"]
    return rows, f"{title}; without LoRA {base_ms:.1f} ms a token"


_SHOWN = {"weak_scaling": _weak_scaling, "fewest_servers": _fewest_servers, "toppings": _toppings}


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
