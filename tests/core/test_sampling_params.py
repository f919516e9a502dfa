# SPDX-License-Identifier: Apache-2.0
"""Fields of `SamplingParams` in the forms that callers give."""

from __future__ import annotations

import pickle
from dataclasses import replace
from decimal import Decimal

import msgspec
import numpy as np
import pytest
import torch

from moe_lora import SamplingParams
from moe_lora.core.request import ThinkingLimit

FORMS = [
    ("stop", "DE", ("DE",)),
    ("stop", ["D", "E"], ("D", "E")),
    ("stop_token_ids", [7], (7,)),
    ("stop_token_ids", {7}, (7,)),
    ("stop_token_ids", torch.tensor([7]), (7,)),
    ("stop_token_ids", (np.int64(7),), (7,)),
    ("bad_words", "DE", ("DE",)),
    ("bad_word_ids", [[7, 8]], ((7, 8),)),
    ("bad_word_ids", ([7], np.array([8])), ((7,), (8,))),
    ("prompt_logprob_token_ids", [[7]], ((7,),)),
    ("allowed_token_ids", [7], (7,)),
    ("logit_bias", {np.int64(7): 1.0}, {7: 1.0}),
    ("logit_bias", {7: Decimal("0.5")}, {7: 0.5}),
    ("logit_bias", {7: torch.tensor([0.5])}, {7: 0.5}),
    ("temperature", torch.tensor([0.5]), 0.5),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", np.array(0.5), 0.5),
    ("min_p", Decimal("0.5"), 0.5),
    ("repetition_penalty", 2, 2.0),
    ("min_tokens", np.int64(5), 5),
    ("top_k", torch.tensor(5), 5),
    ("seed", np.int32(5), 5),
    ("ignore_eos", np.True_, True),
    ("routed_experts", 1, True),
]


@pytest.mark.parametrize(("name", "given", "want"), FORMS)
def test_lists_arrays_and_strings_become_the_field_s_tuples(name, given, want):
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == want
    assert repr(found) == repr(want)


def test_listed_logprob_token_ids_become_a_tuple():
    assert SamplingParams(logprobs=0, logprob_token_ids=[7]).logprob_token_ids == (7,)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in FORMS))
def test_none_is_no_entry_or_the_default(name):
    assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("stop", 7),
        ("stop", b"DE"),
        ("stop", [7]),
        ("stop_token_ids", "7"),
        ("stop_token_ids", 7),
        ("stop_token_ids", [7.0]),
        ("bad_words", [None]),
        ("bad_word_ids", [7]),
        ("logit_bias", {"7": 1.0}),
        ("logit_bias", [7]),
        ("logit_bias", {7: "x"}),
        ("logit_bias", {7: None}),
        ("stop_token_ids", b"ab"),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", torch.tensor([True, False])),
        ("bad_word_ids", "78"),
        ("temperature", "0.5"),
        ("top_p", torch.tensor([0.5, 0.5])),
        ("thinking", 5),
        ("grammar", 5),
        ("grammar", {"type": "object"}),
        *((name, "5") for name in ("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs")),
        ("max_tokens", 5.0),
        ("prompt_logprob_start", "0"),
        ("seed", "x"),
        ("ignore_eos", "no"),
        ("hidden_state", []),
        ("processed_logprobs", "yes"),
    ],
)
def test_other_forms_are_refused_by_name(name, given):
    with pytest.raises(ValueError, match=f"^{name}=.* is not allowed; {name} must be "):
        SamplingParams(**{name: given})


def test_lists_in_a_limit_of_the_reasoning_become_tuples():
    limit = ThinkingLimit(np.int64(1), [40], torch.tensor([5, 6]))
    assert limit == ThinkingLimit(1, (40,), (5, 6))
    given = (1, (), "56"), (1, 5, (2,)), (1.5, (), (2,)), (1, [True], (2,)), (-1, (), (2,)), (1, (3,), ())
    for wrong in given:
        with pytest.raises(ValueError, match=r"^ThinkingLimit\(.* is not allowed"):
            ThinkingLimit(*wrong)


def test_a_copy_keeps_its_ids_without_a_second_reading():
    given = SamplingParams(allowed_token_ids=[7, 8], bad_word_ids=[[7, 8]])
    copied = replace(given, max_tokens=5)
    for name in ("allowed_token_ids", "bad_word_ids"):
        assert getattr(copied, name) is getattr(given, name)
    with pytest.raises(ValueError, match=r"^bad_word_ids="):
        SamplingParams(bad_word_ids=given.allowed_token_ids)
    assert pickle.loads(pickle.dumps(copied)) == copied
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(copied), type=SamplingParams) == copied
