# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from moe_lora.engine.step import sampler
from moe_lora.kernels.triton import sampling
from moe_lora.kernels.triton.configs import interpreted
from tests.engine.step.test_sampler import EOS, sampled, sequence
from tests.kernels.race_in_numpy import exponential_noise

KINDS = (
    {},
    {"temperature": 0.0},
    {"temperature": 2.5, "top_p": 0.99},
    {"top_k": 5},
    {"top_k": 10**40, "logprobs": 3},
    {"top_k": 1},
    {"top_p": 0.6, "logprobs": 0},
    {"top_p": 1e-6},
    {"min_p": 0.3, "min_tokens": 9},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 0.7},
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks and parts of a small vocabulary."""
    if interpreted():
        for name, size in (("_BLOCK", 64), ("_GROUPS", 4), ("_PARTS", 2)):
            monkeypatch.setattr(sampling, name, size)


def sequences(seed):
    made = [sequence(seed=seed + row, **kind) for row, kind in enumerate(KINDS)]
    for row, one in enumerate(made):
        one.tokens += [1] * row
    return made


@pytest.mark.parametrize(
    ("vocab", "ties"),
    [(70, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((70, False), (41, True)))],
)
def test_device_draws_the_tokens_of_the_host(device, monkeypatch, vocab, ties):
    """With ties, of which top-k and top-p keep the first."""
    calls, draw = [], sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda *operands: calls.append(1) or draw(*operands))
    logits = torch.randn(len(KINDS), vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits = logits.round() if ties else logits
    expected = sampled(logits.clone(), sequences(-(2**62)), EOS)
    monkeypatch.setattr(sampler, "_on_device", lambda _: True)
    tokens, reports = sampled(logits.to(device, copy=True), sequences(-(2**62)), EOS)
    assert len(calls) == 1
    assert tokens == expected[0]
    assert [one is None for one in reports] == [one is None for one in expected[1]]
    if device.type == "cpu":
        assert reports == expected[1]


def test_noise_is_the_hosts(device):
    """Of equally likely tokens the one with the least noise is drawn, from any half of any word."""
    rows = [(seed, position) for seed in (0, -1, 2**63 - 1, 77) for position in (0, 2**31)]
    settings = torch.tensor([[1.0, 1.0, 0.0]] * len(rows), device=device)
    numbers = torch.tensor([[0, *row] for row in rows], device=device)
    drawn = sampling.draw(torch.zeros(len(rows), 30, device=device), settings, numbers)
    assert drawn.tolist() == [int(exponential_noise(*row, 30).argmin()) for row in rows]


def test_cuda_logits_are_drawn_by_these_kernels():
    class OnCuda:
        is_cuda = True

    assert sampler._on_device(OnCuda())
    assert not sampler._on_device(torch.zeros(1))


@pytest.mark.slow
def test_hundreds_of_draws_agree(device, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(sampling, "_BLOCK", 4096)
    for seed in range(20):
        logits = torch.randn(len(KINDS), 300, generator=generator) * 3
        monkeypatch.setattr(sampler, "_on_device", lambda _: False)
        expected, _ = sampled(logits.clone(), sequences(seed), EOS)
        monkeypatch.setattr(sampler, "_on_device", lambda _: True)
        assert sampled(logits.to(device, copy=True), sequences(seed), EOS)[0] == expected
