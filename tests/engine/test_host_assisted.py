"""Requests whose adapters are still loading: host workers compute their prompts, and no token changes."""

from __future__ import annotations

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.config.engine import EmulationConfig
from tests.families import FAMILIES
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import SLOTS, make_prompts
from tests.oracle import greedy_reference

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SLOW = {"emulation": EmulationConfig(load_gb_per_s=2e-4)}
"""An adapter of a tiny model takes about a second."""
WAYS = {
    "all_at_once": {},
    "chunked_prefill": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "compiled": {"eager": False},
}


def start(model, way: str = "all_at_once", *, num_workers: int = 2, **settings) -> LLM:
    adapters = {path.name: str(path) for path in model.adapters}
    options = {"eager": True, "host_workers": num_workers, "host_tokens_per_worker": 8}
    return LLM(model.model_dir, adapters=adapters, dtype="float32", **(options | WAYS[way] | settings))


def ask(llm: LLM, model) -> list[tuple[int, ...]]:
    """Answers to prompts of every adapter and of the base model, all at once."""
    names = [None if slot < 0 else model.adapters[slot].name for slot in SLOTS]
    return [completion.token_ids for completion in llm.generate(make_prompts(), names, GREEDY)]


def expected_of(model) -> list[tuple[int, ...]]:
    answers = []
    for slot, prompt in zip(SLOTS, make_prompts(), strict=True):
        reference = greedy_reference(
            model.model_dir, None if slot < 0 else model.adapters[slot], [prompt], NUM_TOKENS
        )
        reference.check_margins()
        answers.append(reference.tokens[0])
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_requests_answer_as_peft_does(family, way, served):  # noqa: F811
    model = served(family)
    with start(model, way, **SLOW) as llm:
        assert ask(llm, model) == expected_of(model)
        cold = llm.stats()
        assert ask(llm, model) == expected_of(model)
        warm = llm.stats()
    num_layers = llm.num_layers if hasattr(llm, "num_layers") else None
    assert num_layers is None or num_layers > 0
    assert cold.lora_rows_host > 0, "host workers computed"
    assert cold.lora_rows_local > 0, "and the device what had come"
    assert cold.host_fallback_rows == 0, "workers computed every row that was theirs"
    assert warm.lora_rows_host == cold.lora_rows_host, "nothing is cold the second time"
