# SPDX-License-Identifier: Apache-2.0
"""A tiny model behind the engine's runner, on the stand-in for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.ranks.exchange import ALONE, Exchanges
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.step_batch import StepBuffer
from moe_lora.engine.step.step_graphs import StepGraphs
from moe_lora.engine.step.step_pieces import HostCalled, StepCapture, between_graphs
from moe_lora.lora.backend import AddTo, LoraBackend, OuterBackend, RoutedBackend
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import Source
from tests.families import ALL_TARGETS, make_adapter, make_checkpoint
from tests.models.harness import BLOCK_SIZE, Harness
from tests.stand_in_device import CUDA, DeviceTensor, Launch, launches, noting, to_device

FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "dbrx")
QUICK = "gpt_oss"
"""Experts, sinks, windows and biases."""
CHANGES = {"phimoe": {"num_hidden_layers": 1}}
"""Of families whose layers are alike."""
Prompts: TypeAlias = list[tuple[int, list[int]]]
PROMPTS: Prompts = [(0, [3, 5]), (-1, [11]), (0, [13])]
"""Slot of the adapter, and the tokens: two steps of these are a prompt, and a token after it."""


def checkpoint_and_adapter(family: str, folder: Path) -> tuple[Path, list[Path]]:
    """A tiny checkpoint of the family and one adapter on all of its sites."""
    base = make_checkpoint(family, folder / "base", seed=0, **CHANGES.get(family, {}))
    return base, [make_adapter(family, base, folder / "adapter", 4, ALL_TARGETS, seed=1, scale=0.5)]


class Recorder:
    """As `step_pieces.CudaRecorder`: what was launched is launched again, with the numbers that it had.

    graphs: launches of each, in the order in which they were recorded.
    """

    def __init__(self) -> None:
        self.graphs: list[list[Launch]] = []
        self._noting = ExitStack()

    @contextmanager
    def session(self, compute):
        with self._noting:
            yield

    def begin(self) -> None:
        self.graphs.append(self._noting.enter_context(launches()))

    def end(self):
        self._noting.close()
        graph = self.graphs[-1]

        def replay() -> None:
            for one in graph:
                one.again()

        return replay


class OnHost(OuterBackend):
    """LoraBackend of the host behind the stand-in: what it would copy to and from a GPU lies in its reach.

    num_begun: how often it had deltas.
    """

    def __init__(self, backend: LoraBackend) -> None:
        super().__init__(backend)
        self.num_begun = 0

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        self._refuse_capture()
        add_to = self.inner.begin(layer, site, x.held.clone(), None if ids is None else ids.held.clone())
        self.num_begun += add_to is not None
        return None if add_to is None else partial(self._add_to, add_to)

    def _add_to(self, add_to: AddTo, y: torch.Tensor) -> None:
        self._refuse_capture()
        add_to(y.held)

    def _refuse_capture(self) -> None:
        assert not noting(), "a graph does not hold what the host does"


class OnDevice:
    """A harness's model, adapters and arena on the stand-in, behind the engine's runner.

    packed: of each slot's adapter, where others compute deltas.  hosts: by source what does, and present:
    see `RoutedBackend`.  sources: of each site.  exchanges: with other ranks, which `announce` tells of what
    this one computes.  graph_settings: of `StepGraphs`, if steps go by graphs.
    """

    def __init__(
        self,
        harness: Harness,
        prompts: Prompts = PROMPTS,
        *,
        packed: Sequence[Any] = (),
        hosts: Mapping[int, OnHost] | None = None,
        present: np.ndarray | None = None,
        sources: Sequence[Source] = (),
        exchanges: Exchanges = ALONE,
        announce: Callable[[Any], None] | None = None,
        **graph_settings,
    ) -> None:
        self.harness = harness
        model, slots = harness.model, harness.slots
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: to_device(one.detach()) for name, one in held.items() if one is not None})
        for name in ("a_offset", "b_offset", "lora_rank", "scale"):
            setattr(slots, name, to_device(getattr(slots, name)))
        self.arena = DeviceTensor(harness.arena)
        shape = model.spec.shape
        sources = sources or [Source.LOCAL] * len(shape.sites)
        self.recorder = Recorder()
        capture = StepCapture(self.recorder)
        cut = {source: HostCalled(host, capture) for source, host in (hosts or {}).items()}
        local = LocalBackend(shape, self.arena, slots)
        backend = RoutedBackend({**cut, Source.LOCAL: local}, present) if cut else local
        context = ExecutionContext(self.arena, harness.layout, backend, between_graphs(exchanges, capture))
        self.graphs = graphs = None
        if graph_settings:
            self.graphs = graphs = StepGraphs(
                StepBuffer(CUDA),
                capture,
                partial(slots.site_ranks, sites=shape.sites),
                places=tuple((int(source), group) for group, source in enumerate(sorted(set(sources)))),
                block_size=BLOCK_SIZE,
                kv_tokens=harness.arena.numel() // harness.layout.page_bytes * BLOCK_SIZE,
                hosts=cut,
                **graph_settings,
            )
        self.runner = ModelRunner(
            *(model, context, CUDA, sources),
            eager=True,
            decode_buckets=(4,),
            announce=announce,
            graphs=graphs,
        )
        given = packed or [
            SimpleNamespace(name=str(slot), layers=(), has_columns=False) for slot in range(slots.num_slots)
        ]
        self.adapters = [
            AdapterVersion(uid=slot, version=0, packed=one, path=None, slot=slot)
            for slot, one in enumerate(given)
        ]
        self.sequences = [
            SimpleNamespace(
                tokens=list(tokens),
                num_computed=0,
                base_tokens=0,
                table=SimpleNamespace(pages=harness.add().pages),
                adapter=None if slot < 0 else self.adapters[slot],
            )
            for slot, tokens in prompts
        ]

    def step(
        self, which: slice = slice(None), *, drawn: bool = False, silent: Container[int] = ()
    ) -> torch.Tensor:
        """Compute what is left of these sequences; logits of their last rows, as values on the host.

        drawn: the host does not know their last tokens, which lie on the device.  silent: of which no logits
        are wanted, by number among these.
        """
        sequences, given = self.sequences[which], None
        tokens = [one.tokens[-1] for one in sequences]
        if drawn:
            given = DeviceTensor(torch.tensor(tokens[::-1]))
            for number, one in enumerate(reversed(sequences)):
                one.tokens[-1] = -1 - number
        plan = [
            SimpleNamespace(
                sequence=one, num_tokens=len(one.tokens) - one.num_computed, samples=number not in silent
            )
            for number, one in enumerate(sequences)
        ]
        logits = self.runner.run(plan, given)
        for one, token in zip(sequences, tokens, strict=True):
            one.tokens[-1] = token
            one.num_computed = len(one.tokens)
            one.tokens.append(29)
        assert isinstance(logits, DeviceTensor), "what is on the host was not computed on the device"
        return logits.held
