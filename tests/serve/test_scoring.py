# SPDX-License-Identifier: Apache-2.0
"""POST /v1/score gives transformers' probabilities of labels after a query and its items."""

from __future__ import annotations

import pytest
import torch

from moe_lora.engine.text.text import load_tokenizer
from tests.oracle import reference_logits

from .test_prompt_side import MODEL, NAMES, ask, demo, refused  # noqa: F401  (the fixture)

TOKENIZER = load_tokenizer(MODEL)
LABELS = [40, 7, 41]


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [False, True])
@pytest.mark.parametrize("model", NAMES)
def test_scores_are_transformers_s_probabilities(demo, model, apply_softmax, item_first):  # noqa: F811
    query, items = "hello ", ["world=", "abc"]
    given = {"label_token_ids": LABELS, "apply_softmax": apply_softmax, "item_first": item_first}
    found = ask(demo, "/v1/score", model=model, query=query, items=items, **given)
    prompts = [TOKENIZER.encode(item + query if item_first else query + item) for item in items]
    for prompt, scores in zip(prompts, found["scores"], strict=True):
        logits = reference_logits(MODEL, NAMES[model], prompt)[-1]
        logits = logits[LABELS] if apply_softmax else logits
        expected = torch.softmax(logits, dim=-1)
        expected = expected if apply_softmax else expected[LABELS]
        assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    num = sum(map(len, prompts))
    assert found["usage"] == {"prompt_tokens": num, "completion_tokens": 0, "total_tokens": num}


def test_texts_and_token_ids_score_alike(demo):  # noqa: F811
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("hello ", "world=")]
    start = TOKENIZER.encode("")
    one = ask(demo, "/v1/score", query=start + ids[0], items=[ids[1]], label_token_ids=LABELS)
    other = ask(demo, "/v1/score", query="hello ", items="world=", label_token_ids=LABELS)
    assert one["scores"][0] == pytest.approx(other["scores"][0], abs=1e-6)
    assert (one["usage"], one["object"]) == (other["usage"], "scoring")
    body = {"query": "hello ", "items": "world=", "label_token_ids": LABELS}
    by_path, by_model = (ask(demo, "/v1/score", **body, **{name: "upper"}) for name in ("lora_path", "model"))
    assert by_path["scores"][0] == pytest.approx(by_model["scores"][0], abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"label_token_ids": [128]}, "label_token_ids", "token id 128 is out of vocabulary"),
        ({"label_token_ids": []}, "label_token_ids", "at least 1"),
        ({"label_token_ids": [5] * 129}, "label_token_ids", "128"),
        ({"items": []}, "items", "1 to 128"),
        ({"items": [""] * 129}, "items", "1 to 128"),
        ({"query": [5] * 40_000, "items": [[]] * 128}, "query", "send fewer items"),
        ({"item_first": "false"}, "item_first", "true or false"),
        ({"lora_name": "upper"}, "lora_name", "name the adapter in model"),
        ({"items": [[5]]}, "query", "texts, or lists of token ids"),
        ({"query": ""}, "query", "empty"),
        ({"query": None}, "query", "texts, or lists of token ids"),
        ({"query": [5], "items": [["a"]]}, "query", "a list of token ids"),
        ({"temperature": 1.0}, "temperature", "use /v1/completions"),
        ({"lable_token_ids": [5]}, "lable_token_ids", "did you mean label_token_ids"),
    ],
)
def test_wrong_bodies_are_refused(demo, body, param, message):  # noqa: F811
    given = {"query": "a", "items": [""], "label_token_ids": LABELS}
    error = refused(demo, "/v1/score", **{**given, **body})
    assert error["param"] == param
    assert message in error["message"]
