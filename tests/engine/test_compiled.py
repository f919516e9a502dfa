# SPDX-License-Identifier: Apache-2.0
"""Compiled steps, of any size and padded to buckets, answer as eager ones do."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from demo.tasks import prompt_for
from moe_lora import LLM, SamplingParams
from moe_lora.models.compiled_layers import CompiledLayers
from tests.models.generated_code import captured_graphs

DEMO = Path(__file__).parents[2] / "demo"
NAMES = [None, *list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:6]]
PROMPTS = [prompt_for("abcdefgh"[: 3 + i]) for i in range(len(NAMES))]
SAMPLING = [SamplingParams(temperature=0.0, max_tokens=8 + 3 * i, ignore_eos=True) for i in range(len(NAMES))]


def answers(**settings) -> list[tuple[int, ...]]:
    """Requests of different lengths leave one by one, so that every batch size down to one occurs."""
    adapters = {name: str(DEMO / "adapters" / name) for name in NAMES if name}
    with LLM(str(DEMO / "model"), adapters=adapters, dtype="float32", num_threads=1, **settings) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, NAMES, SAMPLING)]


@pytest.fixture(scope="module")
def eager() -> list[tuple[int, ...]]:
    return answers(eager=True)


BUCKETS = {"decode_buckets": (4,)}


@pytest.mark.parametrize(
    ("settings", "num_codes", "ways"),
    [
        pytest.param({}, 2, captured_graphs, id="any_size"),
        pytest.param({}, 2, nullcontext, id="any_size-generated", marks=pytest.mark.slow),
        pytest.param(BUCKETS, 1, captured_graphs, id="bucket_of_4", marks=pytest.mark.slow),
        pytest.param(BUCKETS, 1, nullcontext, id="bucket_of_4-generated", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_give_the_tokens_of_eager_ones(eager, settings, num_codes, ways, monkeypatch):
    """num_codes: for one row and for any number of rows above; for four.  ways: of running a graph."""
    through_compiler, calls = Counter(), Counter()

    def noted(name, counter):
        method = getattr(CompiledLayers, name)

        def note(self, layer, *operands):
            counter[layer] += 1
            return method(self, layer, *operands)

        monkeypatch.setattr(CompiledLayers, name, note)

    noted("_first", through_compiler)
    noted("__call__", calls)
    with ways():
        assert answers(**settings) == eager
    assert set(through_compiler.values()) == {num_codes}, "at the start alone"
    assert set(through_compiler) == set(calls)
    assert min(calls.values()) > 10
