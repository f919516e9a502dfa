"""What of a batch the time of its step depends on.

Legend: S the requests of a step; t_i tokens and r_i rank of request i (rank 0: the base model); T = sum t_i;
R_a rank and T_a tokens of distinct adapter a; p = experts per token / experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FEATURES = ("step", "tokens", "experts", "padded_ranks", "ranks", "adapter_ranks", "expert_ranks")
"""What times are linear in:

step            1: what every step costs
tokens          T
experts         1 - (1 - p)^T: share of the experts that the tokens choose, so of the base weights read
padded_ranks    T max r_i: rank rows that a padding kernel reads (Toppings equation 2, BGMV)
ranks           sum t_i r_i: rank rows at true rank (Toppings equation 2, MBGMV)
adapter_ranks   sum R_a over distinct adapters: rows of dense adapter weights, each read once
expert_ranks    sum R_a (1 - (1 - p)^T_a): likewise of the experts that the adapter's tokens choose
"""


class StepRow(Protocol):
    """A request in a step.  lora_rank 0 and adapter None: the base model."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def lora_rank(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of it that the step computes: 1 in decode, its prompt's in prefill."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A `StepRow`, or several of one adapter in one: only their tokens count."""

    adapter: str | None
    lora_rank: int
    num_tokens: int = 1


class StepWork:
    """The rows of a step; one more or less takes constant time.  expert_share: p, 1 of a dense model."""

    def __init__(self, expert_share: float, rows: Iterable[StepRow] = ()) -> None:
        self.num_tokens = 0
        self._unused = 1.0 - expert_share
        self._ranks = 0
        self._tokens_of_rank: Counter[int] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self._adapter_ranks = 0
        self._expert_ranks = 0.0
        for row in rows:
            self.add(row)

    def add(self, row: StepRow) -> None:
        self._change(row, row.num_tokens)

    def take(self, row: StepRow) -> None:
        """A row like one that was added leaves."""
        self._change(row, -row.num_tokens)

    def features(self, more: StepRow | None = None) -> dict[str, float]:
        """All of `FEATURES`; more: as if this row were there as well."""
        largest = max(self._tokens_of_rank, default=0)
        num_tokens, ranks = self.num_tokens, self._ranks
        adapter_ranks, expert_ranks = self._adapter_ranks, self._expert_ranks
        if more is not None:
            num_tokens += more.num_tokens
            largest = max(largest, more.lora_rank)
            ranks += more.num_tokens * more.lora_rank
            distinct, share = self._gain(more, more.num_tokens)
            adapter_ranks += distinct
            expert_ranks += share
        return {
            "step": 1.0,
            "tokens": float(num_tokens),
            "experts": 1.0 - self._unused**num_tokens,
            "padded_ranks": float(num_tokens * largest),
            "ranks": float(ranks),
            "adapter_ranks": float(adapter_ranks),
            "expert_ranks": expert_ranks,
        }

    def _change(self, row: StepRow, num_tokens: int) -> None:
        distinct, share = self._gain(row, num_tokens)
        self._adapter_ranks += distinct
        self._expert_ranks += share
        self._ranks += num_tokens * row.lora_rank
        self.num_tokens += num_tokens
        _count(self._tokens_of_rank, row.lora_rank, num_tokens)
        if row.adapter is not None:
            _count(self._tokens_of, row.adapter, num_tokens)
        if not self.num_tokens:
            self._expert_ranks = 0.0  # what rounding left

    def _gain(self, row: StepRow, num_tokens: int) -> tuple[int, float]:
        """By how much so many tokens of the row's adapter more (or less) change its ranks, and experts'."""
        if row.adapter is None:
            return 0, 0.0
        before = self._tokens_of.get(row.adapter, 0)
        after = before + num_tokens
        distinct = row.lora_rank * ((after > 0) - (before > 0))
        return distinct, row.lora_rank * (self._unused**before - self._unused**after)


def features(rows: Iterable[StepRow], expert_share: float) -> dict[str, float]:
    """All of `FEATURES` of a step; expert_share: p, 1 of a dense model."""
    return StepWork(expert_share, rows).features()


def _count(counts: Counter, key: object, change: int) -> None:
    counts[key] += change
    if not counts[key]:
        del counts[key]
