from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.kernels import cpu, reference

from .kernel_cases import DOWN, GATE_UP, QKV, SiteCase, packed_adapters, popularity, random, strided

RANKS = [8, 1, 130, 0, 3, 16, 64, 24]
ROWS = [1, 2, 3, 5, 16, 17, 200]
LAYER = 1


def add_delta(x, ids, site, row_slot, slots, arena, y) -> torch.Tensor:
    """y + delta by the kernels under test, in place."""
    num_rows = x.shape[0] if ids is None else ids.numel()
    workspace = torch.full((cpu.lora_workspace_floats(num_rows, site, 130),), float("nan"))
    cpu.lora_shrink(x, ids, site, LAYER, row_slot, slots, arena, workspace)
    cpu.lora_expand(workspace, ids, site, LAYER, row_slot, slots, arena, y)
    return y


def batch(generator, site: SiteCase, rows: int, kind: str, dtype, num_slots: int):
    """x, ids and row_slot of a batch at a site; `down` has one input row per output."""
    row_slot = popularity(generator, kind, rows, num_slots)
    if not site.num_experts:
        return random(generator, rows, site.in_features, dtype=dtype), None, row_slot
    ids = torch.randint(-1, site.num_experts, (rows, 2), generator=generator).int()
    x_rows = rows * 2 if site is DOWN else rows
    return random(generator, x_rows, site.in_features, dtype=dtype), ids, row_slot


@pytest.mark.parametrize("kind", ["distinct", "uniform", "zipf", "identical"])
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN], ids=lambda site: site.name)
def test_delta_agrees_with_reference(isa, dtype, generator, site, kind):
    slots, arena = packed_adapters(generator, site, RANKS, dtype)
    for rows in ROWS:
        x, ids, row_slot = batch(generator, site, rows, kind, dtype, len(RANKS))
        y = random(generator, rows if ids is None else ids.numel(), sum(site.out_features), dtype=dtype)
        expected = y.float() + reference.lora_delta(x, ids, site, LAYER, row_slot, slots, arena)
        actual = add_delta(strided(x), ids, site, row_slot, slots, arena, strided(y))
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def test_row_without_adapter_gets_no_delta(dtype, generator):
    slots, arena = packed_adapters(generator, QKV, RANKS, dtype)
    x, y = random(generator, 4, 96, dtype=dtype), random(generator, 4, 146, dtype=dtype)
    row_slot = torch.tensor([-1, 3, -1, 0], dtype=torch.int32)  # slot 3 is empty
    out = add_delta(x, None, QKV, row_slot, slots, arena, y.clone())
    assert torch.equal(out[:3], y[:3])
    assert not torch.equal(out[3], y[3])
    untouched = add_delta(x, None, QKV, torch.full_like(row_slot, -1), slots, arena, y.clone())
    assert torch.equal(untouched, y)


def test_modules_that_share_a_get_the_same_delta_as_with_copies(isa, dtype, generator):
    slots, arena = packed_adapters(generator, GATE_UP, [8, 5], dtype, share_a=True)
    x, ids, row_slot = batch(generator, GATE_UP, 12, "distinct", dtype, 2)
    y = torch.zeros(24, 260, dtype=dtype)
    expected = reference.lora_delta(x, ids, GATE_UP, LAYER, row_slot, slots, arena)
    actual = add_delta(x, ids, GATE_UP, row_slot, slots, arena, y)
    torch.testing.assert_close(
        actual.float(), expected, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 2e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    site=st.sampled_from([QKV, GATE_UP, DOWN]),
    kinds=st.tuples(st.sampled_from(["uniform", "zipf", "identical"]), st.integers(1, 40)),
    bf16=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_delta_of_a_row_is_bit_identical_in_any_batch(site, kinds, bf16, seed):
    generator, dtype = torch.Generator().manual_seed(seed), torch.bfloat16 if bf16 else torch.float32
    slots, arena = packed_adapters(generator, site, RANKS, dtype)
    x, ids, row_slot = batch(generator, site, kinds[1], kinds[0], dtype, len(RANKS))
    per_token = 1 if ids is None else 2
    y = random(generator, kinds[1] * per_token, sum(site.out_features), dtype=dtype)
    together = add_delta(x, ids, site, row_slot, slots, arena, y.clone())
    x_per_token = x.shape[0] // kinds[1]
    for token in range(kinds[1]):
        rows = slice(token * per_token, (token + 1) * per_token)
        x_rows = x[token * x_per_token : (token + 1) * x_per_token]
        one_ids = None if ids is None else ids[token : token + 1]
        one_slot = row_slot[token : token + 1]
        alone = add_delta(x_rows, one_ids, site, one_slot, slots, arena, y[rows].clone())
        assert torch.equal(alone, together[rows])


def test_long_segments_are_bit_identical_to_single_rows(isa, dtype, generator):
    site = SiteCase("o", ("o",), 1024, (1500,))
    slots, arena = packed_adapters(generator, site, [72], dtype)
    x, y = random(generator, 230, 1024, dtype=dtype), random(generator, 230, 1500, dtype=dtype)
    row_slot = torch.zeros(230, dtype=torch.int32)
    together = add_delta(x, None, site, row_slot, slots, arena, y.clone())
    torch.set_num_threads(2)
    assert torch.equal(add_delta(x, None, site, row_slot, slots, arena, y.clone()), together)
    for row in (0, 95, 96, 229):
        pick = slice(row, row + 1)
        assert torch.equal(
            add_delta(x[pick], None, site, row_slot[pick], slots, arena, y[pick].clone()), together[pick]
        )


def test_operands_that_do_not_fit_are_refused(generator):
    slots, arena = packed_adapters(generator, GATE_UP, [4, 4], torch.float32)
    x, y, workspace = torch.zeros(3, 70), torch.zeros(6, 260), torch.zeros(48)
    ids, row_slot = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)

    def shrink(x=x, ids=ids, row_slot=row_slot, workspace=workspace):
        cpu.lora_shrink(x, ids, GATE_UP, LAYER, row_slot, slots, arena, workspace)

    def expand(y=y, ids=ids, row_slot=row_slot, workspace=workspace):
        cpu.lora_expand(workspace, ids, GATE_UP, LAYER, row_slot, slots, arena, y)

    shrink()
    expand()
    refused = [
        lambda: shrink(x=x[:, :60]),
        lambda: shrink(x=x.half()),
        lambda: shrink(x=torch.zeros(4, 70)),
        lambda: shrink(ids=ids + 4),
        lambda: shrink(row_slot=row_slot + 2),
        lambda: shrink(row_slot=row_slot - 2),
        lambda: shrink(row_slot=row_slot.long()),
        lambda: shrink(workspace=workspace[:47]),
        lambda: shrink(workspace=workspace.double()),
        lambda: expand(y=y[:, :259]),
        lambda: expand(y=y[:5]),
        lambda: expand(workspace=workspace[:47]),
    ]
    for call in refused:
        with pytest.raises(ValueError):
            call()
