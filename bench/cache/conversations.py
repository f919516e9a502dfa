# SPDX-License-Identifier: Apache-2.0
"""Requests with shared prefixes and their tokens: dialogues of several turns, and prompts with one prefix.

`Drifting` is a popularity that moves over the adapters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.popularity.popularity import Popularity, from_weights
from moe_lora.workload.replay_plan import TurnRequest, gamma_arrivals_until
from moe_lora.workload.traces.records import HASH_BLOCK_TOKENS, Trace

PILOT_DIALOGUES = 1000
"""Draws that estimate the turns of a dialogue under max_tokens."""


@dataclass(frozen=True, kw_only=True)
class DialogueShape:
    """Dialogues of one application.  Lengths in tokens.

    prefix_tokens: common start of an adapter's prompts.  turns: mean number, geometric.  question_tokens,
    answer_tokens: means of log-normal lengths of deviation `spread` (of the logarithm).  think_s: mean time
    between turns' arrivals, exponential, at least half the mean.  max_tokens: of
    prompt and answer; ends a dialogue.
    """

    prefix_tokens: int
    turns: float
    question_tokens: float
    answer_tokens: float
    think_s: float
    spread: float = 0.6
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if not self.turns >= 1:
            raise ValueError(f"turns={self.turns} is not allowed; choose 1 or more")
        if self.prefix_tokens + 2 >= self.max_tokens:
            raise ValueError(f"prefix_tokens={self.prefix_tokens} leaves no room in {self.max_tokens} tokens")


def dialogues(
    shape: DialogueShape, adapters: Popularity, *, rate_per_s: float, duration_s: float, seed: int = 0
) -> list[TurnRequest]:
    """Requests by arrival: Poisson dialogues of one adapter each; a turn's prompt is the dialogue so far and
    a new question.  Deterministic.

    rate_per_s: mean rate of requests, after a start-up phase (dialogues start at rate / mean turns).
    """
    rng = np.random.default_rng(seed)
    num_turns = float(np.mean([len(_lengths(shape, rng)) for _ in range(PILOT_DIALOGUES)]))
    starts = gamma_arrivals_until(duration_s, rate_per_s / num_turns, 1.0, rng)
    chosen = adapters.draw(starts / duration_s, rng)
    ids = itertools.count(1)
    prefixes = {name: _fresh(ids, shape.prefix_tokens) for name in adapters.adapters}
    found: list[TurnRequest] = []
    for start_s, adapter in zip(starts.tolist(), chosen, strict=True):
        turns = _turns(shape, prefixes[adapter], ids, rng)
        found += [
            TurnRequest(0, start_s + after_s, adapter, prompt, answer) for after_s, prompt, answer in turns
        ]
    return _numbered([request for request in found if request.arrival_s < duration_s])


def _lengths(shape: DialogueShape, rng: np.random.Generator) -> list[tuple[int, int]]:
    num_turns = int(rng.geometric(1 / shape.turns))
    drawn = [
        np.maximum(1, np.round(rng.lognormal(math.log(mean) - shape.spread**2 / 2, shape.spread, num_turns)))
        for mean in (shape.question_tokens, shape.answer_tokens)
    ]
    whole = np.minimum(np.stack(drawn, axis=1), (shape.max_tokens - shape.prefix_tokens) // 2)
    fits = np.cumsum(whole.sum(axis=1)) <= shape.max_tokens - shape.prefix_tokens
    return [(int(question), int(answer)) for question, answer in whole[fits]]


def _turns(
    shape: DialogueShape, prefix: tuple[int, ...], ids: itertools.count[int], rng: np.random.Generator
) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    said, after_s = prefix, 0.0
    turns = []
    for question, answer in _lengths(shape, rng):
        prompt = said + _fresh(ids, question)
        said = prompt + _fresh(ids, answer)
        turns.append((after_s, prompt, said[len(prompt) :]))
        after_s += shape.think_s / 2 + rng.exponential(shape.think_s / 2)
    return turns


def mooncake_chats(
    trace: Trace,
    adapters: Popularity,
    *,
    rate_per_s: float,
    block_tokens: int = 32,
    max_prompt_tokens: int = 3584,
    max_answer_tokens: int = 512,
    duration_s: float = math.inf,
    seed: int = 0,
) -> list[TurnRequest]:
    """Mooncake's conversations at another model's lengths: one adapter each, times stretched to the rate.

    A hash id becomes block_tokens tokens, so prompts are 512 / block_tokens times shorter with the same
    sharing, and are cut at max_prompt_tokens.  A conversation: all requests with the same first block.
    Answers keep their length up to max_answer_tokens; no later prompt contains them.
    Raises ValueError if the trace has no hash ids.
    """
    rows = trace.requests
    if not all(row.hash_ids for row in rows):
        raise ValueError(f"{trace.path}: requests without hash_ids; give a Mooncake trace")
    stretch = (len(rows) - 1) / rate_per_s / rows[-1].arrival_s
    firsts = list(dict.fromkeys(row.hash_ids[0] for row in rows))
    rng = np.random.default_rng(seed)
    chosen = dict(zip(firsts, adapters.draw(np.arange(len(firsts)) / len(firsts), rng), strict=True))
    ids = itertools.count(-1, -1)
    found = []
    for row in rows:
        if row.arrival_s * stretch >= duration_s:
            break
        length = max(1, math.ceil(row.prompt_tokens * block_tokens / HASH_BLOCK_TOKENS))
        blocks = (range(block * block_tokens, (block + 1) * block_tokens) for block in row.hash_ids)
        prompt = tuple(
            itertools.islice(itertools.chain.from_iterable(blocks), min(length, max_prompt_tokens))
        )
        answer = _fresh(ids, min(row.output_tokens, max_answer_tokens))
        found.append(TurnRequest(0, row.arrival_s * stretch, chosen[row.hash_ids[0]], prompt, answer))
    return _numbered(found)


def _numbered(found: Sequence[TurnRequest]) -> list[TurnRequest]:
    ordered = sorted(found, key=lambda request: request.arrival_s)
    return [
        TurnRequest(index, request.arrival_s, request.adapter, request.prompt, request.answer)
        for index, request in enumerate(ordered)
    ]


def _fresh(ids: itertools.count[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(itertools.islice(ids, num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting(Popularity):
    """The k-th of N adapters at time share t has the popularity of the (k + m) mod N-th of `probabilities`,
    with m = int(t · num_moves).

    Every 1 / num_moves of the time the least popular adapter becomes the most popular, as a new function
    would (probabilities: falling).
    """

    num_moves: int

    def at(self, time_share: float) -> Popularity:
        shift = -int(time_share * self.num_moves)
        return from_weights(self.adapters, np.roll(self.probabilities, shift).tolist(), self.lora_ranks)

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        probabilities = np.asarray(self.probabilities)
        places = rng.choice(len(probabilities), size=len(time_shares), p=probabilities)
        moved = (places - (time_shares * self.num_moves).astype(int)) % len(probabilities)
        return [self.adapters[index] for index in moved.tolist()]
