# SPDX-License-Identifier: Apache-2.0
"""Operations that C++ computes against the same in Python, and what it leaves to Python."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch

from moe_lora.kernels import ops
from moe_lora.kernels.cpu import cpu, site_linear
from moe_lora.kernels.cpu.site_linear import NO_ROWS, SiteLinear, lora_rows
from moe_lora.kernels.operands import KvLayout
from moe_lora.kernels.quantised import QuantisedOperand

from .kernel_cases import LAYER, LORA_RANKS, lora_batch, packed_adapters, random, strided
from .test_cpu_attention import DECODE, MIXED
from .test_cpu_attention import operands as attention_operands
from .test_cpu_quantised import ident
from .test_cpu_site_linear import FIRST_EXPERT, FORMS, HELD_EXPERTS, SITES, weights_of

pytestmark = pytest.mark.skipif(not site_linear.has_step_calls, reason="built without torch's headers")


LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32)


class LeftToPythonError(Exception):
    pass


@dataclass(eq=False)
class Handler:
    """A layer's linear site 0 and its attention, for which Python has an error only."""

    linear: SiteLinear | None = None
    layout: KvLayout = LAYOUT
    step: object = None
    arena: object = None

    def __post_init__(self) -> None:
        self.calls = site_linear.StepCalls(LAYER + 1)
        self.channel = ops.open_channels(self, LAYER + 1, self.calls)[LAYER]
        if self.linear is not None:
            self.calls.see(LAYER, 0, self.linear)

    def begin_step(self, *rows) -> None:
        if self.step is None:
            self.step, self.arena, _ = attention_operands(
                torch.Generator(), self.layout, [(1, 1)], 2, self.layout.dtype
            )
        self.calls.begin_step(rows, cpu.StepAttention(self.step, self.layout, self.arena))

    def lora_linear(self, *operands):
        raise LeftToPythonError

    def paged_attention(self, *operands):
        raise LeftToPythonError


def called(channel, x, ids, weight, num_out, site=0):
    held = weight[1:] if isinstance(weight, QuantisedOperand) else (weight, None, None)
    form = weight.form.text if isinstance(weight, QuantisedOperand) else ""
    return ops.lora_linear(channel, x, *held, None, ids, site, FIRST_EXPERT, form, num_out)


def site_case(site, form, dtype, generator):
    weight, bias = weights_of(site, form, dtype, generator)
    num_out = sum(site.out_features)
    first = FIRST_EXPERT if site.num_experts else None
    return weight, SiteLinear(LAYER, dtype, weight, bias, site.in_features, num_out, first), num_out


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "plain" if form is None else ident(form))
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_a_site_has_the_bits_of_python(dtype, generator, site, form):
    weight, linear, num_out = site_case(site, form, dtype, generator)
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    handler = Handler(linear)
    for num_rows in (1, 3):
        x, ids, token_slots = lora_batch(generator, site, num_rows, "uniform", dtype, len(LORA_RANKS))
        x = strided(x)
        if ids is not None:
            ids = torch.where((ids >= FIRST_EXPERT) & (ids < FIRST_EXPERT + HELD_EXPERTS), ids, -1).int()
        for rows in (NO_ROWS, lora_rows(site, token_slots, slots, arena)):
            handler.begin_step(rows)
            expected = linear(x, ids, rows)
            assert expected is not None
            assert torch.equal(called(handler.channel, x, ids, weight, num_out), expected)


def left(handler, x, ids, weight, num_out, site=0) -> bool:
    with pytest.raises(LeftToPythonError):
        called(handler.channel, x, ids, weight, num_out, site)
    return True


def test_what_a_dense_site_is_not_made_for_is_left_to_python_whose_errors_come_through(generator):
    site = SITES[0]
    weight, linear, num_out = site_case(site, None, torch.float32, generator)
    slots, arena = packed_adapters(generator, site, LORA_RANKS, torch.float32)
    handler = Handler(linear)
    many = random(generator, cpu.LINEAR_MAX_ROWS[torch.float32] + 1, 96)
    two = many[:2]
    assert left(handler, two, None, weight, num_out), "before the first step"
    handler.begin_step(NO_ROWS, NO_ROWS)
    assert called(handler.channel, two, None, weight, num_out).shape == (2, num_out)
    assert left(handler, two, None, weight, num_out, site=1), "weights that were not seen"
    assert left(handler, two, None, weight, num_out, site=99)
    assert left(handler, two, None, weight.clone(), num_out), "other weights"
    assert left(handler, many, None, weight, num_out), "torch multiplies as many rows faster"
    for x in (two.bfloat16(), two[:, :95], many[:96].T[:2]):
        assert left(handler, x, None, weight, num_out)
    assert left(handler, two, torch.zeros(2, 2).int(), weight, num_out)
    handler.begin_step(None)
    assert left(handler, two, None, weight, num_out), "deltas from elsewhere"
    handler.begin_step(lora_rows(site, torch.zeros(3).int(), slots, arena))
    assert left(handler, two, None, weight, num_out), "rows of another step"
    handler.begin_step(lora_rows(site, torch.tensor([99, 0]).int(), slots, arena))
    assert left(handler, two, None, weight, num_out), "a slot that is none"
    there, memory = packed_adapters(generator, SITES[1], LORA_RANKS, torch.float32)
    handler.begin_step(lora_rows(SITES[1], torch.zeros(2).int(), there, memory))
    assert left(handler, two, None, weight, num_out), "rows of another site"


def test_ids_that_do_not_fit_are_left_to_python(generator):
    weight, linear, num_out = site_case(SITES[1], None, torch.float32, generator)
    handler, x = Handler(linear), random(generator, 2, 96)
    handler.begin_step(NO_ROWS)
    assert called(handler.channel, x, torch.ones(2, 2).int(), weight, num_out).shape == (4, num_out)
    wrong = (torch.ones(2, 2), torch.ones(3, 2).int(), torch.full((2, 2), 3).int(), torch.ones(4).int(), None)
    assert all(left(handler, x, ids, weight, num_out) for ids in (*wrong, torch.ones(2, 4).int()[:, ::2]))


@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_has_the_bits_of_python(dtype, generator, sequences):
    layout = replace(LAYOUT, dtype=dtype)
    step, arena, (q, k, v) = attention_operands(generator, layout, sequences, 4, dtype)
    for window, sinks in ((0, None), (20, random(generator, 4, dtype=dtype))):
        memory = arena.clone()
        expected = cpu.StepAttention(step, layout, memory)(LAYER, q, k, v, sinks, 0.25, window)
        handler = Handler(layout=layout, step=step, arena=arena.clone())
        handler.begin_step()
        assert torch.equal(ops.paged_attention(handler.channel, q, k, v, sinks, 0.25, window), expected)
        assert torch.equal(handler.arena, memory), "keys and values written"


def test_attention_that_does_not_fit_is_left_to_python(generator):
    step, arena, (q, k, v) = attention_operands(generator, LAYOUT, [(1, 9)], 4, torch.float32)
    handler = Handler(step=step, arena=arena)
    handler.begin_step()
    fits = {"q": q, "k": k, "v": v, "sinks": None, "scale": 0.25, "window": 0}
    assert ops.paged_attention(handler.channel, *fits.values()).shape == q.shape
    twisted = k.transpose(1, 2).contiguous().transpose(1, 2)
    wrong = (
        *({"q": q.bfloat16()}, {"q": q[:, :3]}, {"k": k[:, :1]}, {"k": twisted}, {"v": v[:0]}),
        *({"scale": 0.0}, {"sinks": torch.zeros(3)}, {"q": q[0]}),
    )
    for one in wrong:
        with pytest.raises(LeftToPythonError):
            ops.paged_attention(handler.channel, *(fits | one).values())
    step.block_tables += 1000
    with pytest.raises(LeftToPythonError):
        ops.paged_attention(handler.channel, *fits.values())


def test_channels_of_a_handler_that_is_gone_lead_nowhere(generator):
    weight, linear, num_out = site_case(SITES[0], None, torch.float32, generator)
    handler = Handler(linear)
    handler.begin_step(NO_ROWS)
    channel, x = handler.channel, random(generator, 2, 96)
    assert called(channel, x, None, weight, num_out) is not None
    del handler
    gc.collect()
    with pytest.raises(KeyError):
        called(channel, x, None, weight, num_out)


def test_a_library_for_another_torch_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "9.9.9+cpu")
    assert site_linear._load() is None
    assert "not for torch 9.9.9+cpu" in caplog.text


def test_a_library_for_other_tables_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(site_linear, "_TABLES", site_linear._TABLES[::-1])
    assert site_linear._load() is None
    assert "install moe_lora again" in caplog.text
