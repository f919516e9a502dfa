"""A tiny model behind the engine's runner, on the stand-in for a CUDA device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import torch

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.execution_context import ExecutionContext
from moe_lora.engine.runner import ModelRunner
from moe_lora.engine.step_buffer import StepBuffer
from moe_lora.engine.step_graphs import StepGraphs
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import Source
from tests.families import ALL_TARGETS, make_adapter, make_checkpoint
from tests.models.harness import BLOCK_SIZE, Harness
from tests.stand_in_device import CUDA, DeviceTensor, launches, to_device

FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "dbrx")
QUICK = "gpt_oss"
"""Experts, sinks, windows and biases."""
Prompts: TypeAlias = list[tuple[int, list[int]]]
PROMPTS: Prompts = [(0, [3, 5]), (-1, [11]), (0, [13])]
"""Slot of the adapter, and the tokens: two steps of these are a prompt, and a token after it."""


def checkpoint_and_adapter(family: str, folder: Path) -> tuple[Path, list[Path]]:
    """A tiny checkpoint of the family and one adapter on all of its sites."""
    base = make_checkpoint(family, folder / "base", seed=0)
    return base, [make_adapter(family, base, folder / "adapter", 4, ALL_TARGETS, seed=1, scale=0.5)]


def capture(compute):
    """As `step_graphs.CudaCapture`: what was launched is launched again, with the numbers that it had."""
    with launches() as noted:
        out = compute()

    def replay() -> None:
        for one in noted:
            one.again()

    return replay, out


class OnDevice:
    """A harness's model, adapters and arena on the stand-in, behind the engine's runner.

    graph_settings: of `StepGraphs`, if steps go by graphs.
    """

    def __init__(self, harness: Harness, prompts: Prompts = PROMPTS, **graph_settings) -> None:
        self.harness = harness
        model, slots = harness.model, harness.slots
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: to_device(one.detach()) for name, one in held.items() if one is not None})
        for name in ("a_offset", "b_offset", "lora_rank", "scale"):
            setattr(slots, name, to_device(getattr(slots, name)))
        self.arena = DeviceTensor(harness.arena)
        shape = model.spec.shape
        context = ExecutionContext(self.arena, harness.layout, LocalBackend(shape, self.arena, slots))
        sources = [Source.LOCAL] * len(shape.sites)
        self.graphs = graphs = None
        if graph_settings:
            self.graphs = graphs = StepGraphs(
                StepBuffer(CUDA),
                capture,
                partial(slots.site_ranks, sites=shape.sites),
                places=((int(Source.LOCAL), 0),),
                block_size=BLOCK_SIZE,
                **graph_settings,
            )
        self.runner = ModelRunner(
            model, context, CUDA, sources, eager=True, decode_buckets=(4,), graphs=graphs
        )
        self._adapters = [
            AdapterVersion(uid=slot, version=0, packed=SimpleNamespace(name=str(slot)), path=None, slot=slot)
            for slot in range(slots.num_slots)
        ]
        self.sequences = [
            SimpleNamespace(
                tokens=list(tokens),
                num_computed=0,
                table=SimpleNamespace(pages=harness.add().pages),
                adapter=None if slot < 0 else self._adapters[slot],
            )
            for slot, tokens in prompts
        ]

    def step(self, which: slice = slice(None), *, drawn: bool = False) -> torch.Tensor:
        """Compute what is left of these sequences; logits of their last rows, as values on the host.

        drawn: the host does not know their last tokens, which lie on the device.
        """
        sequences, given = self.sequences[which], None
        tokens = [one.tokens[-1] for one in sequences]
        if drawn:
            given = DeviceTensor(torch.tensor(tokens[::-1]))
            for number, one in enumerate(reversed(sequences)):
                one.tokens[-1] = -1 - number
        plan = [
            SimpleNamespace(sequence=one, num_tokens=len(one.tokens) - one.num_computed, samples=True)
            for one in sequences
        ]
        logits = self.runner.run(plan, given)
        for one, token in zip(sequences, tokens, strict=True):
            one.tokens[-1] = token
            one.num_computed = len(one.tokens)
            one.tokens.append(29)
        assert isinstance(logits, DeviceTensor), "what is on the host was not computed on the device"
        return logits.held
