# SPDX-License-Identifier: Apache-2.0
"""An engine whose device puts to the LoRA Server itself gives the oracle's tokens: the kernels in Triton's
interpreter, NVSHMEM's calls by a stand-in that delays and reorders what it delivers.

(Started by `tests/kernels/triton/test_in_interpreter.py`.)
"""

from __future__ import annotations

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.kernels.triton.configs import interpreted
from tests.dist.lora_server.put_server import PutServer, put_server
from tests.families import ALL_TARGETS, make_adapter, make_checkpoint
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import SLOTS, make_prompts
from tests.oracle import greedy_reference

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
ROWS = 8


def start(model_dir, adapters, server: PutServer) -> LLM:
    names = {path.name: str(path) for path in adapters}
    options = {"dtype": "float32", "eager": True, "num_threads": 1, "max_num_seqs": ROWS}
    return LLM(model_dir, adapters=names, lora_server=server.config, **options)


def ask(llm: LLM, prompts, adapters, num_tokens: int) -> list[tuple[int, ...]]:
    names = [None if path is None else path.name for path in adapters]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [completion.token_ids for completion in llm.generate(prompts, names, sampling)]


def expected_of(model_dir, prompts, adapters, num_tokens: int) -> list[tuple[int, ...]]:
    found = []
    for prompt, path in zip(prompts, adapters, strict=True):
        reference = greedy_reference(model_dir, path, [prompt], num_tokens)
        reference.check_margins()
        found.append(reference.tokens[0])
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    base = make_checkpoint("mixtral", folder / "base", seed=0)
    return base, make_adapter("mixtral", base, folder / "adapter", 4, ALL_TARGETS, seed=1, scale=0.5)


def test_tokens_are_the_oracles_also_when_rows_or_all_answers_are_missing(tiny):
    """First all is there; then the server lacks what it is asked for; at last nothing arrives any more."""
    base, adapter = tiny
    prompts, adapters, num_tokens = [[3, 5, 7], [9, 8]], [adapter, None], 2
    expected = expected_of(base, prompts, adapters, num_tokens)
    with put_server(base, "EP2-PP1", max_num_seqs=ROWS) as server:
        with start(base, [adapter], server) as llm:
            pushed = llm.client.core._runner._pushed
            assert ask(llm, prompts, adapters, num_tokens) == expected
            assert (pushed.num_steps, pushed.num_redone) == (num_tokens - 1, 0)
            assert llm.stats().lora_server_fallback_rows == 0
            server.order("lack all layers")
            assert ask(llm, prompts, adapters, num_tokens) == expected
            stats = llm.stats()
            assert stats.lora_server_redone_steps == num_tokens - 1
            assert stats.lora_server_put_steps == 2 * (num_tokens - 1)
            assert not pushed.lost
            server.order("cut")
            pushed._max_polls = 100
            assert ask(llm, prompts, adapters, num_tokens) == expected
            assert pushed.lost
            assert llm.stats().lora_server_put_steps == 2 * (num_tokens - 1) + 1
        facts = server.end()
    for rank in facts:
        assert rank["overtaken"] > 0, "puts were delivered in order, so order was not tried"


def test_step_that_is_abandoned_ends_puts_and_the_next_tokens_are_the_oracles(tiny):
    base, adapter = tiny
    prompts, adapters, num_tokens = [[3, 5, 7]], [adapter], 2
    expected = expected_of(base, prompts, adapters, num_tokens)
    with put_server(base, "EP1-PP1", max_num_seqs=ROWS) as server, start(base, [adapter], server) as llm:
        context, pushed = llm.client.core._runner._context, llm.client.core._runner._pushed
        steps, begin_step = [], pushed.begin_step
        pushed.begin_step = lambda *step: (steps.append(step), begin_step(*step))
        assert ask(llm, prompts, adapters, num_tokens) == expected
        context.backend.abandon_step()
        assert not pushed.lost, "every step before had ended"
        begin_step(*steps[-1])
        number, shape = pushed._frames.sites[0], pushed._frames.shape
        ids = torch.zeros(1, shape.num_experts_per_token, dtype=torch.int32)
        pushed.begin(0, number, torch.zeros(1, shape.sites[number].in_features), ids)
        context.backend.abandon_step()
        assert pushed.lost
        assert ask(llm, prompts, adapters, num_tokens) == expected
        assert llm.stats().lora_server_put_steps == num_tokens - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "sites"),
    [
        ("mixtral", "EP2-PP2", "experts"),
        ("llama", "EP1-PP2", "all"),
        ("qwen3_moe", "EP1-PP1", "all"),
        ("gpt_oss", "EP2-PP1", "all"),
        ("dbrx", "EP2-PP1", "all"),
    ],
)
def test_tokens_of_mixed_batches_are_the_oracles(family, layout, sites, served):  # noqa: F811
    model = served(family)
    prompts = make_prompts()
    adapters = [None if slot < 0 else model.adapters[slot] for slot in SLOTS]
    with put_server(model.model_dir, layout, sites=sites, max_num_seqs=ROWS) as server:
        with start(model.model_dir, model.adapters, server) as llm:
            expected = expected_of(model.model_dir, prompts, adapters, 6)
            assert ask(llm, prompts, adapters, 6) == expected
            stats = llm.stats()
            assert stats.lora_server_redone_steps == 0 < stats.lora_server_put_steps
            assert stats.lora_server_fallback_rows == 0
        facts = server.end()
    for rank in facts:
        assert rank["steps"][0] >= stats.lora_server_put_steps
        assert rank["overtaken"] > 0
