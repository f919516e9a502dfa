# SPDX-License-Identifier: Apache-2.0
"""The main lines of a result, as a rich table and in the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# (heading, key of the result, format)
METRICS: tuple[tuple[str, str, str], ...] = (
    ("Requests completed", "completed", "{:.0f}"),
    ("Requests failed", "failed", "{:.0f}"),
    ("Requests interrupted", "interrupted", "{:.0f}"),
    ("Duration", "duration", "{:.1f} s"),
    ("Requests per second", "request_throughput", "{:.2f}"),
    ("Requests per second within SLO (goodput)", "request_goodput", "{:.2f}"),
    ("Output tokens per second", "output_throughput", "{:.1f}"),
    ("TTFT P50", "p50_ttft_ms", "{:.1f} ms"),
    ("TTFT P95", "p95_ttft_ms", "{:.1f} ms"),
    ("Decode TTFT P95 (without prefill)", "p95_decode_ttft_ms", "{:.1f} ms"),
    ("TPOT mean", "mean_tpot_ms", "{:.2f} ms"),
    ("TPOT P95", "p95_tpot_ms", "{:.2f} ms"),
    ("ITL P99", "p99_itl_ms", "{:.2f} ms"),
    ("E2E P50", "p50_e2el_ms", "{:.1f} ms"),
    ("E2E P95", "p95_e2el_ms", "{:.1f} ms"),
    ("TPT mean (E2E / output tokens)", "mean_tpt_ms", "{:.2f} ms"),
    ("Average latency (sum E2E / sum tokens)", "avg_latency_ms", "{:.2f} ms"),
    ("Requests within SLO", "slo_attainment", "{:.1%}"),
    ("Adapters with > 90 % of requests within SLO", "slo_attainment_adapters", "{:.1%}"),
    ("  the same by decode TTFT", "slo_attainment_adapters_decode_ttft", "{:.1%}"),
    ("Exact answers", "exact_answers", "{:.1%}"),
)
_ALWAYS_SHOWN = frozenset({"completed", "failed", "slo_attainment_adapters"})


def shown(result: dict[str, Any], key: str, form: str) -> str:
    """The value as text; a dash without a value."""
    value = result.get(key)
    return "–" if value is None else form.format(value)


def rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(heading, a text per result) for each metric with at least one value."""
    found = []
    for heading, key, form in METRICS:
        absent = all(result.get(key) is None for result in results)
        if key == "interrupted":
            absent = not any(result.get(key) for result in results)
        if absent and key not in _ALWAYS_SHOWN:
            continue
        found.append((heading, [shown(result, key, form) for result in results]))
    return found


def summary_table(results: Sequence[dict[str, Any]]) -> Table:
    """One column per result, headed by its `label`."""
    from rich.table import Table

    goals = {f"TTFT {one['slo_ttft_s']:g} s, TPOT {one['slo_tpot_s']:g} s" for one in results}
    table = Table(
        title=f"SLO: {goals.pop() if len(goals) == 1 else 'of each run its own'}", title_justify="left"
    )
    table.add_column("")
    for result in results:
        table.add_column(str(result.get("label", "")), justify="right")
    for heading, texts in rows(results):
        table.add_row(heading, *texts)
    return table
