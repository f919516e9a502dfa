# SPDX-License-Identifier: Apache-2.0
"""Fields of `SamplingParams` in the forms that callers give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_lora import SamplingParams

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
]


@pytest.mark.parametrize(("name", "given", "want"), FORMS)
def test_lists_arrays_and_strings_become_the_field_s_tuples(name, given, want):
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == want
    assert repr(found) == repr(want)


def test_listed_logprob_token_ids_become_a_tuple():
    assert SamplingParams(logprobs=0, logprob_token_ids=[7]).logprob_token_ids == (7,)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in FORMS))
def test_none_is_no_entry(name):
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
    ],
)
def test_other_forms_are_refused_by_name(name, given):
    with pytest.raises(ValueError, match=f"^{name}=.* is not allowed; {name} must be "):
        SamplingParams(**{name: given})
