# SPDX-License-Identifier: Apache-2.0
"""Adapters of each form in one batch, against transformers and peft; the page of all forms is current."""

from __future__ import annotations

import pytest

from moe_lora import LLM, SamplingParams
from tests.adapter_forms import FORMS, PAGE, page, problem
from tests.families import ALL_FAMILIES, make_checkpoint
from tests.grids import with_quick
from tests.models.test_oracle import make_prompts
from tests.oracle import greedy_reference

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
QUICK = ("qwen3_moe",)


@pytest.mark.parametrize(
    "family",
    with_quick(ALL_FAMILIES, QUICK),
)
def test_each_served_form_continues_as_peft_does(family, tmp_path):
    base, prompt = make_checkpoint(family, tmp_path / "base"), make_prompts()[0]
    made = {
        name: form.make(family, base, tmp_path / name)
        for name, form in FORMS.items()
        if family in form.families
    }
    served = {name: paths for name, paths in made.items() if problem(paths[0], base) is None}
    adapters = {name: str(path) for name, (path, _) in served.items()}
    with LLM(base, adapters=adapters, dtype="float32", eager=True) as llm:
        found = llm.generate([prompt] * len(served), list(served), GREEDY)
    for (name, (_, reference)), completion in zip(served.items(), found, strict=True):
        expected = greedy_reference(base, reference, [prompt], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], name


@pytest.mark.slow
def test_the_page_of_forms_is_what_the_reader_says():
    assert PAGE.read_text() == page(), "python -m tests.adapter_forms writes the page"
