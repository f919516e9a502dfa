# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from moe_lora.timing.answer_lengths import AnswerLengths


def test_answers_are_expected_to_be_as_long_as_those_of_their_adapter_were():
    lengths = AnswerLengths(100.0)
    assert lengths.left("a", 0, 1000) == 100.0
    for _ in range(8):
        lengths.note("a", 300)
    assert lengths.left("a", 0, 1000) == 200.0
    assert lengths.left("a", 150, 1000) == 50.0
    assert lengths.left("a", 250, 1000) == 1.0
    assert lengths.left("a", 0, 40) == 40.0
    assert lengths.left("b", 0, 1000) == 100.0
    assert lengths.expected("b", 40.0) == 40.0
