# SPDX-License-Identifier: Apache-2.0
"""DoRA and biases of lora_B in batches with plain and base rows, against transformers and peft."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from moe_lora import LLM, SamplingParams
from tests.adapters.peft.test_columns import column_adapter
from tests.families import (
    ALL_FAMILIES,
    DENSE_FAMILIES,
    LATENT_FAMILIES,
    RECURRENT_FAMILIES,
    make_adapter,
    make_checkpoint,
)
from tests.models.generated_code import captured_graphs
from tests.models.test_oracle import make_prompts
from tests.oracle import greedy_reference

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "one_adapter_resident": {"max_loras": 1},
    "compiled": {"eager": False, "decode_buckets": (16,)},
    "host_arena": {"max_loras": 2, "host_arena_mb": 2},
    "merging": {"batching": "auto", "verify_merge": True},
    "merged": {"batching": "merged"},
    "host_workers": {"host_workers": 1, "max_loras": 2},
    "tensor_parallel": {"tensor_parallel": 2},
    "expert_parallel": {"expert_parallel": 2},
}
BASE_SEEDS = {"deepseek_v3": 1, "gemma3": 1, "gemma4": 1}
"""Seeds of families whose gates are close with others."""
ON_ONE_RANK = (*RECURRENT_FAMILIES, *LATENT_FAMILIES)
QUICK = {"llama": ("compiled", "merging"), "gpt_oss": ("expert_parallel",)}
"""Ways in the default run."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> checkpoint and adapters: DoRA, biases of lora_B, and a plain one."""
    known = {}

    def make(family):
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            base = make_checkpoint(family, folder / "base", BASE_SEEDS.get(family, 0))
            adapters = {
                "dora": column_adapter(family, base, folder / "dora", lora_rank=3, use_dora=True),
                "bias": column_adapter(family, base, folder / "bias", lora_rank=1, lora_bias=True, seed=1),
                "plain": make_adapter(family, base, folder / "plain", 4, seed=9),
            }
            if family == "dbrx":  # its oracle merges, and peft merges no bias without one of the base
                del adapters["bias"]
            known[family] = base, adapters
        return known[family]

    return make


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if way in QUICK.get(family, ()) else pytest.mark.slow)
        for family in ALL_FAMILIES
        for way in WAYS
        if not (family in DENSE_FAMILIES and way == "expert_parallel")
        if not (family in ON_ONE_RANK and way in ("host_workers", "tensor_parallel"))
        if not (family == "gemma4" and way == "tensor_parallel")
    ],
)
def test_a_mixed_batch_continues_as_peft_does(family, way, made):
    base, adapters = made(family)
    prompts = make_prompts()[:5]
    names = [None, *adapters]
    paths = {name: str(path) for name, path in adapters.items()}
    settings = {"eager": True, **WAYS[way]}
    graphs = nullcontext() if settings["eager"] else captured_graphs()
    with graphs, LLM(base, adapters=paths, dtype="float32", **settings) as llm:
        asked = [(prompts[i % 5], names[i % len(names)]) for i in range(8)]
        found = llm.generate(*map(list, zip(*asked, strict=True)), GREEDY)
        again = llm.generate(*map(list, zip(*asked, strict=True)), GREEDY)  # prefix hits
    for (prompt, name), *completions in zip(asked, found, again, strict=True):
        tokens = completions[0].token_ids
        expected = greedy_reference(base, adapters.get(name), [prompt], NUM_TOKENS, [tokens])
        expected.check_margins()
        assert [one.token_ids for one in completions] == [expected.tokens[0]] * 2, name
