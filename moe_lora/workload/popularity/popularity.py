# SPDX-License-Identifier: Apache-2.0
"""Zipf and uniform popularity, or counts from a file."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.traces.formats import table
from moe_lora.workload.traces.records import RowReader, need, open_text


@dataclass(frozen=True, slots=True)
class Popularity:
    """Probability of each adapter; `probabilities` sums to 1.

    Only subclasses change over time.  lora_ranks: of `adapters`; empty if unknown.
    """

    adapters: tuple[str, ...]
    probabilities: tuple[float, ...]
    lora_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.adapters or len(self.adapters) != len(self.probabilities):
            raise ValueError(f"{len(self.adapters)} adapters with {len(self.probabilities)} probabilities")
        if len(set(self.adapters)) != len(self.adapters):
            twice = next(name for name, count in Counter(self.adapters).items() if count > 1)
            raise ValueError(f"an adapter is named twice: {twice}; name each once")
        if min(self.probabilities) < 0 or not math.isclose(math.fsum(self.probabilities), 1.0, rel_tol=1e-9):
            raise ValueError("probabilities must be >= 0 and sum to 1")
        if self.lora_ranks and len(self.lora_ranks) != len(self.adapters):
            raise ValueError(f"{len(self.adapters)} adapters with {len(self.lora_ranks)} ranks")

    def at(self, time_share: float) -> Popularity:
        """The popularity at `time_share` (0: start, 1: end)."""
        return self

    def sample(self, num_requests: int, rng: np.random.Generator) -> list[str]:
        """Independent draws."""
        drawn = rng.choice(len(self.adapters), size=num_requests, p=np.asarray(self.probabilities))
        return [self.adapters[index] for index in drawn]

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        """The adapter of each request, by arrival as a share of the time."""
        return self.sample(len(time_shares), rng)


def from_weights(
    adapters: Sequence[str], weights: Sequence[float], lora_ranks: Sequence[int] = ()
) -> Popularity:
    """P(adapter) = weight / sum of weights.

    Raises ValueError for no adapter, no weight > 0, or a negative or infinite weight.
    """
    if not adapters:
        raise ValueError("no adapter to choose from; name at least one")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError("an adapter's weight must be finite and >= 0, and one of them > 0")
    total = math.fsum(weights)
    return Popularity(tuple(adapters), tuple(weight / total for weight in weights), tuple(lora_ranks))


def zipf(adapters: Sequence[str], s: float) -> Popularity:
    """P(i-th adapter) ~ 1 / i**s, i = 1, 2, ...; s = 0 is uniform.

    Source: InfiniLoRA section 6.1 (s = 1.2).
    """
    need(0 <= s < math.inf, "zipf", s, "a finite number >= 0 (0 is uniform, 1.2 usual)")
    return from_weights(adapters, [(index + 1) ** -s for index in range(len(adapters))])


def uniform(adapters: Sequence[str]) -> Popularity:
    """Equal probabilities."""
    return zipf(adapters, 0.0)


def read_counts(path: str | Path) -> Popularity:
    """Popularity by counts: JSON {"adapter": count} or CSV with header adapter,count.

    Raises ValueError for a bad count, and if all are 0.
    """
    reader = RowReader(str(path))
    counts: dict[str, int] = {}
    with open_text(path, "adapter counts") as lines:
        for name, value in _count_rows(lines, reader):
            if name in counts:
                raise reader.error("adapter", f"{name!r} is there twice", "each adapter once")
            counts[name] = reader.count("count", value)
    if not any(counts.values()):
        raise ValueError(f"{path}: no adapter with a count > 0")
    return from_weights(tuple(counts), tuple(counts.values()))


def _count_rows(lines: TextIO, reader: RowReader) -> Iterator[tuple[str, object]]:
    text = lines.read()
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{reader.path}: not JSON ({error})") from None
        yield from found.items()
        return
    header, rows = table(io.StringIO(text, newline=""), reader)
    if header != ["adapter", "count"]:
        raise ValueError(f"{reader.path}, line 1: header {header}; needed: adapter,count")
    for row in rows:
        if len(row) != 2:
            raise reader.error("count", f"{len(row)} columns", "two columns: adapter,count")
        yield row[0].strip(), row[1].strip()
