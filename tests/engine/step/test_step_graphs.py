# SPDX-License-Identifier: Apache-2.0
"""Steps by graphs are those launched one by one, bit for bit: on the stand-in for a CUDA device, which does
again what it noted, as a replay does.

(Started by `tests/kernels/triton/test_in_interpreter.py`.)
"""

from __future__ import annotations

import pytest
import torch

from moe_lora.engine.step import step_graphs
from moe_lora.engine.step.step_pieces import StepCapture
from moe_lora.kernels.lora import lora_delta
from moe_lora.kernels.operands import SlotTable
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.kernels.triton.lora import triton_lora
from tests.engine.on_device import OnDevice, Recorder
from tests.families import ALL_TARGETS, make_adapter, make_checkpoint
from tests.kernels.kernel_cases import SiteCase
from tests.kernels.triton.gpu_cases import make_batch
from tests.models.harness import MAX_TOKENS, Harness
from tests.stand_in_device import DeviceTensor, launches, stand_in_device

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
PROMPTS = [(0, [3]), (-1, [11]), (-1, [13]), (1, [5])]
"""Adapters of rank 4 and of rank 9."""
WITH_PROMPTS = [(0, [3, 5, 7]), (-1, [11]), (-1, [13, 2]), (1, [5, 4])]
TURNS_WITH_PROMPTS = (slice(0, 1), slice(1, 3), slice(0, 4), slice(1, 2))
"""Whose turn it is."""
CHANGES = {"llama": {"num_hidden_layers": 1}, "gpt_oss": {}}
"""GPT-OSS has a layer of each kind of attention."""


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def served(request, tmp_path_factory):
    """A harness, and its logits of `WITH_PROMPTS` by the CPU library, from before its weights move."""
    folder = tmp_path_factory.mktemp(request.param)
    base = make_checkpoint(request.param, folder / "base", seed=0, **CHANGES[request.param])
    adapters = [
        make_adapter(request.param, base, folder / str(r), r, ALL_TARGETS, seed=r, scale=0.5) for r in (4, 9)
    ]
    harness = Harness(base, adapters, max_sequences=48)
    return harness, on_host(harness, WITH_PROMPTS, TURNS_WITH_PROMPTS)


@pytest.fixture
def harness(served):
    return served[0]


def on_host(harness, prompts, turns):
    streams, left = [harness.add(slot) for slot, _ in prompts], [tokens for _, tokens in prompts]
    found = []
    for turn in turns:
        rows = harness.step(list(zip(streams[turn], left[turn], strict=True)))
        found.append(torch.stack([one[-1] for one in rows]))
        left[turn] = [[29]] * len(rows)
    return found


@pytest.mark.slow
def test_replayed_steps_are_those_launched_one_by_one(harness, monkeypatch):
    monkeypatch.setattr(step_graphs, "RANK_STEP", 8)
    monkeypatch.setattr(step_graphs, "FIRST_CONTEXT", 2)
    monkeypatch.setattr(step_graphs, "CONTEXT_FACTOR", MAX_TOKENS // 2)
    steps = [(slice(0, 3), 1), (slice(0, 2), 1), (slice(0, 4), 2), (slice(1, 3), 3)]
    """Whose turn it is, and how many graphs there were: for up to two tokens, for more and rank 9, for the
    base."""
    with stand_in_device():
        plain = OnDevice(harness, PROMPTS)
        launched, replayed = (OnDevice(harness, PROMPTS, rows=(4,), max_tokens=MAX_TOKENS) for _ in range(2))
        for turn, num_captured in steps:
            launched.graphs._graphs.clear()
            found = replayed.step(turn, drawn=num_captured > 1)
            assert replayed.graphs.num_captured == num_captured
            assert torch.equal(found, launched.step(turn))
            # Logits of fewer rows are another product of the host's BLAS.
            torch.testing.assert_close(found, plain.step(turn), rtol=1e-5, atol=1e-5)
    assert replayed.graphs.num_replayed == len(steps)


def test_steps_with_prompts_are_replayed(served, monkeypatch):
    """A prompt; prompts of the base; tokens of three sequences beside a prompt; tokens alone.

    The first is near the step without graphs, all are near those of the CPU library, whose sums differ.
    """
    harness, expected = served
    monkeypatch.setattr(step_graphs, "RANK_STEP", 16)
    buckets = {"rows": (), "prompt_rows": (4, 8), "max_sequences": 4, "max_tokens": MAX_TOKENS}
    with stand_in_device():
        launched, replayed = (OnDevice(harness, WITH_PROMPTS, **buckets) for _ in range(2))
        plain = OnDevice(harness, WITH_PROMPTS).step(TURNS_WITH_PROMPTS[0])
        for turn, logits in zip(TURNS_WITH_PROMPTS, expected, strict=True):
            launched.graphs._graphs.clear()
            found = replayed.step(turn)
            assert torch.equal(found, launched.step(turn))
            if turn == TURNS_WITH_PROMPTS[0]:
                torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-4)
    assert replayed.graphs.num_replayed == replayed.graphs.num_captured == 3


@pytest.mark.slow
def test_graphs_are_captured_before_the_first_step(harness):
    with stand_in_device():
        device = OnDevice(harness, PROMPTS, rows=(4,), max_tokens=MAX_TOKENS)
        ranks = harness.slots.site_ranks(torch.tensor([0, 1]).numpy(), harness.model.spec.shape.sites)
        device.runner.warm_up(ranks, max_tokens=4)
        assert device.graphs.num_captured == 2
        expected = OnDevice(harness, PROMPTS).step()
        torch.testing.assert_close(device.step(), expected, rtol=1e-5, atol=1e-5)
        assert device.graphs.num_captured == 2
        assert device.graphs.num_replayed == 1


@pytest.mark.slow
def test_steps_that_no_graph_holds_are_launched_one_by_one(harness):
    """A prompt; more rows than any bucket has; a graph's own buffer is not touched by them."""
    with stand_in_device():
        device = OnDevice(harness, [(0, [3, 4]), (-1, [5])], rows=(4,), max_tokens=MAX_TOKENS)
        device.step()
        assert device.graphs.num_replayed == 0
        device.step()
        assert device.graphs.num_replayed == 1
        device.graphs._rows = [1]
        device.step()
        assert device.graphs.num_replayed == 1


@pytest.mark.slow
def test_a_buffer_that_moved_has_graphs_captured_anew(harness, monkeypatch):
    monkeypatch.setattr(step_graphs, "RANK_STEP", 8)
    monkeypatch.setattr(step_graphs, "FIRST_CONTEXT", 2)
    monkeypatch.setattr(step_graphs, "CONTEXT_FACTOR", MAX_TOKENS // 2)
    turns = [slice(1, 2), slice(1, 3), slice(1, 3), slice(0, 1)]
    with stand_in_device():
        expected = OnDevice(harness, PROMPTS)
        device = OnDevice(harness, PROMPTS, rows=(4,), max_tokens=MAX_TOKENS)
        found = [device.step(turn).clone() for turn in turns[:2]]
        assert device.graphs.num_captured == 1
        device.graphs._buffer.memory = device.graphs._buffer.memory.clone()
        found += [device.step(turn).clone() for turn in turns[2:]]
        for one, turn in zip(found, turns, strict=True):
            torch.testing.assert_close(one, expected.step(turn), rtol=1e-5, atol=1e-5)
    assert device.graphs.num_captured == 3


def test_what_a_capture_freezes_shows():
    """The check itself: memory is read anew, numbers are those of the capture."""
    numbers = [2.0]
    with stand_in_device():
        x = DeviceTensor(torch.ones(3))
        [replay], out = StepCapture(Recorder())(lambda: (x + 1) * numbers[0])
        x.add_(1)
        numbers[0] = 5.0
        replay()
    assert out.held.tolist() == [6.0] * 3


def test_a_delta_captured_before_there_are_adapters_serves_them_when_they_come():
    """As a rank of the LoRA Server does, whose slots are empty when it begins."""
    site = SiteCase("gate_up", ("gate", "up"), 48, (32, 32), num_experts=3)
    batch = make_batch(site, torch.float32, "distinct", torch.device("cpu"))
    expected, operands = batch.output(), batch.operands()
    triton_lora.lora_delta(operands, expected, decode=False)
    known = operands.slots
    slots = SlotTable(*known.lora_rank.shape, torch.device("cpu"))
    slots.end_bytes = known.end_bytes
    names = ("a_offset", "b_offset", "scale", "lora_rank")
    with stand_in_device():
        held = {name: getattr(slots, name) for name in names}
        for name in names:
            setattr(slots, name, DeviceTensor(held[name]))
        tensors = {
            name: DeviceTensor(getattr(operands, name)) for name in ("x", "ids", "token_slots", "arena")
        }
        given, out = operands._replace(slots=slots, **tensors), DeviceTensor(torch.empty_like(expected))
        with launches() as noted:
            lora_delta(given, out, max_lora_rank=128)
        assert not out.held.any()
        for name in names:
            held[name].copy_(getattr(known, name))
        for one in noted:
            one.again()
    assert expected.any()
    assert torch.equal(out.held, expected)
