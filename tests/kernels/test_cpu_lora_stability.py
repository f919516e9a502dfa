# SPDX-License-Identifier: Apache-2.0
"""A row's delta has the same bits whatever else the batch holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.operands import LoraOperands

from .kernel_cases import DOWN, GATE_UP, LAYER, LORA_RANKS, QKV, SiteCase, lora_batch, packed_adapters

SITES = st.sampled_from([QKV, GATE_UP, DOWN])
KINDS = st.sampled_from(["uniform", "zipf", "identical", "distinct"])
SEEDS = st.integers(0, 2**16)


class Batch:
    """A random batch at a site and its deltas by one kernel."""

    def __init__(self, site: SiteCase, rows: int, kind: str, bf16: bool, seed: int, kernel: str) -> None:
        generator, dtype = torch.Generator().manual_seed(seed), torch.bfloat16 if bf16 else torch.float32
        self.site, self.kernel = site, kernel
        self.slots, self.arena = packed_adapters(generator, site, LORA_RANKS, dtype)
        self.x, self.ids, self.token_slots = lora_batch(generator, site, rows, kind, dtype, len(LORA_RANKS))
        self.per_token = 1 if self.ids is None else 2
        self.x_per_token = self.x.shape[0] // rows
        self.tokens = torch.arange(rows)
        self.together = self.deltas(self.tokens)

    def rows_of(self, tokens: torch.Tensor, per_token: int) -> torch.Tensor:
        return (tokens[:, None] * per_token + torch.arange(per_token)).flatten()

    def deltas(self, tokens: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Of these tokens, in this order."""
        if ids is None and self.ids is not None:
            ids = self.ids[tokens]
        out = self.x.new_empty(len(tokens) * self.per_token, sum(self.site.out_features))
        x = self.x[self.rows_of(tokens, self.x_per_token)]
        operands = LoraOperands(x, ids, self.site, LAYER, self.token_slots[tokens], self.slots, self.arena)
        cpu.lora_delta(operands, out, kernel=self.kernel)
        return out

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.together[self.rows_of(tokens, self.per_token)]


def holds(function):
    """The property for any site, batch and kernel."""
    given_any = given(site=SITES, rows=st.integers(1, 40), kind=KINDS, bf16=st.booleans(), seed=SEEDS)
    return pytest.mark.parametrize("kernel", ["sgmv", "bgmv", "mbgmv"])(
        settings(max_examples=15, deadline=None)(given_any(function))
    )


@holds
def test_alone(site, rows, kind, bf16, seed, kernel):
    batch = Batch(site, rows, kind, bf16, seed, kernel)
    alone = torch.cat([batch.deltas(batch.tokens[t : t + 1]) for t in range(rows)])
    assert torch.equal(alone, batch.together)


@holds
def test_in_any_order_and_company(site, rows, kind, bf16, seed, kernel):
    batch = Batch(site, rows, kind, bf16, seed, kernel)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(batch.deltas(order), batch.expected(order))
    some = torch.randint(0, rows, (rows + 3,), generator=generator)  # tokens twice, others gone
    assert torch.equal(batch.deltas(some), batch.expected(some))


@holds
def test_in_chunks(site, rows, kind, bf16, seed, kernel):
    batch = Batch(site, rows, kind, bf16, seed, kernel)
    chunk = 1 + seed % 7
    chunks = [batch.deltas(tokens) for tokens in batch.tokens.split(chunk)]
    assert torch.equal(torch.cat(chunks), batch.together)


@holds
def test_on_any_number_of_threads(site, rows, kind, bf16, seed, kernel):
    batch = Batch(site, rows, kind, bf16, seed, kernel)
    torch.set_num_threads(3)
    threaded = batch.deltas(batch.tokens)
    torch.set_num_threads(1)
    assert torch.equal(threaded, batch.together)


@holds
def test_with_experts_split_over_servers(site, rows, kind, bf16, seed, kernel):
    """Each server sees -1 for the experts of others; every expert's deltas come from one of them."""
    batch = Batch(GATE_UP if site is QKV else site, rows, kind, bf16, seed, kernel)
    assert batch.ids is not None
    shares = [
        batch.deltas(batch.tokens, torch.where(batch.ids % 2 == half, batch.ids, -1)) for half in (0, 1)
    ]
    expert = batch.ids.flatten()[:, None]
    assert torch.equal(torch.where(expert % 2 == 0, *shares), batch.together)
    assert (shares[0][(expert % 2 == 1).flatten()] == 0).all()
