# SPDX-License-Identifier: Apache-2.0
"""Search over launch configurations and algorithms by rank; results, and their place in a GPU's table.

Without a clock: the caller's `measure` gives times, so that the search runs anywhere.

Both phases of a kernel are tuned together, as a `Pair` of configurations, with an equal order of sums
(`configs.ORDER_FIXING`); the rest may differ.  A pair's speed is the geometric mean of its phases.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_lora.core.shape import MAX_CUDA_LORA_RANK
from moe_lora.kernels.triton.configs import (
    ORDER_FIXING,
    PHASES,
    Choice,
    Config,
    ConfigEntry,
    ConfigTable,
    order_of,
)
from moe_lora.report.results import read_json, write_json

from .lora_spaces import config_space

Pair = dict[str, Config]
"""A configuration for each of PHASES."""
Measure = Callable[[str, Config], float]
"""Seconds of a phase with a configuration."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Key of a table's entries for both phases."""

    kernel: str
    dtype: str
    in_features: int
    out_features: int

    def key(self, phase: str) -> str:
        return f"{self.kernel} {self.dtype} {phase} {self.in_features}x{self.out_features}"


Crossovers = dict[Target, list[tuple[int, int, str]]]
"""Classes of ranks (least, largest, algorithm) at each site."""


@dataclass
class Found:
    """Seconds of all measurements so far, by target key and configuration (as JSON), kept in a file.

    Failures and wrong results are infinite and kept as null.
    """

    path: Path | None = None
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Found:
        """Results of an earlier run, or empty.  Raises ValueError for a file that is not JSON."""
        known = read_json(path) if path.exists() else {}
        return cls(
            path,
            {
                key: {name: math.inf if s is None else s for name, s in found.items()}
                for key, found in known.items()
            },
        )

    def measured(self, key: str, config: Config, measure: Callable[[], float]) -> float:
        """Seconds of this configuration: the known ones, or measured and written to the file."""
        name = json.dumps(config, sort_keys=True)
        known = self.seconds.setdefault(key, {})
        if name not in known:
            known[name] = measure()
            self._save()
        return known[name]

    def knows(self, key: str, config: Config) -> bool:
        return json.dumps(config, sort_keys=True) in self.seconds.get(key, {})

    def best(self, target: Target) -> Pair | None:
        """The fastest working pair with the same order of sums, or None."""
        orders: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = {}
        for phase in PHASES:
            for name, seconds in self.seconds.get(target.key(phase), {}).items():
                fastest = orders.setdefault(order_of(target.kernel, json.loads(name)), {})
                fastest[phase] = min(fastest.get(phase, (math.inf, name)), (seconds, name))
        pairs = {
            together([fastest[phase][0] for phase in PHASES]): {
                phase: json.loads(fastest[phase][1]) for phase in PHASES
            }
            for fastest in orders.values()
            if len(fastest) == len(PHASES)
        }
        best_s = min(pairs, default=math.inf)
        return None if math.isinf(best_s) else pairs[best_s]

    def _save(self) -> None:
        if self.path is not None:
            write_json(
                self.path,
                {
                    key: {name: None if math.isinf(s) else s for name, s in found.items()}
                    for key, found in self.seconds.items()
                },
            )


def together(seconds: Sequence[float]) -> float:
    """Geometric mean: a phase twice as fast is worth as much, however long it takes."""
    return math.prod(seconds) ** (1 / len(seconds))


def neighbours(kernel: str, pair: Pair) -> list[Pair]:
    """Pairs of the space with one different value, parameter by parameter.

    Parameters that fix the order of sums change in both phases at once, the rest in one.
    """
    space = config_space(kernel)
    found = []
    for name in space[0]:
        values = dict.fromkeys(other[name] for other in space)
        groups = [PHASES] if name in ORDER_FIXING[kernel] else [(phase,) for phase in PHASES]
        for phases, value in itertools.product(groups, values):
            changed = pair | {phase: {**pair[phase], name: value} for phase in phases}
            if changed != pair and all(changed[phase] in space for phase in phases):
                found.append(changed)
    return found


def descend(target: Target, start: Pair, measure: Measure, found: Found) -> Iterator[Pair]:
    """Coordinate descent from `start` until no single change helps; yields its measurements.

    Measures some dozens of hundreds of configurations, as each compiles for seconds.
    """
    best, best_s = start, _seconds(target, start, measure, found)
    yield start
    improved = True
    while improved:
        improved = False
        for pair in neighbours(target.kernel, best):
            fresh = any(not found.knows(target.key(phase), pair[phase]) for phase in PHASES)
            seconds = _seconds(target, pair, measure, found)
            if fresh:
                yield pair
            if seconds < best_s:
                best, best_s, improved = pair, seconds, True
                break


def _seconds(target: Target, pair: Pair, measure: Measure, found: Found) -> float:
    return together(
        [
            found.measured(target.key(phase), config, partial(measure, phase, config))
            for phase, config in pair.items()
        ]
    )


def in_turn(searches: Sequence[Iterator[object]], out_of_time: Callable[[], bool]) -> int:
    """One step of each search in turn until all have ended or time is up; the number of steps."""
    running, steps = list(searches), 0
    while running:
        for search in list(running):
            if out_of_time():
                return steps
            if next(search, None) is None:
                running.remove(search)
            else:
                steps += 1
    return steps


def rank_classes(seconds: Mapping[int, Mapping[str, float]]) -> list[tuple[int, int, str]]:
    """(least rank, largest rank, algorithm) classes over 1..512, from seconds by rank and algorithm.

    A measured rank's fastest algorithm serves the ranks down to the next smaller measured rank; the largest
    rank's serves all above.  Skips ranks without a working algorithm.
    """
    fastest = {
        rank: min(by_name, key=by_name.__getitem__)
        for rank, by_name in sorted(seconds.items())
        if by_name and min(by_name.values()) < math.inf
    }
    classes: list[tuple[int, int, str]] = []
    ends = [0, *list(fastest)[:-1], MAX_CUDA_LORA_RANK]
    for (low, high), name in zip(pairwise(ends) if fastest else (), fastest.values(), strict=True):
        if classes and classes[-1][2] == name:
            low = classes.pop()[0] - 1
        classes.append((low + 1, high, name))
    return classes


def updated(
    table: ConfigTable,
    targets: Sequence[Target],
    found: Found,
    crossovers: Crossovers,
    note: str,
) -> ConfigTable:
    """The table with the best configurations and rank classes ahead of its old entries."""
    entries = [
        ConfigEntry(**_key(target), kernel=target.kernel, phase=phase, config=config, state="tuned")
        for target in targets
        for phase, config in (found.best(target) or {}).items()
    ]
    choices = [
        Choice(**_key(target), algorithm=name, min_rank=low, max_rank=high, state="tuned")
        for target, classes in crossovers.items()
        for low, high, name in classes
    ]
    replaced = {_place(entry) for entry in entries}
    chosen = {_place(choice) for choice in choices}
    return ConfigTable(
        table.gpu,
        note,
        (*entries, *(entry for entry in table.entries if _place(entry) not in replaced)),
        (*choices, *(c for c in table.choices if _place(c) not in chosen)),
    )


def _key(target: Target) -> dict[str, Any]:
    return {
        "dtype": target.dtype,
        "in_features": target.in_features,
        "out_features": target.out_features,
    }


def _place(row: ConfigEntry | Choice) -> tuple[Any, ...]:
    kernel, phase = (row.kernel, row.phase) if isinstance(row, ConfigEntry) else (None, None)
    return (kernel, row.dtype, phase, row.in_features, row.out_features)
