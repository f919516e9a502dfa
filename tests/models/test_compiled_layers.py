# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from moe_lora.models.causal_lm import DecoderLayer
from moe_lora.models.compiled_layers import CompiledLayers
from tests.grids import with_quick

from .generated_code import captured_graphs
from .harness import Harness


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    with captured_graphs() as found:
        yield found


def logits(harness: Harness, layers, num_rows: int, number: int = 0) -> torch.Tensor:
    """Of a decode step of as many rows, some with adapters, the last of several padding.

    number: which step, so that positions differ from one to the next.
    """
    num_padding = int(num_rows > 1 and number % 2)
    slots = [(1, -1, 3)[i % 3] for i in range(num_rows - num_padding)]
    harness.layer_forward = DecoderLayer.forward
    prompts = [[5 + i, 40, 7, 8, 11, 12][: 1 + i % 3 + number % 4] for i in range(len(slots))]
    streams, _ = harness.prefill(prompts, slots)
    harness.layer_forward = layers
    return torch.cat(harness.step([(stream, [9 + i]) for i, stream in enumerate(streams)], num_padding))


def marking(layers):
    def run(layer, x, channel, *rows):
        for tensor in (x, *rows):
            torch._dynamo.mark_dynamic(tensor, 0)
        return layers(layer, x, channel, *rows)

    return run


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Rows of each call that goes through the compiler."""
    torch._dynamo.reset()
    seen, first = [], CompiledLayers._first

    def noted(self, layer, step):
        seen.append(step[0].shape[0])
        return first(self, layer, step)

    monkeypatch.setattr(CompiledLayers, "_first", noted)
    return seen


@pytest.mark.parametrize("family", with_quick(("llama", "gpt_oss"), ("llama",)))
def test_the_compiler_is_asked_once_for_each_layer_and_number_of_rows(family, served, asked, graphs):
    model = served(family)
    harness = Harness(model.model_dir, model.adapters, max_sequences=32)
    layers = CompiledLayers(num_buckets=2)
    for number, num_rows in enumerate((1, 2, 1, 2, 2)):
        found = logits(harness, layers, num_rows, number)
        assert torch.equal(found, logits(harness, DecoderLayer.forward, num_rows, number))
    num_layers = len(harness.model.layers)
    assert asked == [1] * num_layers + [2] * num_layers
    assert len(graphs) == 2 * (2 if family == "gpt_oss" else 1)


@pytest.mark.slow
def test_code_for_any_number_of_rows_is_asked_for_once(served, asked, graphs):
    model = served("mixtral")
    harness = Harness(model.model_dir, model.adapters, max_sequences=32)
    layers = CompiledLayers(num_buckets=0)
    steps = ((2, marking(layers)), (3, layers), (7, layers), (2, layers), (1, layers))
    for number, (num_rows, forward) in enumerate(steps):
        found = logits(harness, forward, num_rows, number)
        assert torch.equal(found, logits(harness, DecoderLayer.forward, num_rows, number))
    num_layers = len(harness.model.layers)
    assert asked == [2] * num_layers + [1] * num_layers


def test_generated_code_for_any_number_of_rows_is_called_without_the_compiler(served, asked):
    """The code of `test_compile.py`, from the same cache."""
    model = served("mixtral")
    harness = Harness(model.model_dir, model.adapters, max_sequences=32)
    layers = CompiledLayers(num_buckets=0)
    for number, (num_rows, forward) in enumerate(((2, marking(layers)), (3, layers), (7, layers))):
        found = logits(harness, forward, num_rows, number)
        assert (found - logits(harness, DecoderLayer.forward, num_rows, number)).abs().max() < 1e-4
    assert asked == [2] * len(harness.model.layers)


def test_no_step_is_held_and_no_layer_outlives_its_engine(served, graphs):
    torch._dynamo.reset()
    model = served("llama")
    for number in range(2):
        harness = Harness(model.model_dir, model.adapters, max_sequences=8)
        layers = CompiledLayers(num_buckets=1)
        logits(harness, layers, 2)
        weights = {id(one) for one in (*harness.model.parameters(), *harness.model.buffers())}
        held = [one for call in layers._calls.values() for one in call.held if one is not None]
        assert held
        assert all(id(one) in weights for one in held)
        assert len(graphs) == 1, "the next engine of this kind shares the code"
        if not number:
            layer = weakref.ref(harness.model.layers[0])
            del harness, layers, held
            gc.collect()
            assert layer() is None


def test_what_is_not_known_to_be_a_weight_stays_with_the_compiler(served, monkeypatch, asked, graphs):
    model = served("llama")
    harness = Harness(model.model_dir, model.adapters, max_sequences=16)
    for layer in harness.model.layers:
        norm = layer.attention_norm
        norm.scale = torch.ones(1)
        monkeypatch.setattr(norm, "forward", lambda x, norm=norm: type(norm).forward(norm, x) * norm.scale)
    layers = CompiledLayers(num_buckets=1)
    for number in range(2):
        logits(harness, layers, 2, number)
    assert asked == [2] * 2 * len(harness.model.layers)
