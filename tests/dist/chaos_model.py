# SPDX-License-Identifier: Apache-2.0
"""A tiny model with many adapters, questions to it, and what one engine that nobody disturbs answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_lora.core.request import SamplingParams
from tests.families import ALL_TARGETS, VOCAB_SIZE, make_adapter, make_checkpoint

LORA_RANKS = (3, 4, 5, 8, 8, 12, 16, 16, 24, 33, 48, 64)
"""Of the adapters, one each."""
NUM_TOKENS = 40
MAX_MODEL_LEN = 128
MIN_MARGIN = 1e-3
"""In log probability: a nearer tie may fall the other way where an answer goes on at another instance."""


@dataclass(frozen=True)
class ChaosModel:
    """A checkpoint, and a folder with one PEFT directory for each name in `adapters`."""

    model_dir: Path
    adapter_dir: Path
    adapters: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A greedy request.  adapter: None asks the base model.  answer: the tokens that are right."""

    adapter: str | None
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def right(self, began_s: float, ended_s: float) -> list[tuple[int, ...]]:
        """Answers that are right for a request of this time."""
        return [self.answer]

    def may_be_absent(self, began_s: float, ended_s: float) -> bool:
        """Whether nobody may have known its adapter at this time."""
        return False


def make_chaos_model(folder: Path) -> ChaosModel:
    """A Mixtral of two layers, and adapters of different ranks on attention and experts."""
    base = make_checkpoint("mixtral", folder / "base")
    names = []
    for seed, lora_rank in enumerate(LORA_RANKS):
        names.append(f"a{seed:02}-r{lora_rank}")
        make_adapter(
            "mixtral",
            base,
            folder / "adapters" / names[-1],
            lora_rank,
            ALL_TARGETS,
            seed=seed,
            scale=2 / lora_rank**0.5,
        )
    return ChaosModel(base, folder / "adapters", tuple(names))


def ask_undisturbed(model: ChaosModel, seed: int, per_model: int = 8) -> dict[str | None, list[Question]]:
    """The same prompts to the base and to each adapter, answered by one engine in this process.

    Those with a near tie are left out; of `per_model` half must remain.  No two models answer a prompt alike,
    so that an answer of the wrong one is noticed.
    """
    from moe_lora import LLM

    rng = random.Random(seed)
    asked = [name for name in (None, *model.adapters) for _ in range(per_model)]
    drawn = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(2, 60))] for _ in range(per_model)]
    prompts = drawn * (1 + len(model.adapters))
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    paths = {name: str(model.adapter_dir / name) for name in model.adapters}
    settings = {"dtype": "float32", "eager": True, "num_threads": 1, "max_model_len": MAX_MODEL_LEN}
    with LLM(str(model.model_dir), adapters=paths, **settings) as llm:
        answers = llm.generate(prompts, asked, greedy)
    found: dict[str | None, list[Question]] = {name: [] for name in asked}
    for name, prompt, answer in zip(asked, prompts, answers, strict=True):
        assert answer.logprobs is not None
        if min(_lead(chosen.top) for chosen in answer.logprobs) > MIN_MARGIN:
            found[name].append(Question(name, tuple(prompt), tuple(answer.token_ids)))
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
    assert min(map(len, found.values())) >= per_model // 2, "too many near ties; choose another seed"
    return found


def _lead(top: Sequence[tuple[int, float]]) -> float:
    return top[0][1] - top[1][1]


def next_question(
    questions: dict[str | None, list[Question]], number: int, rng: random.Random, shift: int
) -> Question:
    """Request `number` of a replay: few adapters are popular, and every `shift` requests it is others."""
    adapters = [name for name in questions if name is not None]
    if rng.random() < 0.05:
        return rng.choice(questions[None])
    [place] = rng.choices(range(len(adapters)), [1 / (1 + index) for index in range(len(adapters))])
    return rng.choice(questions[adapters[(number // shift * 3 + place) % len(adapters)]])
