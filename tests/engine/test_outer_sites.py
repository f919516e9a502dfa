# SPDX-License-Identifier: Apache-2.0
"""LoRA on the head and the embedding, served beside other rows, against transformers and peft."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from moe_lora import LLM, SamplingParams
from tests.adapters.peft.test_outer_sites import outer_adapter
from tests.families import (
    ALL_FAMILIES,
    DENSE_FAMILIES,
    LATENT_FAMILIES,
    RECURRENT_FAMILIES,
    make_adapter,
    make_checkpoint,
)
from tests.grids import with_quick
from tests.models.generated_code import captured_graphs
from tests.models.test_oracle import make_prompts
from tests.oracle import greedy_reference

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDS = {"dbrx": 20}
"""First seed of a family's adapters, where gates are close with others."""
BASE_SEEDS = {"glm4_moe": 1, "deepseek_v3": 1, "gemma4": 1}
KINDS = {"head": ("lm_head",), "embedding": ("embed_tokens",), "both": ("lm_head", "embed_tokens")}
WAYS = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "one_adapter_resident": {"max_loras": 1},
    "compiled": {"eager": False, "decode_buckets": (16,)},
    "host_arena": {"max_loras": 2, "host_arena_mb": 2},
    "merging": {"batching": "auto", "verify_merge": True},
    "dlora": {"batching": "dlora", "verify_merge": True},
    "host_workers": {"host_workers": 1, "max_loras": 2},
    "tensor_parallel": {"tensor_parallel": 2},
    "expert_parallel": {"expert_parallel": 2},
}
ON_ONE_RANK = (*RECURRENT_FAMILIES, *LATENT_FAMILIES, "gemma4")
QUICK = {
    "llama": ("compiled", "tensor_parallel"),
    "gpt_oss": ("expert_parallel", "host_workers"),
}
"""Ways in the default run."""
ALONE = ("qwen3_next", "deepseek_v3", "gemma4")
"""They go the first way alone: their heads and embeddings differ, or the layers between them."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> checkpoint and adapters: each kind, and one of the layers alone."""
    known = {}

    def make(family, **changes):
        key = family, *changes.items()
        if key not in known:
            folder = tmp_path_factory.mktemp(family)
            base = make_checkpoint(family, folder / "base", BASE_SEEDS.get(family, 0), **changes)
            adapters = {
                name: outer_adapter(
                    family,
                    base,
                    folder / name,
                    *modules,
                    lora_rank=3 + number,
                    seed=SEEDS.get(family, 0) + number,
                )
                for number, (name, modules) in enumerate(KINDS.items())
            }
            adapters["layers"] = make_adapter(
                family, base, folder / "layers", 4, seed=SEEDS.get(family, 0) + 9
            )
            known[key] = base, adapters
        return known[key]

    return make


def assert_tokens_of_peft(base, adapters, **settings):
    prompts = make_prompts()[:5]
    names = [None, *adapters]
    paths = {name: str(path) for name, path in adapters.items()}
    with LLM(base, adapters=paths, dtype="float32", **{"eager": True, **settings}) as llm:
        found = llm.generate([prompts[i % 5] for i in range(10)], [names[i % 5] for i in range(10)], GREEDY)
    for i, completion in enumerate(found):
        adapter = adapters.get(names[i % 5])
        expected = greedy_reference(base, adapter, [prompts[i % 5]], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], names[i % 5]


def is_quick(family, way):
    return way in QUICK.get(family, ()) or (family in ALONE and way == "all_at_once")


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if is_quick(family, way) else pytest.mark.slow)
        for family in ALL_FAMILIES
        for way in WAYS
        if not (family in DENSE_FAMILIES and way == "expert_parallel")
        if not (family in ON_ONE_RANK and way in ("host_workers", "tensor_parallel"))
    ],
)
def test_a_mixed_batch_continues_as_peft_does(family, way, made):
    with nullcontext() if WAYS[way].get("eager", True) else captured_graphs():
        assert_tokens_of_peft(*made(family), **WAYS[way])


@pytest.mark.parametrize("family", with_quick(("llama", "qwen3_moe"), ("llama",)))
def test_a_tied_head_is_adapted_apart_from_the_embedding(family, made):
    assert_tokens_of_peft(*made(family, tie_word_embeddings=True))


@pytest.mark.parametrize("family", with_quick(("llama", "granite"), ("llama",)))
def test_a_pair_that_peft_ties_to_the_head_is_served(family, made, tmp_path):
    """Whichever of both is the target, PEFT's config names the embedding, and its file has both pairs."""
    base, _ = made(family, tie_word_embeddings=True)
    adapters = {
        f"{module}{number}": outer_adapter(
            family, base, tmp_path / f"{module}{number}", module, lora_rank=number, ensure_weight_tying=True
        )
        for module in ("lm_head", "embed_tokens")
        for number in (3, 4)
    }
    assert_tokens_of_peft(base, adapters, batching="merged")


PATTERNS = (
    {"alpha_pattern": {"lm_head": 24}},
    {"rank_pattern": {"lm_head": 1}},
    {"rank_pattern": {"embed_tokens": 2}, "use_rslora": True},
    {"alpha_pattern": {"embed_tokens": 5}, "rank_pattern": {"lm_head": 2, "embed_tokens": 4}},
)


def test_patterns_of_tied_pairs_count_as_peft_counts_them(made, tmp_path):
    """The head's tensors have the embedding's rank, and its own patterns scale them."""
    base, _ = made("llama", tie_word_embeddings=True)
    fields = {"lora_rank": 3, "ensure_weight_tying": True, "scale": 0.3}
    adapters = {
        str(number): outer_adapter("llama", base, tmp_path / str(number), "lm_head", **fields, **patterns)
        for number, patterns in enumerate(PATTERNS)
    }
    assert_tokens_of_peft(base, adapters, batching="merged")
