# SPDX-License-Identifier: Apache-2.0
"""Our forward pass against transformers and peft, driven without an engine."""

from __future__ import annotations

import pytest
import torch

from moe_lora.families import shape_of
from tests.families import (
    ALL_FAMILIES,
    FAMILIES,
    RECURRENT_FAMILIES,
    make_adapter,
    make_checkpoint,
    tiny_config,
)
from tests.grids import with_quick
from tests.oracle import reference_logits

from .harness import Harness

MAX_LOGIT_DIFFERENCE = 1e-4
LENGTHS = (1, 7, 40, 3, 18, 11, 26)
SLOTS = (-1, 0, 1, 2, 3, -1, 0)  # base rows and adapters of ranks 4, 8, 16, 64 in one batch


def make_prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def adapter_of(served, slot):
    return None if slot < 0 else served.adapters[slot]


def assert_logits(served, slots, sequences, found):
    """transformers in fp32 is itself 4e-5 away from recurrent layers' logits in fp64."""
    dtype = torch.float64 if served.family in RECURRENT_FAMILIES else torch.float32
    for slot, sequence, logits in zip(slots, sequences, found, strict=True):
        expected = reference_logits(served.model_dir, adapter_of(served, slot), sequence, dtype)
        assert (logits - expected).abs().max() < MAX_LOGIT_DIFFERENCE, (slot, len(sequence))


WHOLE = ("llama", "mixtral", "gpt_oss")
IN_CHUNKS = (*FAMILIES, *RECURRENT_FAMILIES, "deepseek_v3", "gemma4", "afmoe")
IN_BF16 = ("mixtral", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, WHOLE))
def test_prefill_logits_of_a_mixed_batch_equal_peft(family, served):
    model, prompts = served(family), make_prompts()
    _, logits = Harness(model.model_dir, model.adapters).prefill(prompts, SLOTS)
    assert_logits(model, SLOTS, prompts, logits)


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, IN_CHUNKS))
def test_chunked_prefill_beside_decodes_gives_the_same_logits(family, served):
    model = served(family)
    slots = (3, -1, 1)
    prompts = make_prompts((50, 33, 45))
    harness = Harness(model.model_dir, model.adapters)
    streams = [harness.add(slot) for slot in slots]
    found = [[], [], []]
    while any(stream.length < len(prompt) for stream, prompt in zip(streams, prompts, strict=True)):
        batch, members = [], []
        for i, (stream, size) in enumerate(zip(streams, (13, 1, 6), strict=True)):
            chunk = prompts[i][stream.length : stream.length + size]
            if chunk:
                batch.append((stream, chunk))
                members.append(i)
        for i, logits in zip(members, harness.step(batch, num_padding=2), strict=True):
            found[i].append(logits)
    assert_logits(model, slots, prompts, [torch.cat(parts) for parts in found])


EVERY_EXPERT = {
    "mixtral": "num_experts_per_tok",
    "qwen3_next": "num_experts_per_tok",
    "gemma4": "top_k_experts",
    "olmoe": "num_experts_per_tok",
    "minimax_m2": "num_experts_per_tok",
}


@pytest.mark.parametrize("family", with_quick(tuple(EVERY_EXPERT), ("qwen3_next", "gemma4")))
def test_tokens_of_all_experts_with_an_adapter_of_odd_rank_equal_peft(family, tmp_path):
    num_experts = shape_of(tiny_config(family).to_dict()).num_experts
    model_dir = make_checkpoint(family, tmp_path / "model", seed=3, **{EVERY_EXPERT[family]: num_experts})
    adapter = make_adapter(family, model_dir, tmp_path / "adapter", 5, seed=1)
    [prompt] = make_prompts((30,))
    _, [found] = Harness(model_dir, [adapter]).prefill([prompt], (0,))
    expected = reference_logits(model_dir, adapter, prompt, torch.float64)
    assert (found - expected).abs().max() < MAX_LOGIT_DIFFERENCE


MEDIAN_BF16_ERROR = 0.03
"""Error of a row of logits in bf16 as a share of their size; transformers' own is 0.8 to 2.6 % here."""


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, IN_BF16))
def test_bf16_logits_stay_near_fp32(family, tmp_path):
    """Against the same bf16 weights computed in fp32, and no further off than transformers in bf16.

    The median over rows, because a gate that decides otherwise in bf16 changes some rows altogether.
    """
    base = make_checkpoint(family, tmp_path / "base", dtype=torch.bfloat16)
    adapter = make_adapter(family, base, tmp_path / "adapter", 8, scale=0.7)
    prompts, slots = make_prompts((24, 17)), (0, -1)
    _, found = Harness(base, [adapter], dtype=torch.bfloat16, max_sequences=2).prefill(prompts, slots)
    ours, theirs = [], []
    for slot, prompt, logits in zip(slots, prompts, found, strict=True):
        path = None if slot < 0 else adapter
        exact = reference_logits(base, path, prompt)
        size = exact.square().mean(-1).sqrt()
        ours.append((logits - exact).square().mean(-1).sqrt() / size)
        rough = reference_logits(base, path, prompt, torch.bfloat16)
        theirs.append((rough - exact).square().mean(-1).sqrt() / size)
    error = float(torch.cat(ours).median())
    assert error < MEDIAN_BF16_ERROR
    assert error < 1.25 * float(torch.cat(theirs).median())
