# SPDX-License-Identifier: Apache-2.0
"""Prompt contents: random token ids, a trace's texts, or rows of a data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_lora.workload.traces.json_formats import estimate_tokens, json_lines
from moe_lora.workload.traces.records import RowReader, open_text

HASH_BLOCK_TOKENS = 512  # Mooncake: one hash id per 512-token block of the prompt


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt for an adapter (None: the base model), with the exact answer if known."""

    adapter: str | None
    prompt: str
    answer: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return estimate_tokens(self.prompt)


def random_token_ids(
    index: int, prompt_tokens: int, vocab_size: int, seed: int, hash_ids: Sequence[int] = ()
) -> list[int]:
    """prompt_tokens ids below vocab_size.  Deterministic.

    With hash_ids, each 512-token block depends on its id alone: shared blocks of the trace stay shared.
    """
    if not hash_ids:
        return np.random.default_rng((seed, 2, index)).integers(0, vocab_size, prompt_tokens).tolist()
    ids: list[int] = []
    for hash_id in hash_ids:
        if len(ids) >= prompt_tokens:
            break
        ids += np.random.default_rng((seed, 3, hash_id)).integers(0, vocab_size, HASH_BLOCK_TOKENS).tolist()
    rest = max(0, prompt_tokens - len(ids))
    return (
        ids[:prompt_tokens] + np.random.default_rng((seed, 2, index)).integers(0, vocab_size, rest).tolist()
    )


def cut_text(text: str, max_tokens: int, estimated_tokens: int) -> str:
    """The text's first part, in proportion, if its estimated length is above max_tokens."""
    if estimated_tokens <= max_tokens:
        return text
    return text[: max(1, len(text) * max_tokens // estimated_tokens)]


def read_prompts(path: str | Path) -> list[PromptRow]:
    """Rows {"adapter": name or null, "prompt": text[, "answer": text]} of a JSON-lines file.

    Ignores further keys.  Raises ValueError with file, line and key.
    """
    reader = RowReader(str(path))
    with open_text(path, "prompts") as file:
        lines = file.read().splitlines()
    rows = []
    for row in json_lines(lines, reader):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise reader.error("prompt", "missing or no text", "non-empty text in every row")
        for key in ("adapter", "answer"):
            if not isinstance(row.get(key), (str, type(None))):
                raise reader.error(key, f"{row[key]!r:.60} is no text", "text, or left out")
        rows.append(PromptRow(row.get("adapter"), row["prompt"], row.get("answer")))
    if not rows:
        raise ValueError(f"{path}: no prompt in the file")
    return rows


def choose_rows(wanted: Sequence[tuple[str | None, int]], rows: Sequence[PromptRow]) -> list[PromptRow]:
    """For each (adapter, prompt length) a row of that adapter, matched by rank of length.

    Of an adapter's m requests the one with the i-th shortest prompt gets row floor((i + 0.5) * n / m) of the
    adapter's n rows sorted by length.
    Raises ValueError if an adapter has no rows.
    """
    by_adapter: dict[str | None, list[PromptRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        by_adapter[row.adapter].append(row)
    requests: dict[str | None, list[int]] = defaultdict(list)
    for index, (adapter, _) in enumerate(wanted):
        requests[adapter].append(index)
    chosen: list[PromptRow | None] = [None] * len(wanted)
    for adapter, indices in requests.items():
        own = by_adapter.get(adapter)
        if not own:
            known = ", ".join(sorted(str(name) for name in by_adapter))
            raise ValueError(f"--prompts has no row for adapter {adapter!r}; it has rows for {known}")
        indices.sort(key=lambda index: wanted[index][1])
        for place, index in enumerate(indices):
            chosen[index] = own[int((place + 0.5) * len(own) / len(indices))]
    return [row for row in chosen if row is not None]
