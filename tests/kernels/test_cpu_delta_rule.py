# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against its formula in fp64, and its bits over cuts, batches and threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_lora.core.attention_shapes import DeltaShape
from moe_lora.core.errors import ConfigError
from moe_lora.kernels.cpu.cpu import delta_rule

NORM_EPS = 1e-6
SHAPES = [
    DeltaShape(layers=(0,), num_k_heads=j, num_v_heads=n, k_dim=k, v_dim=v, conv_width=w, is_interleaved=True)
    for j, n, k, v, w in (
        (1, 1, 4, 3, 2),
        (2, 6, 12, 10, 3),
        (3, 3, 17, 33, 4),
        (4, 8, 64, 32, 5),
        (1, 2, 128, 128, 4),
    )
]


def operands(sizes, num_tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    heads = sizes.num_v_heads
    return {
        "qkv": noise(num_tokens, sizes.conv_size).to(dtype),
        "log_decay": -noise(num_tokens, heads).abs(),
        "beta": noise(num_tokens, heads).sigmoid(),
        "conv": noise(sizes.conv_size, sizes.conv_width).to(dtype),
    }


class States:
    """Sequences with states in scattered pages of an arena."""

    def __init__(self, sizes, num_seqs, page_bytes=64):
        num_pages = -(-4 * sizes.state_floats // page_bytes)
        order = torch.randperm(num_seqs * num_pages, generator=torch.Generator().manual_seed(3))
        self.sizes, self.pages = sizes, order.view(num_seqs, num_pages)
        self.arena = torch.full((num_seqs * num_pages, page_bytes), 255, dtype=torch.uint8)  # NaN
        self.done = [0] * num_seqs

    def run(self, given, rows, marks=()):
        """A step of the first sequences; rows: of each."""
        num = len(rows)
        spans = torch.tensor([[r.start, r.stop, done == 0] for r, done in zip(rows, self.done, strict=False)])
        parts = (given["qkv"], given["log_decay"], given["beta"], given["conv"])
        marks = torch.tensor(marks, dtype=torch.int64).view(-1, 2)
        out, states = delta_rule(*parts, self.sizes, (spans, marks), self.pages[:num], self.arena)
        self.arena.view(torch.float32)[self.pages[:num].flatten()] = states[:num].flatten(0, 1)
        self.at_marks = states[num:].flatten(1)[:, : self.sizes.state_floats]
        self.done = [done + len(r) for r, done in zip(rows, self.done, strict=False)] + self.done[num:]
        return out

    def state(self, sequence):
        numbers = self.arena.view(torch.float32)[self.pages[sequence]].flatten()
        return numbers[: self.sizes.state_floats]


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
@pytest.mark.parametrize("num_tokens", [1, 2, 29, 70])
def test_outputs_are_those_of_the_formula(sizes, num_tokens, dtype, isa):
    given = operands(sizes, num_tokens, dtype=dtype)
    found = States(sizes, 1).run(given, [range(num_tokens)])
    assert found.dtype == dtype
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-2, 1e-4)
    torch.testing.assert_close(found.double(), exact(sizes, given), rtol=rtol, atol=atol)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize(
    "cuts", [(1,) * 71, (7, 64), (1, 21, 1, 48), (13, 1, 1, 56), (2, 2, 32, 35)], ids=lambda cuts: len(cuts)
)
def test_bits_do_not_depend_on_the_cut_of_a_prompt(sizes, cuts, isa):
    given = operands(sizes, 71, seed=1)
    whole, cut = States(sizes, 1), States(sizes, 1)
    expected, first, parts = whole.run(given, [range(71)]), 0, []
    for size in cuts:
        found = cut.run(given, [range(first, first + size)])
        parts.append(found[first : first + size])
        first += size
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.state(0), whole.state(0))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_the_batch_or_on_threads(threads, isa):
    sizes = SHAPES[-1]
    given = operands(sizes, 90, seed=2)
    torch.set_num_threads(threads)
    together = States(sizes, 3)
    steps = [[range(40), range(42, 43), range(43, 60)], [range(60, 61), range(61, 80), range(80, 90)]]
    found = [together.run(given, rows) for rows in steps]
    assert not found[0][40:42].any(), "rows of no sequence are zero"
    torch.set_num_threads(1)
    for sequence in range(3):
        alone = States(sizes, 1)
        for rows, out in zip(steps, found, strict=True):
            mine = rows[sequence]
            assert torch.equal(alone.run(given, [mine])[mine.start : mine.stop], out[mine.start : mine.stop])
        assert torch.equal(alone.state(0), together.state(sequence))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_states_at_marks_are_those_of_a_step_that_ends_there(sizes, isa):
    given = operands(sizes, 90, seed=4)
    rows, marks = [range(40), range(40, 90)], [(1, 43), (0, 40), (1, 80), (0, 1)]
    plain, marked = States(sizes, 2), States(sizes, 2)
    assert torch.equal(marked.run(given, rows, marks), plain.run(given, rows))
    for (sequence, end), found in zip(marks, marked.at_marks, strict=True):
        assert torch.equal(marked.state(sequence), plain.state(sequence))
        alone = States(sizes, 1)
        alone.run(given, [range(rows[sequence].start, end)])
        assert torch.equal(found, alone.state(0))


def test_tables_that_do_not_fit_are_refused():
    sizes = SHAPES[0]
    given, states = operands(sizes, 4), States(sizes, 1)
    with pytest.raises(ValueError, match="query_start must ascend"):
        states.run(given, [range(3, 5)])
    with pytest.raises(ValueError, match="query_start must ascend"):
        states.run(given, [range(2)], [(0, 3)])
    states.pages += 1
    with pytest.raises(ValueError, match="a page outside the arena"):
        states.run(given, [range(4)])
    states.pages = states.pages[:, :1]
    with pytest.raises(ValueError, match="1 pages of 64 bytes do not fit"):
        states.run(given, [range(4)])
    with pytest.raises(ValueError, match="log_decay must be contiguous"):
        States(sizes, 1).run(given | {"log_decay": given["log_decay"][:2]}, [range(4)])


def test_key_heads_that_serve_unequal_numbers_of_value_heads_are_refused():
    with pytest.raises(ConfigError, match="linear_num_key_heads=2 does not divide linear_num_value_heads=3"):
        DeltaShape(
            layers=(0,), num_k_heads=2, num_v_heads=3, k_dim=4, v_dim=4, conv_width=4, is_interleaved=False
        )
