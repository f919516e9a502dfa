"""Search over launch configurations and algorithms by rank; what is found, and its place in a GPU's table.

No clock here: the caller's `measure` says how long something takes, so that the search runs anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_lora.kernels.gpu.configs import Choice, Config, Entry, Table, config_space
from moe_lora.report.results import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one entry of a table is for."""

    kernel: str
    dtype: str
    phase: str
    in_features: int
    out_features: int

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.dtype} {self.phase} {self.in_features}x{self.out_features}"


@dataclass
class Found:
    """Seconds of everything measured so far, by target key and configuration (as JSON), kept in a file.

    What failed or was wrong is infinite and kept as null.
    """

    path: Path | None = None
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Found:
        """What an earlier run left, or nothing.  Raises ValueError for a file that is not JSON."""
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

    def best(self, key: str) -> Config | None:
        """The fastest configuration that worked, if any was measured."""
        known = self.seconds.get(key, {})
        name = min(known, key=known.__getitem__, default=None)
        return None if name is None or math.isinf(known[name]) else json.loads(name)

    def _save(self) -> None:
        if self.path is not None:
            write_json(
                self.path,
                {
                    key: {name: None if math.isinf(s) else s for name, s in found.items()}
                    for key, found in self.seconds.items()
                },
            )


def neighbours(kernel: str, config: Config) -> list[Config]:
    """Configurations of the space that differ from this one in one value, parameter by parameter."""
    space = config_space(kernel)
    return [
        {**config, name: value}
        for name in config
        for value in dict.fromkeys(other[name] for other in space)
        if value != config[name] and {**config, name: value} in space
    ]


def descend(
    target: Target, start: Config, measure: Callable[[Config], float], found: Found
) -> Iterator[Config]:
    """Coordinate descent from `start` until no single value's change helps; yields what it measures.

    The whole space has hundreds of configurations, each compiled for seconds; this measures some dozen.
    """
    best, best_s = start, found.measured(target.key, start, partial(measure, start))
    yield start
    improved = True
    while improved:
        improved = False
        for config in neighbours(target.kernel, best):
            fresh = not found.knows(target.key, config)
            seconds = found.measured(target.key, config, partial(measure, config))
            if fresh:
                yield config
            if seconds < best_s:
                best, best_s, improved = config, seconds, True
                break


def enumerate_all(
    target: Target, start: Config, measure: Callable[[Config], float], found: Found
) -> Iterator[Config]:
    """Every configuration of the space, `start` first; yields what it measures."""
    for config in [start, *config_space(target.kernel)]:
        if not found.knows(target.key, config):
            found.measured(target.key, config, partial(measure, config))
            yield config


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
    """(least rank, largest rank, algorithm) classes that cover 1..512, from seconds by rank and algorithm.

    A measured rank's fastest algorithm serves the ranks above the next smaller measured one up to it, the
    largest one's all above.  Ranks at which nothing worked are passed over.
    """
    fastest = {
        rank: min(by_name, key=by_name.__getitem__)
        for rank, by_name in sorted(seconds.items())
        if by_name and min(by_name.values()) < math.inf
    }
    classes: list[tuple[int, int, str]] = []
    ends = [0, *list(fastest)[:-1], MAX_LORA_RANK]
    for (low, high), name in zip(pairwise(ends) if fastest else (), fastest.values(), strict=True):
        if classes and classes[-1][2] == name:
            low = classes.pop()[0] - 1
        classes.append((low + 1, high, name))
    return classes


def updated(
    table: Table,
    targets: Sequence[Target],
    found: Found,
    crossovers: Mapping[tuple[Target, bool], Sequence[tuple[int, int, str]]],
    note: str,
) -> Table:
    """The table with the best configurations and classes of ranks that were found, ahead of what it had."""
    entries = [
        Entry(**_key(target), kernel=target.kernel, config=config, state="tuned")
        for target in targets
        for config in (found.best(target.key),)
        if config is not None
    ]
    choices = [
        Choice(**_key(target), algorithm=name, min_rank=low, max_rank=high, whole=whole, state="tuned")
        for (target, whole), classes in crossovers.items()
        for low, high, name in classes
    ]
    replaced = {_place(entry) for entry in entries}
    chosen = {(choice.whole, *_place(choice)) for choice in choices}
    return Table(
        table.gpu,
        note,
        (*entries, *(entry for entry in table.entries if _place(entry) not in replaced)),
        (*choices, *(c for c in table.choices if (c.whole, *_place(c)) not in chosen)),
    )


def _key(target: Target) -> dict[str, Any]:
    return {
        "dtype": target.dtype,
        "phase": target.phase,
        "in_features": target.in_features,
        "out_features": target.out_features,
    }


def _place(row: Entry | Choice) -> tuple[Any, ...]:
    kernel = row.kernel if isinstance(row, Entry) else None
    return (kernel, row.dtype, row.phase, row.in_features, row.out_features)
