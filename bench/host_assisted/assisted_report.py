# SPDX-License-Identifier: Apache-2.0
"""Tables of `bench_host_assisted`, and how its records stand against the goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.harness.interleave import ratio
from bench.harness.records import Record

from .assisted_plan import ASYNCHRONOUS, CACHED, ON_DEMAND, OURS

COMPARED = ("ttft_s", "tpt_s", "e2e_s")
_MAX_OVER_CACHED, _MAX_OVER_ASYNCHRONOUS = 1.05, 1.02


def over(record: Record, figure: str, system: str, other: str) -> dict[str, float]:
    """Ratio of two systems in the same rounds (see `ratio`)."""
    rounds = record["result"]["rounds"]
    return ratio([one[figure] for one in rounds[system]], [one[figure] for one in rounds[other]])


def lines(record: Record) -> list[dict[str, str]]:
    """A row per system: medians over rounds, and the excess over the first system in the same rounds."""
    rounds: dict[str, list[dict[str, float]]] = record["result"]["rounds"]
    first = next(iter(rounds))
    found = []
    for name, of_rounds in rounds.items():
        median = {key: statistics.median(one[key] for one in of_rounds) for key in of_rounds[0]}
        row = {"system": name}
        for key, value in median.items():
            unit = " ms" if key.endswith("_s") or key.endswith("request") else " %"
            row[key.removesuffix("_s") + unit] = f"{(1e3 if unit == ' ms' else 1e2) * value:.1f}"
        for key in [key for key in COMPARED if key in median]:
            one = over(record, key, name, first)
            row[f"{key[:-2]} / {first}"] = f"{one['median']:.3f} ({one['p25']:.3f}-{one['p75']:.3f})"
        found.append(row)
    return found


def goals(records: Sequence[Record]) -> list[str]:
    """Goal, result, met or missed."""
    found = []
    for record in records:
        name, rounds = record["config"]["name"], record["result"]["rounds"]
        if name == "S3" and OURS in rounds:
            found += [_goal(record, key, CACHED, _MAX_OVER_CACHED) for key in COMPARED]
            found += [_goal(record, key, ON_DEMAND, 1.0) for key in COMPARED]
        elif ASYNCHRONOUS in rounds and OURS in rounds:
            found += [_goal(record, key, ASYNCHRONOUS, _MAX_OVER_ASYNCHRONOUS) for key in ("ttft_s", "e2e_s")]
        if ON_DEMAND in rounds:
            share = {n: statistics.median(one["interrupted"] for one in r) for n, r in rounds.items()}
            text = ", ".join(f"{n} {value:.1%}" for n, value in share.items() if n != CACHED)
            found.append(f"{name}: decoding interrupted, share of a request's time: {text}")
    return found


def _goal(record: Record, key: str, other: str, at_most: float) -> str:
    one: dict[str, Any] = over(record, key, OURS, other)
    verdict = "met" if one["median"] <= at_most else "MISSED"
    return (
        f"{record['config']['name']}: {key[:-2]} over {other} {one['median']:.3f} "
        f"({one['min']:.3f}-{one['max']:.3f}), goal {at_most:g}: {verdict}"
    )
