# SPDX-License-Identifier: Apache-2.0
"""Draws and masks on CPU against the same in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.request import SamplingParams
from moe_lora.kernels.cpu.sampling import draw, mask
from tests.kernels.race_in_numpy import exponential_noise, scores

SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 20, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
)
ROWS = st.tuples(SETTINGS, st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))


def operands(rows, vocab):
    settings = [[params.temperature, params.top_p, params.min_p] for params, _, _ in rows]
    numbers = [[min(params.top_k, vocab), seed, position] for params, seed, position in rows]
    return torch.tensor(settings), torch.tensor(numbers)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=5),
    vocab=st.sampled_from([1, 5, 8, 63, 64, 65, 200, 4099]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    shape=st.sampled_from(["plain", "ties", "masked"]),
    number=st.integers(0, 2**31),
)
def test_drawn_tokens_have_the_highest_score(rows, vocab, scale, shape, number):
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(len(rows), vocab, generator=generator) * scale
    if shape == "ties":
        logits = logits.round()
    elif shape == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -math.inf
        logits[:, -1] = 0.0
    expected = scores(logits.clone(), rows)
    drawn = draw(logits, *operands(rows, vocab))
    reached = expected.gather(1, drawn[:, None])[:, 0]
    # Scores within rounding of each other may change places.
    assert (reached >= expected.amax(1) * (1 - 1e-5)).all()


def test_large_vocabularies_and_numbers_of_threads_give_equal_tokens():
    vocab = 50_021
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(3)) * 3
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40, top_p=0.8)]
    rows = [(params[row % 3], row, 9) for row in range(7)]
    together = draw(logits.clone(), *operands(rows, vocab)).tolist()
    assert together == scores(logits, rows).argmax(1).tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert draw(logits.clone(), *operands(rows, vocab)).tolist() == together
    finally:
        torch.set_num_threads(threads)
    alone = [draw(logits[row : row + 1].clone(), *operands(rows[row : row + 1], vocab)) for row in range(7)]
    assert torch.cat(alone).tolist() == together


def test_rows_without_a_temperature_and_broken_rows_take_the_highest_logit():
    vocab = 130
    logits = torch.zeros(5, vocab)
    logits[0, [70, 90]] = 2.0
    logits[1] = math.nan
    logits[2, 129] = math.inf
    logits[3] = -math.inf
    logits[4, 65], logits[4, 3] = 5.0, math.nan
    settings = torch.tensor([[0.0, 1.0, 0.0]] + [[1.0, 1.0, 0.0]] * 3 + [[0.01, 1.0, 0.0]])
    drawn = draw(logits, settings, torch.tensor([[0, 1, 1]] * 5)).tolist()
    assert drawn == [70, 0, 129, 0, 65]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(1, 200))
def test_noise_is_a_function_of_seed_and_position(seed, position, vocab):
    """Of equally likely tokens the one with the least noise is drawn."""
    settings, numbers = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0, seed, position]])
    drawn = draw(torch.zeros(1, vocab), settings, numbers)
    assert drawn.tolist() == [int(exponential_noise(seed, position, vocab).argmin())]


def test_draws_follow_the_probabilities():
    wanted = torch.tensor([0.5, 0.3, 0.2, 0.0])
    numbers = torch.tensor([[0, 5, position] for position in range(20_000)])
    settings = torch.tensor([[1.0, 1.0, 0.0]]).repeat(len(numbers), 1)
    drawn = draw(wanted.log().repeat(len(numbers), 1), settings, numbers)
    shares = torch.bincount(drawn, minlength=4) / len(numbers)
    assert (shares - wanted).abs().max() < 0.02


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 1024])
def test_masks_exclude_tokens_of_their_rows(vocab):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((6, vocab), dtype=np.float32))
    words = rng.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32)
    words[1], words[2] = 2**32 - 1, 0
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    expected = logits.clone()
    for row, bits in zip((4, 0, 5), allowed, strict=True):
        expected[row, torch.from_numpy(~bits)] = -math.inf
    mask(logits, (4, 0, 5), list(words))
    assert logits.equal(expected)


def test_masks_that_do_not_fit_are_refused():
    for rows, width in (((2,), 2), ((-1,), 2), ((0,), 1)):
        with pytest.raises(ValueError, match="do not fit"):
            mask(torch.zeros(2, 64), rows, [np.zeros(width, np.uint32)])
