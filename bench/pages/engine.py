# SPDX-License-Identifier: Apache-2.0
"""Decode speed on a CPU, from engine.jsonl: README.md and docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.harness.records import Record

from .evidence import RecordError, records
from .markdown import table

FILE = "engine.jsonl"
BATCHES = (1, 8, 16, 64)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def _cell(dtype: str, system: str, num_requests: int, num_adapters: int) -> dict[str, Any]:
    def is_it(config: dict[str, Any], result: dict[str, Any]) -> bool:
        cell = (config["num_requests"], config["cell_num_adapters"])
        return (config["dtype"], config["system"], *cell) == (dtype, system, num_requests, num_adapters)

    (record,) = records(FILE, is_it)
    result: dict[str, Any] = record["result"]
    return result


def over(dtype: str, system: str, other: str, num_requests: int, num_adapters: int) -> float:
    found = _cell(dtype, system, num_requests, num_adapters)["speedup_over"][other]["median"]
    return float(found)


def cost(dtype: str, num_requests: int) -> float:
    """Share that 8 adapters (a single request: 1) add to a step of the base model."""
    return 1 / over(dtype, "engine", "engine base", num_requests, min(8, num_requests)) - 1


Value = Callable[[str], str]


def _transformers(dtype: str) -> str:
    ratios = (f"{over(dtype, 'engine base', 'transformers base', n, 0):.1f}" for n in BATCHES)
    return f"{' / '.join(ratios)} ×"


def _costs(dtype: str) -> str:
    return f"{' / '.join(f'{cost(dtype, n):.0%}'[:-1] for n in BATCHES)} %"


def _ceiling(dtype: str) -> str:
    share = _cell(dtype, "engine", 16, 8)["share_of_ceiling"]["median"]
    return f"{share:.0%}".replace("%", " %") if share >= 0.6 else f"**{share:.0%}**".replace("%", " %")


def _times(system: str, other: str, digits: int) -> Value:
    return lambda dtype: f"{over(dtype, system, other, 16, 8):.{digits}f} ×"


def _rows() -> Iterator[tuple[str, Value, str]]:
    yield "base model over transformers, 1 / 8 / 16 / 64 requests", _transformers, "≥ 1.3 / 1 / 1 / 1.3"
    yield "8 adapters, 16 requests, over peft grouped by adapter", _times("engine", "peft grouped", 0), "≥ 50"
    mixed = _times("engine attention", "peft mixed", 1)
    yield "8 attention adapters, 16 requests, over peft's mixed batch", mixed, "≥ 2"
    yield (
        "cost of adapters over our base, 1 / 8 / 16 / 64 requests (1 / 8 / 8 / 8 adapters)",
        _costs,
        "≤ 25 at 16",
    )
    yield "share of the read ceiling, 8 adapters, 16 requests", _ceiling, "≥ 60 %"


def decode() -> str:
    """The goals in both dtypes."""
    rows = [(what, *(value(dtype) for dtype in DTYPES.values()), goal) for what, value, goal in _rows()]
    return table(("", *DTYPES, "goal"), rows)


def readme() -> str:
    """The goals in bf16, the commit, and tokens per second."""
    rows: list[Sequence[str]] = [(what, value("bfloat16"), goal) for what, value, goal in _rows()]
    speeds = " / ".join(f"{_cell('bfloat16', 'engine', n, min(8, n))['tokens_per_s']:.0f}" for n in BATCHES)
    rows.append(("tokens/s with adapters, 1 / 8 / 16 / 64 requests", speeds, ""))
    return table(("", f"reached at `{_commit()}`", "goal"), rows)


def adapters() -> str:
    """Cost of adapters by requests and adapters, in bf16."""
    found: list[Record] = records(FILE, lambda config, result: config["system"] == "engine")
    rows = []
    for one in found:
        config = one["config"]
        if config["dtype"] == "bfloat16":
            cell = config["num_requests"], config["cell_num_adapters"]
            cost = 1 / one["result"]["speedup_over"]["engine base"]["median"] - 1
            rows.append((str(cell[0]), str(cell[1]), f"{one['result']['tokens_per_s']:.0f}", f"{cost:.0%}"))
    return table(("requests", "adapters", "tokens/s", "longer than the base model's step"), rows)


def _commit() -> str:
    commits = {str(one["env"]["git_commit"][:7]) for one in records(FILE)}
    if len(commits) > 1:
        raise RecordError(f"{FILE} holds records of {', '.join(sorted(commits))}; run the whole bench again")
    return commits.pop()
