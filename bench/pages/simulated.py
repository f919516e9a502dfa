# SPDX-License-Identifier: Apache-2.0
"""Simulated points beside recorded ones, from sim.jsonl: docs/explanation/simulator.md."""

from __future__ import annotations

from .evidence import records
from .markdown import table

FILE = "sim.jsonl"
_RATIOS = {
    "p95_ttft_ms": "P95 TTFT at the client",
    "p95_decode_ttft_ms": "P95 decode TTFT",
    "mean_tpot_ms": "mean TPOT",
    "slo_attainment_adapters_decode_ttft": "adapters in SLO",
    "window_output_throughput": "tokens/s",
}


def nearness() -> str:
    """Median and worst difference between simulation and record."""
    (record,) = records(FILE, lambda config, result: config["part"] == "validate")
    rows = []
    for key, name in _RATIOS.items():
        unit = "points" if key.startswith("slo_") else "%"
        found = record["result"]["off"][key]
        rows.append(
            (name, *(f"{float(f'{100 * found[which]:.2g}'):g} {unit}" for which in ("median", "worst")))
        )
    return table(("", "median", "worst"), rows)
