# SPDX-License-Identifier: Apache-2.0
"""Plan of `bench_engine`: sizes, cells, repeats."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.random_model import FULL, TINY, ModelSize

PROMPT_TOKENS = 33
"""Two blocks of the prefix cache and one token: the cache holds all but the last token."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """grouped_rounds: rounds of peft grouped by adapter, in the headline cell (one elsewhere)."""

    size: ModelSize
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    num_requests: tuple[int, ...] = (1, 8, 16, 64)
    num_adapters: tuple[int, ...] = (1, 8, 32)
    headline: tuple[int, int] = (16, 8)
    num_rounds: int = 7
    steps_per_round: int = 4
    grouped_rounds: int = 3
    max_grouped_adapters: int = 8
    answer_tokens: int = 8
    eager: bool = False

    def cells(self) -> list[tuple[int, int]]:
        """(requests, adapters in use), each once; 0 adapters: base model only."""
        cells = []
        for requests in self.num_requests:
            in_use = [0, *(min(requests, adapters) for adapters in self.num_adapters)]
            cells += [(requests, adapters) for adapters in dict.fromkeys(in_use)]
        return cells


PLANS = {
    "full": Plan(size=FULL),
    "quick": Plan(
        size=TINY,
        dtypes=("float32",),
        num_requests=(1, 4),
        num_adapters=(2,),
        headline=(4, 2),
        num_rounds=2,
        steps_per_round=2,
        grouped_rounds=1,
        answer_tokens=4,
        eager=True,
    ),
}
