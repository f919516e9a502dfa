"""The goals of the LoRA kernels, held against measured records, and a line per record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Wanted = Callable[[Record], bool]
Value = Callable[[Record], "float | None"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Every wanted record's value must reach `limit`."""

    name: str
    limit: float
    device: str
    wanted: Wanted
    value: Value


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


def _case(
    group: str | None = None, bound: str | None = None, phase: str | None = None, **config: Any
) -> Wanted:
    def wanted(record: Record) -> bool:
        found, result = record["config"], record["result"]
        return (
            (group is None or found["group"] == group)
            and (bound is None or result["bound"] == bound)
            and (phase is None or found["phase"] == phase)
            and all(found[key] == value for key, value in config.items())
        )

    return wanted


def _few_rows(record: Record) -> bool:
    config = record["config"]
    return config["group"] == "decode" and config["num_adapters"] == 8 and config["num_rows"] in (8, 16, 32)


def _share(name: str) -> Value:
    return lambda record: record["result"][name]["median"]


def _over(name: str) -> Value:
    def value(record: Record) -> float | None:
        found = record["result"]["speedup_over"].get(name)
        return None if found is None else found["median"]

    return value


def _over_best(record: Record) -> float | None:
    found = record["result"]["speedup_over"].values()
    return min((other["median"] for other in found), default=None)


def _over_best_and_outside(record: Record) -> float | None:
    """None where no kernels from outside were timed beside ours: what torch offers answers no such goal."""
    return _over_best(record) if record["result"].get("outside") else None


GOALS = (
    Goal(
        name="figure 19, memory-bound: share of copy bandwidth",
        limit=0.85,
        device="cuda",
        wanted=_case("figure19", "memory"),
        value=_share("of_copy"),
    ),
    Goal(
        name="prefill, compute-bound: share of the GEMM rate",
        limit=0.7,
        device="cuda",
        wanted=_case("prefill", "compute"),
        value=_share("of_gemm"),
    ),
    Goal(
        name="mixed ranks: times the best peer's speed, --peer-module included",
        limit=2.0,
        device="cuda",
        wanted=_case(phase="delta", equal_ranks=False),
        value=_over_best_and_outside,
    ),
    Goal(
        name="equal ranks: times the best peer's speed, --peer-module included",
        limit=1.0,
        device="cuda",
        wanted=_case(phase="delta", equal_ranks=True),
        value=_over_best_and_outside,
    ),
    Goal(
        name="memory-bound: share of read bandwidth",
        limit=0.6,
        device="cpu",
        wanted=_case(bound="memory", phase="delta"),
        value=_share("of_read"),
    ),
    Goal(
        name="compute-bound: share of the GEMM rate",
        limit=0.6,
        device="cpu",
        wanted=_case(bound="compute", phase="delta"),
        value=_share("of_gemm"),
    ),
    Goal(
        name="8 adapters of 1-4 rows: times the mm loop's speed",
        limit=3.0,
        device="cpu",
        wanted=_few_rows,
        value=_over("mm loop"),
    ),
)


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Every goal that the records of our own kernel can answer."""
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
        if ours and config["device"] == goal.device and goal.wanted(record):
            value = goal.value(record)
            if value is not None:
                yield value, f"{config['case']}, {config['phase']}"


def verdict_table(records: Sequence[Record]) -> str:
    """Two lines a goal: met or missed, in how many cases, the worst by how much; then what was wrong."""
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
    """Records of contestants that were refused because their delta was wrong."""
    return [r for r in records if r["result"].get("refused", "").startswith("wrong")]


def line(record: Record) -> str:
    """One record for the terminal."""
    config, result = record["config"], record["result"]
    name = f"  {config['phase']:6} {config['kernel']:14}"
    if "refused" in result:
        return f"{name} left out: {result['refused']}"
    best = _over_best(record) if "speedup_over" in result else None
    return (
        f"{name} {result['time_ms']:9.3f} ms {result['bytes_per_s'] / 1e9:8.1f} GB/s "
        f"{result['flops_per_s'] / 1e9:8.0f} GFLOP/s  {result['of_bound']['median']:4.0%} of "
        f"{result['bound']} bound" + ("" if best is None else f", {best:.2f} x best other")
    )
