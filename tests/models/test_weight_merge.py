# SPDX-License-Identifier: Apache-2.0
"""Folding an adapter into the weights and taking it out: bits, tokens, and what rows of others get."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import RowRouting, Source, no_terms
from moe_lora.models.mlp import MoeMlp
from moe_lora.models.weight_merge import HeldAdapter, WeightMerge
from tests.families import (
    FAMILIES,
    FURTHER,
    LATENT_FAMILIES,
    LATER_MOE,
    NEWER_DENSE,
    RECURRENT_FAMILIES,
    later,
    make_adapter,
)
from tests.grids import diagonal, with_quick
from tests.oracle import greedy_reference

from .harness import Harness
from .test_oracle import SLOTS, make_prompts

NUM_TOKENS = 4
IN_ENGINE = (*RECURRENT_FAMILIES, *LATENT_FAMILIES)
"""Families of layers whose engine merges: `tests/engine/test_recurrent.py`, `test_latent.py`."""
ALONE = (*NEWER_DENSE, "qwen3_5", "qwen3_vl_moe", "flex_olmo")
"""Newer families of plain MLPs, or of experts alone."""


class MergingHarness(Harness):
    """A model whose weights may carry the adapter of a slot, at some sites of some layers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        shape = self.model.spec.shape
        self.merge = WeightMerge(self.model)
        self.sites = frozenset(range(len(shape.sites)))
        self.slot = -1
        self.num_mixed = 0
        self.context.backend = RoutedBackend(
            {
                source: LocalBackend(shape, self.arena, self.slots, source=source)
                for source in (Source.LOCAL, -Source.LOCAL)
            }
        )

    def fold_in(self, slot: int, share: float = 1.0) -> list[tuple[int, int]]:
        """Fold in the first pieces of an adapter."""
        self.slot, held = slot, HeldAdapter(self.arena, self.slots, slot)
        pieces = self.merge.pieces(held, self.sites)
        for piece in pieces[: round(share * len(pieces))]:
            self.merge.fold_in(piece, held)
        return pieces

    def take_out(self) -> None:
        held = HeldAdapter(self.arena, self.slots, self.slot)
        for piece in zip(*map(np.ndarray.tolist, np.nonzero(self.merge.merged)), strict=True):
            self.merge.take_out(piece, held)
        self.slot = -1

    def rounding_errors(self, slot: int) -> np.ndarray:
        """Of each piece and module that the adapter changes."""
        held = HeldAdapter(self.arena, self.slots, slot)
        pieces = self.merge.pieces(held, self.sites)
        found = [one for piece in pieces for one in self.merge.rounding(piece, held)]
        return np.sqrt([lost / delta for _, lost, delta in found])

    def routing(self, token_slots: np.ndarray) -> RowRouting:
        if not self.merge.merged.any():
            return super().routing(token_slots)
        num_slots = self.slots.num_slots
        terms = no_terms(num_slots + 1, 2, 2)  # the last but one is the base's
        terms["source"][:num_slots, :, 0] = Source.LOCAL
        terms["slot"][:num_slots, :, 0] = np.arange(num_slots)[:, None]
        terms["source"][:-1, 1, 1] = -Source.LOCAL
        terms["slot"][:-1, 1, 1] = self.slot
        terms[self.slot, 1] = no_terms(0, 1)[0, 0, 0]
        self.num_mixed += bool((token_slots != self.slot).any())
        return RowRouting(
            groups=self.merge.merged.astype(int).tolist(),
            row_route=np.where(token_slots < 0, num_slots, token_slots).astype(np.int32),
            terms=terms,
        )


def bits(model) -> list[torch.Tensor]:
    return [weight.detach().clone().view(torch.uint8) for weight in model.parameters()]


def assert_same_bits(model, before: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, bits(model), before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_cycles", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_weights_are_the_same_bits_after_random_cycles(num_cycles, family, dtype, served):
    model = served(family)
    harness = MergingHarness(model.model_dir, model.adapters, dtype=dtype)
    before, checksum = bits(harness.model), harness.merge.checksum()
    places = [weight.data_ptr() for weight in harness.model.parameters()]
    drawn = random.Random(0)
    for _ in range(num_cycles):
        harness.fold_in(drawn.randrange(len(model.adapters)), drawn.choice([0.3, 1.0]))
        assert harness.merge.merged.any()
        assert harness.merge.checksum() != checksum
        harness.take_out()
        assert harness.merge.checksum() == checksum
    assert_same_bits(harness.model, before)
    assert [weight.data_ptr() for weight in harness.model.parameters()] == places


@pytest.mark.parametrize(
    ("family", "share"),
    [
        *diagonal(FAMILIES, (0.5, 1.0)),
        *(
            pytest.param(family, 0.5, marks=pytest.mark.slow if family in IN_ENGINE else ())
            for family in LATER_MOE
        ),
        *(pytest.param(family, 1.0, marks=pytest.mark.slow) for family in LATER_MOE),
        *(
            pytest.param(*one.values, 0.5, marks=one.marks)
            for one in later("qwen3", "granite", families=FURTHER + ALONE)
        ),
        *(pytest.param(family, 1.0, marks=pytest.mark.slow) for family in FURTHER + ALONE),
    ],
)
def test_mixed_steps_give_the_tokens_of_peft(family, share, served):
    """Rows of the merged adapter, of others and of the base, with some or all sites merged.

    Of all but Mixtral: an adapter on the gate too, and the one of the largest rank.
    """
    model, prompts = served(family), make_prompts()
    harness = MergingHarness(model.model_dir, model.adapters, max_sequences=32)
    before = bits(harness.model)
    slots = range(len(model.adapters)) if family == "mixtral" else (1, 3)
    for slot in slots:
        harness.fold_in(slot, share)
        found = harness.greedy(prompts, SLOTS, NUM_TOKENS)
        for one, (prompt, tokens) in zip(SLOTS, zip(prompts, found, strict=True), strict=True):
            expected = greedy_reference(
                model.model_dir, None if one < 0 else model.adapters[one], [prompt], NUM_TOKENS, [tokens]
            )
            expected.check_margins()
            assert tuple(tokens) == expected.tokens[0]
        harness.take_out()
    assert_same_bits(harness.model, before)
    assert harness.num_mixed == NUM_TOKENS * len(slots)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_those_of_peft(family, served):
    """Each module's rows: in fp32 what transformers' own merge gives, up to the order of a sum."""
    model = served(family)
    merged, alone = (MergingHarness(model.model_dir, model.adapters) for _ in range(2))
    prompt = make_prompts()[0]
    for slot in (0, 2, 3):
        merged.fold_in(slot)
        row = merged.prefill([prompt], [slot])[1][0]
        other = alone.prefill([prompt], [slot])[1][0]
        torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-4)
        merged.take_out()


def test_small_adapters_lose_more_in_bf16(served):
    model = served("mixtral")
    harness = MergingHarness(model.model_dir, model.adapters, dtype=torch.bfloat16)
    large = harness.rounding_errors(0)
    harness.slots.scale[0] /= 200
    small = harness.rounding_errors(0)
    assert 0 < large.max() < 0.02 < 0.1 < small.max()
    assert MergingHarness(model.model_dir, model.adapters).rounding_errors(0).max() < 1e-5
    harness.slots.scale[0] *= 200
    harness.fold_in(1)
    np.testing.assert_array_equal(harness.rounding_errors(0), large, "on weights that carry another")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_rounding_of_modules_that_the_merged_adapter_leaves_alone(family, served, tmp_path):
    model = served(family)
    folders = [
        make_adapter(family, model.model_dir, tmp_path / "".join(modules), 8, (), target_modules=modules)
        for modules in (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"])
    ]
    harness = MergingHarness(model.model_dir, folders, dtype=torch.bfloat16)
    unmerged = harness.rounding_errors(1)
    harness.fold_in(0)
    np.testing.assert_array_equal(harness.rounding_errors(1), unmerged)


class FixedChoices:
    """Has every expert choice of a model written down, or taken from what was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: list[torch.Tensor] = []
        self.at: int | None = None
        choose = MoeMlp.choose

        def chosen(mlp, *given):
            weights, ids, order = choose(mlp, *given)
            if self.at is None:
                self.known.append(ids)
                return weights, ids, order
            ids = self.known[self.at]
            self.at += 1
            scores = given[0].float()
            if mlp.gate_kind == "softmax_topk":
                scores = torch.softmax(scores, dim=-1)
            weights = scores.gather(-1, ids.long())
            if mlp.gate_kind == "topk_softmax":
                return torch.softmax(weights, dim=-1), ids, order
            if mlp.gate_norm is not None:
                weights = weights / weights.norm(p=mlp.gate_norm, dim=-1, keepdim=True)
            return weights, ids, order

        monkeypatch.setattr(MoeMlp, "choose", chosen)


BF16_FACTOR = 1.5
"""Logits on merged weights differ from fp32 ones by at most so many times what unmerged ones do (rms)."""


@pytest.mark.parametrize("family", with_quick(FAMILIES, ("llama", "gpt_oss")))
def test_logits_in_bf16_are_within_the_bound(family, served, monkeypatch):
    """Merged and mixed rows, with the experts that fp32 chose."""
    model, prompts, choices = served(family), make_prompts(), FixedChoices(monkeypatch)

    def logits(dtype: torch.dtype, merged: int) -> torch.Tensor:
        harness = MergingHarness(model.model_dir, model.adapters, dtype=dtype)
        if merged >= 0:
            harness.fold_in(merged)
        return torch.cat(harness.prefill(prompts, SLOTS)[1])

    exact = logits(torch.float32, -1)
    found = {}
    for merged in (-1, 0, 2, 3):
        choices.at = 0
        found[merged] = float((logits(torch.bfloat16, merged) - exact).square().mean().sqrt())
    assert all(0 < error <= BF16_FACTOR * found[-1] for error in found.values())
