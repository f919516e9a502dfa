"""The goals of the engine's decode speed, held against measured records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """value must be at least (or at most) `limit`."""

    name: str
    dtype: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def goals(records: Sequence[Record], headline: tuple[int, int]) -> list[Goal]:
    """Every goal that the records can answer.  headline: (requests, adapters) of the LoRA goals."""
    found: list[Goal] = []
    for dtype in dict.fromkeys(record["config"]["dtype"] for record in records):
        cells = {
            (r["config"]["system"], r["config"]["num_requests"], r["config"]["cell_num_adapters"]): r[
                "result"
            ]
            for r in records
            if r["config"]["dtype"] == dtype
        }
        found += _base_goals(dtype, cells)
        if ("engine", *headline) in cells:
            found += _lora_goals(dtype, cells, headline)
    return found


def _base_goals(dtype: str, cells: dict[tuple[str, int, int], Any]) -> Iterator[Goal]:
    for (system, num_requests, num_adapters), result in cells.items():
        if system == "engine base" and num_adapters == 0:
            yield Goal(
                name=f"base over transformers, {num_requests} requests",
                dtype=dtype,
                value=result["speedup_over"]["transformers base"]["median"],
                limit=1.3 if num_requests in (1, 64) else 1.0,
            )


def _lora_goals(
    dtype: str, cells: dict[tuple[str, int, int], Any], headline: tuple[int, int]
) -> Iterator[Goal]:
    requests, adapters = headline
    at = f"{requests} requests, {adapters} adapters"
    engine, attention = cells["engine", requests, adapters], cells["engine attention", requests, adapters]
    overhead = 1 / engine["speedup_over"]["engine base"]["median"] - 1
    base_overhead_limit = max(0.25, 1.4 * engine["adapter_share"])
    values = (
        (f"over peft grouped, {at}", engine["speedup_over"]["peft grouped"]["median"], 50.0, True),
        (f"attention over peft mixed, {at}", attention["speedup_over"]["peft mixed"]["median"], 2.0, True),
        (f"LoRA overhead, {at}", overhead, base_overhead_limit, False),
        (f"share of the ceiling, {at}", engine["share_of_ceiling"]["median"], 0.6, True),
    )
    for name, value, limit, at_least in values:
        yield Goal(name=name, dtype=dtype, value=value, limit=limit, at_least=at_least)


def goals_table(found: Sequence[Goal]) -> str:
    """One line a goal."""
    return "\n".join(
        f"{'met   ' if goal.met else 'MISSED'} {goal.dtype:9} {goal.name:48} {goal.value:8.2f} "
        f"{'>=' if goal.at_least else '<='} {goal.limit:.2f}"
        for goal in found
    )
