# SPDX-License-Identifier: Apache-2.0
"""Least bytes of a decode step, and this machine's read rate.

Legend: T rows, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from moe_lora.core.shape import ModelShape
from moe_lora.engine.core import EngineCore
from moe_lora.kernels.cpu.library import advise_huge_pages
from moe_lora.kernels.operands import SlotTable, StepTables
from moe_lora.lora.backend import AddTo, LoraBackend, OuterBackend, RoutedBackend
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import RowRouting, Source
from moe_lora.models.causal_lm import CausalLM
from moe_lora.models.linear import ExpertLinear, LoraLinear
from moe_lora.models.quantised_weight import QuantisedWeight

from .engine_runs import EngineRun

_READ_BYTES = 256 << 20
_ROW = 4096


class ReadBandwidth:
    """Reads a buffer larger than the caches, on huge pages, in torch's two fastest ways: as a sum of 64-bit
    integers, and as an fp32 matrix times a vector (1.5 times as fast where the sum keeps too few reads under
    way).
    """

    def __init__(self, num_bytes: int = _READ_BYTES) -> None:
        matrix = torch.empty(num_bytes // 4 // _ROW, _ROW)
        advise_huge_pages(matrix)
        vector, numbers = torch.ones(_ROW), matrix.fill_(1.0).view(torch.int64)
        self._num_bytes = matrix.nbytes
        self._reads = (numbers.sum, lambda: torch.mv(matrix, vector))

    def measure(self, repeats: int = 3) -> float:
        """Bytes per second of the fastest of a few reads."""
        times = []
        for read in self._reads * repeats:
            start_s = time.perf_counter()
            read()
            times.append(time.perf_counter() - start_s)
        return self._num_bytes / min(times)


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one decode step with a single read of everything."""

    weights: int
    kv: int
    adapters: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.adapters

    @property
    def adapter_share(self) -> float:
        """Adapter bytes over the base model's bytes."""
        return self.adapters / (self.weights + self.kv)


@dataclass
class StepRecord(OuterBackend):
    """Records each site's experts."""

    inner: LoraBackend
    step: StepTables | None = None
    token_slots: torch.Tensor | None = None
    expert_ids: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        self.step = step
        self.token_slots = torch.from_numpy(routing.terms_from(Source.LOCAL, 0)["slot"])
        super().begin_step(step, routing)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        if ids is not None:
            self.expert_ids[layer, site] = ids.clone()
        return self.inner.begin(layer, site, x, ids)


@contextmanager
def step_recorded(core: EngineCore) -> Iterator[StepRecord]:
    """Record of the context's last eager step, not of a replayed CUDA graph."""
    context = core._runner._context  # no interface for an engine's past work
    record = StepRecord(context.backend)
    context.backend = record
    try:
        yield record
    finally:
        context.backend = record.inner


def step_bytes(run: EngineRun, shape: ModelShape, itemsize: int) -> StepBytes:
    """Bytes of a decode step of this run, from its rows' experts."""
    with step_recorded(run.core) as record:
        run(1)
    return recorded_bytes(run.core, record, shape, itemsize)


def recorded_bytes(core: EngineCore, record: StepRecord, shape: ModelShape, itemsize: int) -> StepBytes:
    """Bytes of a recorded decode step; of K and V as if no layer had a window."""
    assert record.step is not None
    record.expert_ids = {place: ids.cpu() for place, ids in record.expert_ids.items()}
    kv_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
    return StepBytes(
        weights=_weight_bytes(core._runner._model, record),
        kv=int(record.step.seq_lens.sum()) * kv_token,
        adapters=sum(_adapter_matrices(shape, record, _slots(core)).values()) * itemsize,
    )


def _slots(core: EngineCore) -> SlotTable:
    routed = core._runner._context.backend
    assert isinstance(routed, RoutedBackend)
    backend = routed.backends[Source.LOCAL]
    assert isinstance(backend, LocalBackend)
    return backend._slots


def _weight_bytes(model: CausalLM, record: StepRecord) -> int:
    """Of stored weights, each chosen matrix once."""
    assert record.token_slots is not None
    rows = record.token_slots.numel()
    total = _held_bytes(model.head) + model.embedding[0].nbytes * rows + model.norm.weight.nbytes
    for number, layer in enumerate(model.layers):
        total += 2 * model.norm.weight.nbytes
        for module in layer.modules():
            if isinstance(module, LoraLinear | ExpertLinear):
                ids = record.expert_ids.get((number, module.site))
                held = _held_bytes(module.weight)
                total += held if ids is None else held * ids.unique().numel() // model.spec.shape.num_experts
    return total


def _held_bytes(weight: torch.Tensor | QuantisedWeight) -> int:
    if isinstance(weight, QuantisedWeight):
        return weight.data.nbytes + weight.scale.nbytes
    return weight.nbytes


def _adapter_matrices(shape: ModelShape, record: StepRecord, slots: SlotTable) -> dict[tuple[str, int], int]:
    """Elements of each distinct A and B of the step, by kind and byte offset in the arena."""
    assert record.token_slots is not None
    found: dict[tuple[str, int], int] = {}
    ranks, a_offsets, b_offsets = (held.cpu() for held in (slots.lora_rank, slots.a_offset, slots.b_offset))
    for layer in range(shape.num_layers):
        for number, site in enumerate(shape.sites):
            for slot, expert in _pairs(record.token_slots, record.expert_ids.get((layer, number))):
                for module, width in enumerate(site.out_features):
                    index = (slot, layer, site.entry(module, expert))
                    lora_rank = int(ranks[index])
                    if lora_rank:
                        found["a", int(a_offsets[index])] = lora_rank * site.in_features
                        found["b", int(b_offsets[index])] = lora_rank * width
    return found


def _pairs(token_slots: torch.Tensor, ids: torch.Tensor | None) -> Iterator[tuple[int, int]]:
    """Distinct (slot, expert) of a site; expert 0 at a dense one."""
    experts = torch.zeros_like(token_slots)[:, None] if ids is None else ids
    slots = token_slots[:, None].expand_as(experts)
    pairs = torch.stack([slots.reshape(-1), experts.reshape(-1)], 1).unique(dim=0)
    for slot, expert in pairs.tolist():
        if slot >= 0 and expert >= 0:
            yield slot, expert
