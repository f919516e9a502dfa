# SPDX-License-Identifier: Apache-2.0
"""Models of random values with adapters of random forms, in one batch, against transformers and peft."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.core.errors import ConfigError
from tests.adapter_forms import problem
from tests.families import make_adapter, make_checkpoint
from tests.grids import with_quick
from tests.oracle import greedy_reference
from tests.random_models import FAMILIES, random_adapter, random_config

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("seed", with_quick(range(120), (3, 11)))
def test_tokens_are_those_of_transformers_and_peft(seed, tmp_path):
    """Or the values are refused, by transformers, PEFT or the server, with a named cause."""
    rng = Random(seed)
    family = rng.choice(FAMILIES)
    try:
        base = make_checkpoint(family, tmp_path / "base", **random_config(rng, family))
    except Exception:  # of transformers
        return
    made = {}
    for number in range(3):
        config = random_adapter(rng, family)
        with suppress(Exception):  # of PEFT
            path = make_adapter(family, base, tmp_path / str(number), scale=0.5, seed=number, **config)
            made[str(number)] = path
    size = rng.choice([4, 8, 16])
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (1, 3, size, size + 1, 41)]
    prompts.append([*prompts[-1][:-1], 4])  # shares pages
    try:
        adapters = {name: str(path) for name, path in made.items() if problem(path, base) is None}
        requests = [(prompt, name) for prompt in prompts for name in (None, *adapters)]
        found = answers(base, adapters, requests, rng, block_size=size)
    except ConfigError:
        return
    for name in (None, *adapters):
        chosen = [at for at, (_, other) in enumerate(requests) if other == name]
        tokens = [[found[turn][at].token_ids for at in chosen] for turn in (0, 1)]
        assert tokens[0] == tokens[1], "the second time from the prefix cache"
        try:
            asked = [requests[at][0] for at in chosen]
            expected = greedy_reference(base, made.get(name or ""), asked, NUM_TOKENS, tokens[0])
            expected.check_margins()
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
            continue  # transformers can't compute these values, or two tokens are equally likely
        assert tokens[0] == list(expected.tokens), name


def answers(base, adapters, requests, rng, **settings: Any):
    """All requests, twice."""
    prompts, names = [list(one) for one in zip(*requests, strict=True)]
    limits = {"max_num_batched_tokens": rng.choice([16, 64, 256]), "max_num_seqs": rng.choice([2, 5, 16])}
    batching = rng.choice(["unmerged", "unmerged", "unmerged", "merged"])
    with LLM(
        base,
        adapters=adapters,
        dtype="float32",
        eager=True,
        max_model_len=96,
        batching=batching,
        **limits,
        **settings,
    ) as llm:
        return [llm.generate(prompts, names, GREEDY) for _ in range(2)]
