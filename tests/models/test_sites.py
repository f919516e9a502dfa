# SPDX-License-Identifier: Apache-2.0
"""Which way the LoRA sites of a step on CPU are computed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moe_lora.kernels.cpu import site_linear
from moe_lora.kernels.cpu.site_linear import SiteLinear
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.row_routing import Source
from tests.families import FAMILIES

from .harness import Harness


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_a_decode_step_is_one_call(family, served, monkeypatch):
    monkeypatch.setattr(site_linear, "has_step_calls", False)
    model = served(family)
    harness = Harness(model.model_dir, model.adapters, max_sequences=4)
    harness.context.backend = RoutedBackend({Source.LOCAL: harness.context.backend})  # as engines have it
    calls, whole = Counter(), SiteLinear.__call__

    def counted(self, x, ids, rows):
        y = whole(self, x, ids, rows)
        calls[y is not None, rows.site is not None] += 1
        return y

    monkeypatch.setattr(SiteLinear, "__call__", counted)
    streams, _ = harness.prefill([[5, 40, 7], [9], [11, 3]], [1, -1, 3])
    assert not calls, "weights are seen for the first time"
    harness.step([(stream, [9]) for stream in streams])
    num_sites = len(harness.model.layers) * len(harness.model.spec.shape.sites)
    assert calls[True, True] > 0, "rows with adapters"
    assert calls.total() == calls[True, True] + calls[True, False] == num_sites
    calls.clear()
    harness.step([(streams[1], [9])])
    assert calls == {(True, False): num_sites}, "a step of the base model"


@pytest.mark.skipif(not site_linear.has_step_calls, reason="built without torch's headers")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_operation_of_a_decode_step_is_in_python(family, served, monkeypatch):
    """Once weights were seen; same bits as with all in Python."""
    model, steps = served(family), []
    for in_cpp in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(site_linear, "has_step_calls", in_cpp)
            harness = Harness(model.model_dir, model.adapters, max_sequences=4, dtype=torch.bfloat16)
            harness.context.backend = RoutedBackend({Source.LOCAL: harness.context.backend})
            streams, _ = harness.prefill([[5, 40, 7], [9], [11, 3]], [1, -1, 3])
            if in_cpp:
                for operation in ("lora_linear", "paged_attention"):
                    patched.setattr(harness.context, operation, None, raising=True)
            steps.append(harness.step([(stream, [9]) for stream in streams]))
    for in_cpp, in_python in zip(*steps, strict=True):
        assert torch.equal(in_cpp, in_python)


def test_weights_that_lie_elsewhere_are_seen_again(served):
    model = served("llama")
    harness = Harness(model.model_dir, model.adapters, max_sequences=4)
    [stream], _ = harness.prefill([[5, 40, 7]], [1])
    before = harness.step([(stream, [9])])
    for layer in harness.model.layers:
        weight = layer.attention.qkv.weight
        layer.attention.qkv.weight = torch.nn.Parameter(weight * 2, requires_grad=False)
    stream.length -= 1
    twice = harness.step([(stream, [9])])
    stream.length -= 1
    assert not torch.equal(before[0], twice[0])
    assert torch.equal(twice[0], harness.step([(stream, [9])])[0])
