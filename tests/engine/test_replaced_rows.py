# SPDX-License-Identifier: Apache-2.0
"""Replaced rows of the head and the embedding, served beside other rows, against transformers and peft."""

from __future__ import annotations

import pytest

from tests.adapters.peft.test_outer_sites import outer_adapter
from tests.adapters.peft.test_replaced import FORMS
from tests.engine.test_outer_sites import WAYS, assert_tokens_of_peft
from tests.families import make_adapter, make_checkpoint
from tests.grids import diagonal

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = {
    "tokens": ("tokens", "many_tokens", "same_by_name"),
    "by_name": ("by_name", "head_tokens", "same_by_name"),
} | {"modules": ("head", "embedding", "both")}
QUICK = {("tokens", "merging"), ("modules", "tensor_parallel")}
"""Batches and ways in the default run."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, tied, batch) -> checkpoint and adapters: the batch's, and one of the layers alone."""
    bases = {}

    def make(family, tied, batch):
        folder = tmp_path_factory.mktemp(family)
        if (family, tied) not in bases:
            bases[family, tied] = make_checkpoint(family, folder / "base", tie_word_embeddings=tied)
        base = bases[family, tied]
        adapters = {
            name: outer_adapter(family, base, folder / name, lora_rank=3, seed=number, **FORMS[name])
            for number, name in enumerate(BATCHES[batch])
        }
        adapters["layers"] = make_adapter(family, base, folder / "layers", 4, seed=9)
        return base, adapters

    return make


@pytest.mark.parametrize(("batch", "tied"), diagonal(list(BATCHES), [False, True]))
def test_a_mixed_batch_continues_as_peft_does(batch, tied, made):
    assert_tokens_of_peft(*made("llama", tied, batch))


@pytest.mark.parametrize(
    ("batch", "way"),
    [
        pytest.param(batch, way, marks=() if (batch, way) in QUICK else pytest.mark.slow)
        for batch in BATCHES
        for way in WAYS
        if way != "all_at_once"
    ],
)
def test_each_way_continues_as_peft_does(batch, way, made):
    assert_tokens_of_peft(*made("qwen3_moe", batch == "tokens", batch), **WAYS[way])
