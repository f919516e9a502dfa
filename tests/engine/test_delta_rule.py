# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against its formula in fp64, and its bits over all cuts of a prompt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_lora.core.attention_shapes import DeltaShape
from moe_lora.core.errors import ConfigError
from moe_lora.engine.step.unequal_layers import NORM_EPS, delta_rule

SHAPES = [
    DeltaShape(layers=(0,), num_k_heads=j, num_v_heads=n, k_dim=k, v_dim=v, conv_width=w, is_interleaved=True)
    for j, n, k, v, w in ((1, 1, 4, 3, 2), (2, 6, 12, 10, 3), (3, 3, 17, 33, 4), (4, 8, 64, 32, 5))
]


def operands(sizes, num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    heads = sizes.num_v_heads
    return {
        "qkv": noise(num_tokens, sizes.conv_size),
        "log_decay": -noise(num_tokens, heads).abs(),
        "beta": noise(num_tokens, heads).sigmoid(),
        "conv": noise(sizes.conv_size, sizes.conv_width),
    }


def run(sizes, given, state, rows=slice(None)):
    parts = (given["qkv"][rows], given["log_decay"][rows], given["beta"][rows], given["conv"])
    return delta_rule(*parts, sizes.num_k_heads, sizes.v_dim, state)


def exact(sizes, given):
    """The formula, one head and one token at a time."""
    qkv, conv = given["qkv"].double(), given["conv"].double()
    padded = F.pad(qkv, (0, 0, sizes.conv_width - 1, 0))
    windows = padded.unfold(0, sizes.conv_width, 1)
    mixed = F.silu((windows * conv).sum(-1))
    size, share = sizes.num_k_heads * sizes.k_dim, sizes.num_v_heads // sizes.num_k_heads
    q, k, v = mixed.split([size, size, sizes.value_size], dim=1)
    out = torch.zeros(len(qkv), sizes.num_v_heads, sizes.v_dim, dtype=torch.float64)
    for head in range(sizes.num_v_heads):
        first = head // share * sizes.k_dim
        state = torch.zeros(sizes.k_dim, sizes.v_dim, dtype=torch.float64)
        for t in range(len(qkv)):
            query, key = (part[t, first : first + sizes.k_dim] for part in (q, k))
            query, key = (part / (part.square().sum() + NORM_EPS).sqrt() for part in (query, key))
            value = v[t, head * sizes.v_dim : (head + 1) * sizes.v_dim]
            state = given["log_decay"][t, head].double().exp() * state
            state = state + torch.outer(key, given["beta"][t, head].double() * (value - key @ state))
            out[t, head] = query @ state / sizes.k_dim**0.5
    return out


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 29])
def test_outputs_are_those_of_the_formula(sizes, num_tokens):
    given = operands(sizes, num_tokens)
    found = run(sizes, given, torch.zeros(sizes.state_floats))
    torch.testing.assert_close(found.double(), exact(sizes, given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [(1,) * 23, (7, 16), (1, 21, 1), (13, 1, 1, 8), (2, 2, 19)], ids=str)
def test_bits_do_not_depend_on_the_cut_of_a_prompt(sizes, cuts):
    given = operands(sizes, 23, seed=1)
    whole, state = torch.zeros(sizes.state_floats), torch.zeros(sizes.state_floats)
    expected, first, parts = run(sizes, given, whole), 0, []
    for size in cuts:
        parts.append(run(sizes, given, state, slice(first, first + size)))
        first += size
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(state, whole)


def test_key_heads_that_serve_unequal_numbers_of_value_heads_are_refused():
    with pytest.raises(ConfigError, match="linear_num_key_heads=2 does not divide linear_num_value_heads=3"):
        DeltaShape(
            layers=(0,), num_k_heads=2, num_v_heads=3, k_dim=4, v_dim=4, conv_width=4, is_interleaved=False
        )
