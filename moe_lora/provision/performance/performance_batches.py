"""Which batches to time so that every term of a performance model shows, and timing them in rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_lora.core.errors import ConfigError
from moe_lora.policies.step_work import Row

from .performance_models import MeasuredStep

HELD_OUT_SHARE = 0.25
MAX_PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests that start together: a prefill step with their prompts, then decode steps."""

    rows: tuple[Row, ...]
    held_out: bool


class StepClock(Protocol):
    """An engine that runs batches and looks at the clock."""

    def run(self, rows: Sequence[Row]) -> tuple[float, list[float]]:
        """Seconds of the prefill step with these rows, and of decode steps after it."""
        ...


def adapter_names(ranks: Sequence[int], num_adapters: int) -> dict[str, int]:
    """num_adapters adapters of each rank: name -> rank."""
    return {f"rank{rank}-{index}": rank for rank in ranks for index in range(num_adapters)}


def batches_to_time(
    ranks: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    num_adapters: int,
    num_mixed: int,
    max_tokens: int,
    seed: int = 0,
) -> list[Batch]:
    """Each (rank, batch size) with as many adapters as there are and with one for all; num_mixed batches of
    random size, ranks and adapters; without adapters, each size.

    Prompt lengths are drawn from 1 to 64 tokens, at most max_tokens in all.  A quarter, drawn, is held out.
    Raises ConfigError for no ranks or sizes, and where a batch has more requests than max_tokens.
    """
    if not ranks or not batch_sizes:
        raise ConfigError("no ranks or no batch sizes were given; give one or more of each")
    if max(batch_sizes) > max_tokens:
        raise ConfigError(
            f"batch size {max(batch_sizes)} is more than the {max_tokens} tokens of a step; allow more tokens"
        )
    rng = np.random.default_rng(seed)
    names = adapter_names(ranks, num_adapters)
    chosen: list[list[tuple[str | None, int]]] = [[(None, 0)] * size for size in batch_sizes]
    for rank in ranks:
        own = [name for name, lora_rank in names.items() if lora_rank == rank]
        for size in batch_sizes:
            chosen.append([(own[i % len(own)], rank) for i in range(size)])
            if size > 1 and len(own) > 1:
                chosen.append([(own[0], rank)] * size)
    everything = list(names.items())
    for _ in range(num_mixed):
        size = int(rng.integers(1, max(batch_sizes) + 1))
        pool = rng.choice(len(everything), size=int(rng.integers(1, len(everything) + 1)), replace=False)
        chosen.append([everything[int(i)] for i in rng.choice(pool, size=size)])
    held_out = rng.permutation(len(chosen)) < HELD_OUT_SHARE * len(chosen)
    return [
        Batch(rows=_with_prompts(one, max_tokens, rng), held_out=bool(out))
        for one, out in zip(chosen, held_out, strict=True)
    ]


def measure(
    clocks: Mapping[str, StepClock],
    batches: Sequence[Batch],
    num_rounds: int,
    *,
    quantile: float = 0.5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[MeasuredStep]]:
    """By kernel: a prefill and a decode step of each batch.

    In a round every kernel's clock runs each batch, in an order that is reversed in every second round, so
    that what else the machine does falls on all of them alike.  One round before the first is not counted.
    quantile: of a batch's samples, 0.5 is their median; others' work on the machine only ever lengthens a
    step, so a lower one is nearer to what an idle machine shows.  Raises ConfigError if it is outside [0, 1].
    """
    if not 0 <= quantile <= 1:
        raise ConfigError(f"quantile={quantile} must lie between 0 and 1 (0.5: the median)")
    prefill: dict[tuple[str, int], list[float]] = {}
    decode: dict[tuple[str, int], list[float]] = {}
    total = (num_rounds + 1) * len(batches)
    for number in range(-1, num_rounds):
        order = list(clocks)[:: 1 if number % 2 else -1]
        for index, batch in enumerate(batches):
            for kernel in order:
                prefill_s, decode_s = clocks[kernel].run(batch.rows)
                if number >= 0:
                    prefill.setdefault((kernel, index), []).append(prefill_s)
                    decode.setdefault((kernel, index), []).extend(decode_s)
            on_progress((number + 1) * len(batches) + index + 1, total)
    return {
        kernel: [_step("prefill", batch, prefill[kernel, i], quantile) for i, batch in enumerate(batches)]
        + [_step("decode", batch, decode[kernel, i], quantile) for i, batch in enumerate(batches)]
        for kernel in clocks
    }


def _step(phase: str, batch: Batch, samples_s: Sequence[float], quantile: float) -> MeasuredStep:
    return MeasuredStep(
        phase=phase,
        rows=batch.rows if phase == "prefill" else _decode_rows(batch.rows),
        seconds=float(np.quantile(samples_s, quantile)),
        held_out=batch.held_out,
        samples_s=tuple(samples_s),
    )


def _decode_rows(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(Row(row.adapter, row.lora_rank) for row in rows)


def _with_prompts(
    rows: Sequence[tuple[str | None, int]], max_tokens: int, rng: np.random.Generator
) -> tuple[Row, ...]:
    longest = min(MAX_PROMPT_TOKENS, max_tokens // len(rows))
    lengths = rng.integers(1, longest + 1, size=len(rows))
    return tuple(Row(name, rank, int(n)) for (name, rank), n in zip(rows, lengths, strict=True))
