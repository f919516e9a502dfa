# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_cache's records, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.harness.records import Record
from bench.harness.tables import table

from .cache_plan import OURS

CELL_NAMES = ("model", "num_adapters", "application", "popularity", "share_of_capacity")

SHOWN = (
    ("ttft_ms", "TTFT ms", ".0f"),
    ("queue_ms", "queue", ".0f"),
    ("adapter_cold_ms", "LoRA cold", ".1f"),
    ("history_cold_ms", "KV cold", ".1f"),
    ("prefill_ms", "prefill", ".0f"),
    ("tpot_ms", "TPOT ms", ".1f"),
    ("peak_per_s", "peak/s", ".2f"),
    ("adapter_hit_rate", "LoRA hits", ".2f"),
    ("kv_device_hit_rate", "KV hits", ".2f"),
    ("kv_host_hit_rate", "KV host", ".2f"),
    ("invalid_kv_share", "invalid KV", ".3f"),
    ("device_usage", "device", ".2f"),
    ("host_usage", "host", ".2f"),
)
# FastLibra's sections 6.3 and 6.6 to 6.8: TTFT and TPOT of FastLibra by the baseline's, peak by its peak.
PAPER = {
    "static": {"ttft_ms": 1 - 0.603, "tpot_ms": 1 - 0.339, "peak_per_s": 1.7},
    "slora": {"ttft_ms": 1 - 0.501, "tpot_ms": 1 - 0.286, "peak_per_s": 1.6},
    "fastlibra-wom": {"ttft_ms": 1 / 1.27, "tpot_ms": 1 / 1.18, "peak_per_s": 1 / (1 - 0.198)},
    "fastlibra-wos": {"ttft_ms": 1 / 1.24, "tpot_ms": 1 / 1.15, "peak_per_s": 1 / (1 - 0.172)},
    "fastlibra-wol": {"ttft_ms": 1 / 1.13, "tpot_ms": 1 / 1.11, "peak_per_s": 1 / (1 - 0.131)},
}


def cell_table(records: Sequence[Record]) -> str:
    """A line per policy of one cell."""
    name = records[0]["config"]
    title = "\n{model}, {num_adapters} adapters, {application}, popularity {popularity}".format(**name)
    return table(_rows(records, SHOWN), title)


def _rows(records: Sequence[Record], shown: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [
        {"policy": record["config"]["policy"], "setting": record["config"]["setting"]}
        | {column: format(record["result"][key], form) for key, column, form in shown}
        for record in records
    ]


def measured_table(records: Sequence[Record]) -> str:
    """A line per policy of one application and rate."""
    config = records[0]["config"]
    title = "\n{application}, {rate_per_s:.1f} requests/s ({share_of_capacity:g} of the capacity)".format(
        **config
    )
    shown = [column for column in SHOWN if column[0] != "peak_per_s"] + [
        ("requests_per_s", "requests/s", ".2f"),
        ("same_answers", "same answers", ".3f"),
    ]
    return table(_rows(records, shown), title)


def measured_comparison(records: Sequence[Record]) -> str:
    """Our policy over each other policy: geometric means over the cells."""
    rows = []
    for baseline in dict.fromkeys(record["config"]["policy"] for record in records):
        if baseline != OURS:
            row = {"of": OURS, "by": baseline}
            for key, column in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("requests_per_s", "requests/s")):
                row[column] = f"{ratio(records, OURS, baseline, key):.3f}"
            rows.append(row)
    return table(rows, "\nRatios, geometric means over all cells (measured)")


def comparison(records: Sequence[Record]) -> str:
    """FastLibra, and ours, by each baseline: geometric means over the cells, beside the paper's."""
    rows = []
    for contestant in ("fastlibra", OURS):
        for baseline in dict.fromkeys(record["config"]["policy"] for record in records):
            if baseline == contestant:
                continue
            row = {"of": contestant, "by": baseline}
            for key, column, _ in SHOWN:
                if key not in ("ttft_ms", "tpot_ms", "peak_per_s"):
                    continue
                row[column] = f"{ratio(records, contestant, baseline, key):.3f}"
                if contestant == "fastlibra" and baseline in PAPER:
                    row[f"{column}, paper"] = f"{PAPER[baseline][key]:.3f}"
            rows.append(row)
    return table(rows, "\nRatios, geometric means over all cells")


def ratio(records: Sequence[Record], contestant: str, baseline: str, key: str) -> float:
    """Geometric mean over common cells."""
    values: dict[str, dict[str, float]] = {}
    for record in records:
        config = record["config"]
        cell = " ".join(str(config.get(name)) for name in CELL_NAMES)
        values.setdefault(config["policy"], {})[cell] = record["result"][key]
    ours, theirs = values[contestant], values[baseline]
    return float(np.exp(np.mean([np.log(ours[cell] / theirs[cell]) for cell in ours if cell in theirs])))
