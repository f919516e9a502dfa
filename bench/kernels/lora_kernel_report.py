# SPDX-License-Identifier: Apache-2.0
"""The goals of the LoRA kernels, held against measured records, and a line per record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.records import Record

Fields = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A goal for every concerned record of our kernel on the device.

    value: of a record's config and result; None for unconcerned records.
    """

    name: str
    limit: float
    device: str
    value: Callable[[Fields, Fields], float | None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal against the records: how many cases met it, and the worst."""

    goal: Goal
    num_cases: int
    num_met: int
    worst: float
    worst_case: str

    @property
    def met(self) -> bool:
        return self.num_met == self.num_cases


def _figure19(config: Fields, result: Fields) -> float | None:
    wanted = config["group"] == "figure19" and result["bound"] == "memory"
    return result["of_copy"]["median"] if wanted else None


def _prefill(config: Fields, result: Fields) -> float | None:
    wanted = config["group"] == "prefill" and result["bound"] == "compute"
    return result["of_gemm"]["median"] if wanted else None


def _mixed_ranks(config: Fields, result: Fields) -> float | None:
    return None if config["equal_ranks"] else _over_best_outside(config, result)


def _equal_ranks(config: Fields, result: Fields) -> float | None:
    return _over_best_outside(config, result) if config["equal_ranks"] else None


def _over_best_outside(config: Fields, result: Fields) -> float | None:
    """None without outside kernels in the run: torch alone answers no such goal."""
    return _over_best(result) if config["phase"] == "delta" and result.get("outside") else None


def _over_best(result: Fields) -> float | None:
    return min((other["median"] for other in result["speedup_over"].values()), default=None)


def _of_read(config: Fields, result: Fields) -> float | None:
    wanted = config["phase"] == "delta" and result["bound"] == "memory"
    return result["of_read"]["median"] if wanted else None


def _of_gemm(config: Fields, result: Fields) -> float | None:
    wanted = config["phase"] == "delta" and result["bound"] == "compute"
    return result["of_gemm"]["median"] if wanted else None


def _few_rows(config: Fields, result: Fields) -> float | None:
    few = config["group"] == "decode" and config["num_adapters"] == 8 and config["num_rows"] in (8, 16, 32)
    loop = result["speedup_over"].get("mm loop")
    return loop["median"] if few and loop is not None else None


GOALS = (
    Goal("figure 19, memory-bound: share of copy bandwidth", 0.85, "cuda", _figure19),
    Goal("prefill, compute-bound: share of the GEMM rate", 0.7, "cuda", _prefill),
    Goal("mixed ranks: times the best peer's speed, --peer-module included", 2.0, "cuda", _mixed_ranks),
    Goal("equal ranks: times the best peer's speed, --peer-module included", 1.0, "cuda", _equal_ranks),
    Goal("memory-bound: share of read bandwidth", 0.6, "cpu", _of_read),
    Goal("compute-bound: share of the GEMM rate", 0.6, "cpu", _of_gemm),
    Goal("8 adapters of 1-4 rows: times the mm loop's speed", 3.0, "cpu", _few_rows),
)


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Goals covered by the records of our own kernel."""
    found = []
    for goal in GOALS:
        values = list(_values(goal, records))
        if values:
            worst, case = min(values)
            met = sum(value >= goal.limit for value, _ in values)
            found.append(Verdict(goal=goal, num_cases=len(values), num_met=met, worst=worst, worst_case=case))
    return found


def _values(goal: Goal, records: Iterable[Record]) -> Iterator[tuple[float, str]]:
    for record in records:
        config = record["config"]
        ours = config["role"] == "ours" and "refused" not in record["result"]
        if ours and config["device"] == goal.device:
            value = goal.value(config, record["result"])
            if value is not None:
                yield value, f"{config['case']}, {config['phase']}"


def verdict_table(records: Sequence[Record]) -> str:
    """Two lines per goal: met or missed, number of cases, the worst case; then wrong results."""
    lines = []
    found = verdicts(records)
    for verdict in found:
        goal = verdict.goal
        lines.append(
            f"{'met   ' if verdict.met else 'MISSED'} {goal.name} >= {goal.limit:g}: "
            f"{verdict.num_met} of {verdict.num_cases}\n"
            f"       worst {verdict.worst:.2f} ({verdict.worst / goal.limit - 1:+.0%}): {verdict.worst_case}"
        )
    answered = {verdict.goal.name for verdict in found}
    devices = {record["config"]["device"] for record in records}
    lines += [
        f"OPEN   {goal.name} >= {goal.limit:g}: no case of it was measured"
        for goal in GOALS
        if goal.device in devices and goal.name not in answered
    ]
    lines += [
        f"WRONG  {r['config']['kernel']}, {r['config']['case']}: {r['result']['refused']}"
        for r in wrong(records)
    ]
    return "\n".join(lines)


def wrong(records: Iterable[Record]) -> list[Record]:
    """Records of contestants refused for a wrong delta."""
    return [r for r in records if r["result"].get("refused", "").startswith("wrong")]


def line(record: Record) -> str:
    """One record for the terminal."""
    config, result = record["config"], record["result"]
    name = f"  {config['phase']:6} {config['kernel']:14}"
    if "refused" in result:
        return f"{name} left out: {result['refused']}"
    best = _over_best(result) if "speedup_over" in result else None
    return (
        f"{name} {result['time_ms']:9.3f} ms {result['bytes_per_s'] / 1e9:8.1f} GB/s "
        f"{result['flops_per_s'] / 1e9:8.0f} GFLOP/s  {result['of_bound']['median']:4.0%} of "
        f"{result['bound']} bound" + ("" if best is None else f", {best:.2f} x best other")
    )
