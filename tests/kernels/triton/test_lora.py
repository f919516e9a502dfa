# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.kernels.lora_spaces import config_space
from moe_lora.kernels import reference
from moe_lora.kernels.operands import LoraOperands, Zeros
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton import configs as launch
from moe_lora.kernels.triton.lora import steps
from moe_lora.kernels.triton.lora import triton_lora as lora
from moe_lora.kernels.triton.lora.segments import build_segments, unsorted_rows

from .conftest import SMALL
from .gpu_cases import DOWN, EVEN_QKV, GATE_UP, ODD, QKV, SITES, assert_delta, make_batch

OWN = [
    ("wgmma", torch.bfloat16),
    ("wgmma", torch.float16),
    ("vector", torch.bfloat16),
    ("vector", torch.float32),
]
KINDS = ["distinct", "uniform", "zipf", "identical"]
# Every popularity with one dtype of each algorithm, the other dtypes with one popularity.
GRID = [(*own, kind) for own in (OWN[0], OWN[3]) for kind in KINDS] + [(*own, "zipf") for own in OWN[1:3]]
# In every run: each algorithm at each site and with each popularity: segments of one row each, of all rows
# and mixed ones; each dtype.  `vector` is the same code for rows of any alignment.
QUICK = {
    *((*OWN[0], KINDS[number % 4], site) for number, site in enumerate(SITES)),
    *((*OWN[3], KINDS[(number + 2) % 4], site) for number, site in enumerate(SITES)),
    (*OWN[1], "zipf", QKV),
    (*OWN[2], "zipf", DOWN),
}


def cases(quick: set[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """All combinations, as parameters; those that are not among the quick ones are slow."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow, id="-".join(map(name_of, case)))
        for case in ((*first, *rest) for first, *rest in product(*values))
    ]


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or str(value).removeprefix("torch.")


# Adding by `wgmma` with TMA, and by elements; by `vector`, which has one way.
EXPANDS = cases(
    {("wgmma", ODD), ("wgmma", GATE_UP), ("vector", ODD)}, [("wgmma",), ("vector",)], [ODD, GATE_UP]
)
BASELINES = [("bgmv",), ("mbgmv",)]
ALONE = {(*OWN[0], QKV), (*OWN[0], DOWN), (*OWN[3], QKV)}
"""Tiles with TMA and without, and rows."""


@pytest.fixture(autouse=True)
def _blocks(small_blocks):
    pass


@pytest.mark.parametrize(("algorithm", "dtype", "kind", "site"), cases(QUICK, GRID, SITES))
def test_delta_agrees_with_fp64(device, algorithm, dtype, site, kind):
    batch = make_batch(site, dtype, kind, device)
    out = batch.output()
    lora.lora_delta(batch.operands(), out, decode=True, algorithm=algorithm)
    assert_delta(out, batch)


@pytest.mark.parametrize(("kernel", "site"), cases({("bgmv", DOWN), ("mbgmv", ODD)}, BASELINES, [ODD, DOWN]))
def test_baselines_agree_with_fp64(device, kernel, site):
    batch = make_batch(site, torch.bfloat16, "uniform", device)
    out = batch.output()
    lora.lora_delta(batch.operands(), out, kernel=kernel, decode=True)
    assert_delta(out, batch)


def test_bgmv_pads_to_the_largest_rank_of_the_batch_not_of_the_slots(device, monkeypatch):
    """Slots hold rank 70; the batch has no more than 8 at the site."""
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device)
    batch.token_slots = torch.tensor([0, 1, -1, 4, 0], dtype=torch.int32, device=device)
    padded = []
    shrink = steps.vector_shrink
    monkeypatch.setattr(
        steps, "vector_shrink", lambda p, *rest: (padded.append(p.padded_rank), shrink(p, *rest))[1]
    )
    outs = [batch.output(), batch.output()]
    lora.lora_delta(batch.operands(), outs[0], kernel="bgmv", decode=True)
    lora.lora_delta(batch.operands(), outs[1], kernel="bgmv", decode=True, batch_rank=8)
    assert padded == [8, 8]
    assert torch.equal(*outs)
    assert_delta(outs[0], batch)


@pytest.mark.parametrize(("algorithm", "site"), EXPANDS)
def test_expand_adds_the_rounded_delta(device, algorithm, site):
    batch = make_batch(site, torch.bfloat16, "uniform", device)
    delta, width = batch.output(), sum(site.out_features)
    lora.lora_delta(batch.operands(), delta, decode=False, algorithm=algorithm)
    y = torch.randn(batch.num_rows, width + 3, generator=torch.Generator().manual_seed(1)).to(delta)
    expected = y.clone()
    expected[:, :width] += delta
    segments = build_segments(batch.token_slots, batch.ids, batch.slots.num_slots, site.num_experts)
    shrunk = lora.lora_shrink(batch.operands(), decode=False, algorithm=algorithm, segments=segments)
    lora.lora_expand(shrunk, y)
    assert torch.equal(y, expected)


@pytest.mark.parametrize(("algorithm", "site"), EXPANDS)
def test_expand_into_fp32_rounds_nothing(device, algorithm, site):
    """As corrections on merged weights are summed: one adapter's deltas added, another's subtracted."""
    batch = make_batch(site, torch.bfloat16, "uniform", device)
    other = batch.tokens(list(range(len(batch.token_slots))))
    other.token_slots = batch.token_slots.flip(0).contiguous()
    total, expected = batch.output(0.0).float(), batch.output(0.0).double()
    for one, subtract in ((batch, False), (other, True)):
        lora.lora_expand(
            lora.lora_shrink(one.operands(), decode=False, algorithm=algorithm), total, subtract=subtract
        )
        delta = reference.lora_delta(one.operands(), torch.float64)
        expected[:, : delta.shape[1]] += -delta if subtract else delta
    rounded = expected.to(torch.bfloat16).double()
    assert float((rounded - expected).abs().max()) > 100 * float((total - expected).abs().max()) > 0


def test_weights_by_tma_give_the_bits_of_weights_by_pointer(device):
    """Rows that are multiples of 16 elements, ranks of one lane and of two."""
    for lora_ranks in ([8, 1, 70, 0, 3], [8, 1, 16, 0, 3]):
        batch = make_batch(EVEN_QKV, torch.bfloat16, "uniform", device, lora_ranks=lora_ranks)
        outs, launched = [], []
        for tma in (False, True):
            with ExitStack() as stack:
                for kernel in ("wgmma_shrink", "wgmma_expand"):
                    config = {**config_space(kernel)[0], **SMALL[kernel], "tma": tma}
                    stack.enter_context(configs.override(kernel, config))
                outs.append(batch.output())
                with recorded(launched):
                    lora.lora_delta(batch.operands(), outs[-1], decode=True, algorithm="wgmma")
        assert launched == [(tma, max(lora_ranks) <= 64) for tma in (False, True)]
        assert torch.equal(*outs)
        assert_delta(outs[0], batch)


def test_a_site_is_two_launches(device):
    """Beside those that order the rows, which sites share."""
    batch, names, start = make_batch(GATE_UP, torch.bfloat16, "uniform", device), [], configs.start
    rows = build_segments(batch.token_slots, batch.ids, batch.slots.num_slots, GATE_UP.num_experts)
    rows.tiles(16)

    def record(kernel, *operands, **meta):
        names.append(kernel.fn.__name__)
        start(kernel, *operands, **meta)

    y = batch.output(0.0)
    with patch.object(configs, "start", record):
        lora.lora_expand(lora.lora_shrink(batch.operands(), decode=True, segments=rows), y)
    assert names == ["wgmma_shrink", "wgmma_expand"]
    assert_delta(y, batch)


def test_zeros_are_of_one_fill_and_nobody_elses(device):
    zeros, taken = Zeros(), []
    for count in (1, 40, 5):
        taken.append(zeros.take(count, device))
        assert taken[-1].tolist() == [0] * count
        taken[-1].fill_(7)
    assert len({one.untyped_storage().data_ptr() for one in taken}) == 1
    assert all(one.data_ptr() % 128 == taken[0].data_ptr() % 128 for one in taken)
    assert zeros.take(1 << 20, device).sum() == 0


@contextmanager
def names_of(launched):
    """Names of the LoRA kernels that are launched in the context."""
    start = configs.start

    def record(kernel, *operands, **meta):
        if kernel.fn.__name__.startswith("wgmma"):
            launched.append(kernel.fn.__name__)
        start(kernel, *operands, **meta)

    with patch.object(configs, "start", record):
        yield


@contextmanager
def recorded(launched):
    """Of each expand in the context, whether its weights come by TMA and whether no rank has two lanes."""
    start = configs.start

    def record(kernel, *operands, **meta):
        if "ONE_LANE" in meta:
            launched.append((meta["TMA"], meta["ONE_LANE"]))
        start(kernel, *operands, **meta)

    with patch.object(configs, "start", record):
        yield


@pytest.mark.parametrize(
    ("part_k", "parts"),
    [(32, 2), (33, 1), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in (64, 1024))],
)
def test_input_is_split_only_where_parts_are_wide_enough(device, part_k, parts):
    batch = make_batch(QKV, torch.bfloat16, "uniform", device)
    config = {**config_space("wgmma_shrink")[0], **SMALL["wgmma_shrink"], "part_k": part_k}
    with configs.override("wgmma_shrink", config):
        shrunk = lora.lora_shrink(batch.operands(), decode=True, algorithm="wgmma")
    [(_, h)] = shrunk.parts
    assert h.shape[0] == parts
    out = batch.output(0.0)
    lora.lora_expand(shrunk, out)
    assert_delta(out, batch)


@pytest.mark.parametrize("algorithm", ["wgmma", "vector"])
def test_modules_that_share_a_get_the_same_delta_as_with_copies(device, algorithm):
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device, share_a=True)
    out = batch.output()
    lora.lora_delta(batch.operands(), out, decode=True, algorithm=algorithm)
    assert_delta(out, batch)


def test_rows_without_adapter_get_zeros_and_leave_y_alone(device):
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device)
    batch.token_slots = torch.full_like(batch.token_slots, -1)
    for algorithm in ("wgmma", "vector"):
        out, y = batch.output(), batch.output(1.5)
        lora.lora_delta(batch.operands(), out, decode=True, algorithm=algorithm)
        assert torch.equal(out, torch.zeros_like(out))
        lora.lora_expand(lora.lora_shrink(batch.operands(), decode=True, algorithm=algorithm), y)
        assert torch.equal(y, torch.full_like(y, 1.5))


def test_empty_batch_and_empty_slots(device):
    batch = make_batch(QKV, torch.bfloat16, "uniform", device)
    none = batch.tokens([])
    lora.lora_delta(none.operands(), none.output(), decode=True)
    empty = make_batch(QKV, torch.bfloat16, "uniform", device, lora_ranks=[0, 0])
    out = empty.output()
    lora.lora_delta(empty.operands(), out, decode=True)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(("algorithm", "dtype", "site"), cases(ALONE, OWN, [QKV, DOWN]))
def test_delta_of_a_row_is_bit_identical_in_any_batch(device, algorithm, dtype, site):
    batch = make_batch(site, dtype, "zipf", device, tokens=3)
    together = batch.output()
    lora.lora_delta(batch.operands(), together, decode=True, algorithm=algorithm)
    per_token = batch.num_rows // 3
    for pick in ([0], [2, 0, 2, 1, 0]):
        other = batch.tokens(pick)
        out = other.output()
        lora.lora_delta(other.operands(), out, decode=True, algorithm=algorithm)
        for place, token in enumerate(pick):
            mine = out[place * per_token : (place + 1) * per_token]
            assert torch.equal(mine, together[token * per_token : (token + 1) * per_token])


def test_strided_x_gives_the_bits_of_contiguous_x(device):
    batch = make_batch(QKV, torch.bfloat16, "uniform", device, tokens=3)
    outs = [batch.output(), batch.output()]
    lora.lora_delta(batch.operands(), outs[0], decode=True, algorithm="wgmma")
    batch.x = torch.cat([batch.x, batch.x[:, :5]], 1)[:, :64]
    lora.lora_delta(batch.operands(), outs[1], decode=True, algorithm="wgmma")
    assert torch.equal(*outs)


def test_operands_that_do_not_fit_are_refused(device):
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device)
    x, ids, _, _, token_slots, _, arena = batch.operands()
    wrong = [
        {"x": x[:, :40]},
        {"x": x.double()},
        {"x": x.t().contiguous().t()},
        {"x": x[:4]},
        {"ids": None},
        {"ids": ids.long()},
        {"ids": ids[:4]},
        {"token_slots": token_slots.long()},
        {"token_slots": token_slots[:4]},
        {"layer": 2},
        {"arena": arena[:64]},
        {"arena": arena.view(torch.int8)},
        {"kernel": "gemm"},
        {"algorithm": "simt"},
        {"max_lora_rank": 69},
        {"kernel": "bgmv", "algorithm": "vector"},
        {"segments": unsorted_rows(token_slots, ids, 5, 3)},
        {"kernel": "mbgmv", "segments": build_segments(token_slots, ids, 5, 3)},
        {"site": replace(GATE_UP, entry_base=3)},
        {"site": replace(GATE_UP, entry_base=-1)},
    ]
    shrunk = lora.lora_shrink(batch.operands(), decode=True)
    for change in wrong:
        operands = {name: change.pop(name) for name in LoraOperands._fields if name in change}
        with pytest.raises(ValueError):
            lora.lora_shrink(batch.operands()._replace(**operands), decode=True, **change)
    y = batch.output()
    for bad in (y[:, :63], y[:3], y.double(), y.t().contiguous().t()):
        with pytest.raises(ValueError):
            lora.lora_expand(shrunk, bad)


def test_a_bound_of_the_batch_changes_no_bit(device):
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device)
    batch.token_slots = torch.tensor([0, 1, -1, 4, 0], dtype=torch.int32, device=device)
    outs = [batch.output(), batch.output()]
    lora.lora_delta(batch.operands(), outs[0], decode=True)
    lora.lora_delta(batch.operands(), outs[1], decode=True, batch_rank=8)
    assert torch.equal(*outs)


def test_classes_of_ranks_are_served_by_their_own_algorithms(device, monkeypatch):
    choices = (
        configs.Choice(algorithm="vector", max_rank=8),
        configs.Choice(algorithm="wgmma", min_rank=9),
    )
    table = replace(configs.load_table(configs.FALLBACK), choices=choices)
    monkeypatch.setattr(launch, "table_of", lambda device: table)
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", device, lora_ranks=[8, 1, 70, 16])
    out = batch.output(0.0)
    shrunk = lora.lora_shrink(batch.operands(), decode=True, max_lora_rank=128)
    assert [choice.algorithm for choice, _ in shrunk.parts] == ["vector", "wgmma"]
    lora.lora_expand(shrunk, out)
    assert_delta(out, batch)
