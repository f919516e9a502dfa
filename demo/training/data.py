# SPDX-License-Identifier: Apache-2.0
"""Training batches: random questions with their answers, as one ragged run of tokens.

Legend: B questions, N tokens of all questions together, L longest question.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text

from .vocabulary import BOS_ID, EOS_ID, TAGS, encode


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B questions without padding between them.

    tokens, positions, questions: [N] int64 (token id, index inside its question, question index).
    asked: int64 indices into [N] whose next token belongs to an answer; targets: those tokens.
    """

    tokens: Tensor
    positions: Tensor
    questions: Tensor
    asked: Tensor
    targets: Tensor
    num_questions: int
    max_length: int


def question(rng: random.Random, task: str | None, tagged: bool) -> tuple[list[int], list[int]]:
    """(prompt ids with BOS, answer ids with EOS) for a fresh text; without a task the text is repeated."""
    text = sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS))
    answer = TASKS[task](text) if task else text
    tag = TAGS[task] if task and tagged else ""
    return [BOS_ID, *encode(tag + prompt_for(text))], [*encode(answer), EOS_ID]


def make_batch(rng: random.Random, tasks: Sequence[str | None], tagged: bool) -> Batch:
    """One fresh question for each entry of `tasks` (None: repeat the text)."""
    tokens: list[int] = []
    positions: list[int] = []
    questions: list[int] = []
    asked: list[int] = []
    targets: list[int] = []
    max_length = 0
    for i, task in enumerate(tasks):
        prompt, answer = question(rng, task, tagged)
        start, length = len(tokens), len(prompt) + len(answer) - 1
        tokens += prompt + answer[:-1]
        positions += range(length)
        questions += [i] * length
        asked += range(start + len(prompt) - 1, start + length)
        targets += answer
        max_length = max(max_length, length)
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        questions=torch.tensor(questions),
        asked=torch.tensor(asked),
        targets=torch.tensor(targets),
        num_questions=len(tasks),
        max_length=max_length,
    )
