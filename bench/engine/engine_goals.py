# SPDX-License-Identifier: Apache-2.0
"""The goals of the engine's decode speed, held against measured records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.harness.records import Record
from bench.harness.tables import table


class Goal(NamedTuple):
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
    """Goals covered by the records.  headline: (requests, adapters) of the LoRA goals."""
    found: list[Goal] = []
    for record in records:
        config, result = record["config"], record["result"]
        cell = (config["num_requests"], config["cell_num_adapters"])
        at = f"{cell[0]} requests, {cell[1]} adapters"
        if config["system"] == "engine base" and cell[1] == 0:
            over = result["speedup_over"]["transformers base"]["median"]
            limit = 1.3 if cell[0] in (1, 64) else 1.0
            found.append(Goal(f"base over transformers, {cell[0]} requests", config["dtype"], over, limit))
        elif config["system"] == "engine" and cell == headline:
            found += _lora_goals(config["dtype"], result, at)
        elif config["system"] == "engine attention" and cell == headline:
            over = result["speedup_over"]["peft mixed"]["median"]
            found.append(Goal(f"attention over peft mixed, {at}", config["dtype"], over, 2.0))
    return found


def _lora_goals(dtype: str, result: dict[str, Any], at: str) -> Iterator[Goal]:
    over = {name: found["median"] for name, found in result["speedup_over"].items()}
    overhead, limit = 1 / over["engine base"] - 1, max(0.25, 1.4 * result["adapter_share"])
    yield Goal(f"over peft grouped, {at}", dtype, over["peft grouped"], 50.0)
    yield Goal(f"LoRA overhead, {at}", dtype, overhead, limit, at_least=False)
    yield Goal(f"share of the ceiling, {at}", dtype, result["share_of_ceiling"]["median"], 0.6)


def goals_table(found: Sequence[Goal]) -> str:
    """One line a goal."""
    rows = [
        {
            "": "met" if goal.met else "MISSED",
            "dtype": goal.dtype,
            "goal": goal.name,
            "value": f"{goal.value:.2f}",
            "limit": f"{'>=' if goal.at_least else '<='} {goal.limit:.2f}",
        }
        for goal in found
    ]
    return table(rows, "Goals")
