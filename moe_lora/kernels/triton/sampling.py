# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that draw tokens after temperature, top-k, top-p and min-p.

Legend: S sequences, V vocabulary, P parts of the vocabulary.  Bisection finds cuts, fp64 sums masses, the
noise is numpy's Philox.  A row's token does not depend on further rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs

ONE_BITS = tl.constexpr(0x3F800000)
_BLOCK, _GROUPS, _PARTS = 8192, 256, 16


@triton.jit
def philox(group, position, seed):
    """Words 4 * group ... + 3, uint64, of numpy's Philox(key=seed, counter=position << 192).

    Source: Philox4x64-10, Salmon et al., SC 2011; numpy counts up before it draws.
    """
    zero = group.to(tl.uint64) * 0
    c0, c1, c2, c3 = group.to(tl.uint64) + 1, zero, zero, zero + position.to(tl.uint64)
    k0, k1 = zero + seed.to(tl.uint64), zero
    m0, m1 = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, c2 * m1, high0 ^ c3 ^ k1, c0 * m0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def exponential(word, half: tl.constexpr):
    """-log((x + 1/2) / 2^32) of a word's lower or upper 32 bits x, in fp64."""
    x = ((word >> (32 * half)) & 0xFFFFFFFF).to(tl.float64)
    return (-tl.log((x + 0.5) * 2.3283064365386963e-10)).to(tl.float32)


@triton.jit
def relative(logits, temperature, peak):
    """exp(logits / temperature - peak), to about one unit in the last place."""
    x = tl.maximum(tl.div_rn(logits, temperature) - peak, -1000.0)
    power = x * 1.4426950216293335
    rest = tl.fma(x, 1.4426950216293335, -power) + x * 1.925963033500968e-08
    return tl.exp2(power) * (1.0 + rest * 0.6931471805599453)


@triton.jit
def is_kept(e, index, cut_value, cut_index):
    """True at or above the cut; ties: the first are above."""
    bits = e.to(tl.int32, bitcast=True)
    return (bits > cut_value) | ((bits == cut_value) & (index <= cut_index))


@triton.jit
def sum_above(e_V, vocab, above, cut_value, cut_index, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass, or number, of kept tokens above `above`; fp64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in tl.range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        e = tl.load(e_V + index, mask=index < vocab, other=0.0)
        counts = (index < vocab) & is_kept(e, index, cut_value, cut_index)
        counts = counts & (e.to(tl.int32, bitcast=True) > above)
        if COUNT:
            total += tl.where(counts, 1.0, 0.0).to(tl.float64)
        else:
            total += tl.where(counts, e, 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def cut_at(e_V, vocab, bound, cut_value, cut_index, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """A cut to the likeliest kept tokens with a sum of at least `bound`."""
    below = tl.full((), -1, tl.int32)
    value = tl.full((), ONE_BITS, tl.int32)
    for _ in tl.range(0, 31):
        middle = below + (value - below + 1) // 2
        fits = sum_above(e_V, vocab, middle, cut_value, cut_index, COUNT, BLOCK) < bound
        move = value - below > 1
        value = tl.where(move & fits, middle, value)
        below = tl.where(move & (fits == 0), middle, below)
    missing = bound - sum_above(e_V, vocab, value, cut_value, cut_index, COUNT, BLOCK)
    if not COUNT:
        missing = missing / tl.maximum(value, 1).to(tl.float32, bitcast=True).to(tl.float64)
    wanted = tl.ceil(tl.minimum(missing, 2.0e9)).to(tl.int32)
    found = vocab + 0 * value
    seen = 0 * value
    for first in tl.range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        e = tl.load(e_V + index, mask=index < vocab, other=0.0)
        equal = (index < vocab) & is_kept(e, index, cut_value, cut_index)
        equal = equal & (e.to(tl.int32, bitcast=True) == value)
        number = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(equal & (number == wanted), index, vocab), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return value, found


@triton.jit(do_not_specialize=("vocab",))
def truncate(logits, settings, numbers, cuts, vocab, BLOCK: tl.constexpr):
    """logits[s] = their `relative`, and the row's cut: top-k, then top-p of the rest.

    logits: [S, V] fp32.  settings: [S, 3] fp32 temperature (0: not drawn), top_p, min_p.  numbers: [S, 3]
    int64 top_k (0: all), seed, position.  cuts: [S, 2] int32.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings + row * 3)
    if temperature > 0:
        e_V = logits + row * vocab
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in tl.range(0, vocab, BLOCK):
            index = first + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, tl.load(e_V + index, mask=index < vocab, other=float("-inf")))
        peak = tl.div_rn(tl.max(highest, axis=0), temperature)
        for first in tl.range(0, vocab, BLOCK):
            index = first + tl.arange(0, BLOCK)
            one = tl.load(e_V + index, mask=index < vocab, other=0.0)
            tl.store(e_V + index, relative(one, temperature, peak), mask=index < vocab)
        tl.debug_barrier()
        cut_value = tl.full((), -1, tl.int32)
        cut_index = tl.full((), 0, tl.int32)
        top_k = tl.load(numbers + row * 3)
        if (top_k > 0) & (top_k < vocab):
            cut_value, cut_index = cut_at(e_V, vocab, top_k.to(tl.float64), cut_value, cut_index, True, BLOCK)
        top_p = tl.load(settings + row * 3 + 1)
        if top_p < 1:
            mass = sum_above(e_V, vocab, -1, cut_value, cut_index, False, BLOCK) * top_p.to(tl.float64)
            cut_value, cut_index = cut_at(e_V, vocab, mass, cut_value, cut_index, False, BLOCK)
        tl.store(cuts + row * 2, cut_value)
        tl.store(cuts + row * 2 + 1, cut_index)


@triton.jit(do_not_specialize=("vocab",))
def race(e, settings, numbers, cuts, scores, tokens, vocab, part, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """In each of P parts of a row, the kept token of highest e / noise, and the score.

    part: groups of 8 tokens in a part.  scores: [S, P] fp32, tokens: [S, P] int32.
    """
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    first_group = (tl.program_id(0) % PARTS) * part
    min_p = tl.load(settings + row * 3 + 2)
    seed, position = tl.load(numbers + row * 3 + 1), tl.load(numbers + row * 3 + 2)
    cut_value, cut_index = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    best = tl.full((GROUPS,), -1.0, tl.float32)
    at = tl.zeros((GROUPS,), tl.int32)
    if tl.load(settings + row * 3) > 0:
        for first in tl.range(0, part, GROUPS):
            group = first_group + first + tl.arange(0, GROUPS)
            inside = first + tl.arange(0, GROUPS) < part
            words = philox(group, position, seed)
            for token in tl.static_range(8):
                index = group * 8 + token
                e_G = tl.load(e + row * vocab + index, mask=inside & (index < vocab), other=0.0)
                kept = inside & (index < vocab) & is_kept(e_G, index, cut_value, cut_index) & (e_G >= min_p)
                score = tl.where(kept, tl.div_rn(e_G, exponential(words[token // 2], token % 2)), -1.0)
                better = (score > best) | ((score == best) & (index < at))
                at = tl.where(better, index, at)
                best = tl.where(better, score, best)
    highest = tl.max(best, axis=0)
    tl.store(scores + tl.program_id(0), highest)
    tl.store(tokens + tl.program_id(0), tl.min(tl.where(best == highest, at, vocab), axis=0))


def draw(logits: torch.Tensor, settings: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A token of each row, [S] int64; logits [S, V] fp32 are overwritten.

    settings, numbers: as in `truncate`; temperature 0: the likeliest token.
    """
    num_rows, vocab = logits.shape
    likeliest = logits.argmax(1)
    cuts = torch.empty(num_rows, 2, dtype=torch.int32, device=logits.device)
    scores = torch.empty(num_rows, _PARTS, device=logits.device)
    tokens = torch.empty(num_rows, _PARTS, dtype=torch.int32, device=logits.device)
    rows = (settings, numbers, cuts)
    configs.start(truncate, num_rows, logits, *rows, vocab, BLOCK=_BLOCK, num_warps=16)
    part = -(-vocab // (8 * _PARTS))
    sizes = {"PARTS": _PARTS, "GROUPS": _GROUPS}
    operands = (logits, *rows, scores, tokens, vocab, part)
    configs.start(race, num_rows * _PARTS, *operands, **sizes, num_warps=8)
    drawn = tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0].long()
    return torch.where(settings[:, 0] > 0, drawn, likeliest)
