"""Small real parts for tests of the engine's bookkeeping: no model, a few pages, adapters of one layer."""

from __future__ import annotations

import torch

from moe_lora.adapters.packed import PackedAdapter, PackedLayer
from moe_lora.cache.blocks import BlockManager
from moe_lora.cache.pages import PageAllocator
from moe_lora.core.clock import VirtualClock
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.adapter_version import AdapterVersion
from moe_lora.engine.placement import LocalPlacement
from moe_lora.engine.residency import Residency
from moe_lora.engine.scheduler import Scheduler
from moe_lora.engine.sequence import Sequence
from moe_lora.engine.slot_writer import LocalSlotWriter
from moe_lora.kernels.step import SlotTable

PAGE_BYTES = 64
BLOCK_SIZE = 4


def packed(name: str, num_pages: int = 1, value: float = 1.0) -> PackedAdapter:
    """An adapter of one layer that takes `num_pages` pages, filled with `value`."""
    data = torch.full((num_pages * PAGE_BYTES // 4,), value)
    table = torch.tensor([[0, 4, 1]])
    layer = PackedLayer(data=data, table=table, scale=torch.ones(1))
    return PackedAdapter(
        name=name, layers=(layer,), max_lora_rank=1, nbytes=layer.nbytes, content_hash=name, targets=("o",)
    )


class CountingSlotWriter(LocalSlotWriter):
    """Counts adapters that are kept and not forgotten."""

    def __init__(self, slots: SlotTable, arena: torch.Tensor) -> None:
        super().__init__(slots, arena)
        self.num_kept = 0

    def keep(self, packed: PackedAdapter) -> PackedAdapter:
        self.num_kept += 1
        return super().keep(packed)

    def forget(self, packed: PackedAdapter) -> None:
        self.num_kept -= 1


class Parts:
    """Everything below an `EngineCore`, wired as `build_engine` does."""

    def __init__(
        self,
        *,
        kv_pages: int = 16,
        lora_pages: int = 4,
        max_loras: int = 2,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        starvation_s: float = 5.0,
        shortest_first: bool = False,
    ) -> None:
        num_pages = kv_pages + lora_pages
        self.clock = VirtualClock()
        self.pages = PageAllocator(num_pages)
        self.blocks = BlockManager(self.pages, BLOCK_SIZE, kv_pages, prefix_caching=True)
        self.arena = torch.zeros(num_pages * PAGE_BYTES, dtype=torch.uint8)
        self.slots = SlotTable(max_loras, 1, 1, torch.device("cpu"))
        self.writer = CountingSlotWriter(self.slots, self.arena)
        self.placement = LocalPlacement(self.pages, PAGE_BYTES, self.writer, self.blocks)
        self.residency = Residency(self.placement, self.blocks, self.clock)
        self.scheduler = Scheduler(
            self.blocks,
            self.residency,
            self.clock,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            starvation_s=starvation_s,
            shortest_first=shortest_first,
        )

    def add(self, name: str, prompt: range, adapter: AdapterVersion | None = None) -> Sequence:
        request = GenerateRequest(
            request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(temperature=0.0)
        )
        sequence = Sequence(request, adapter, self.clock.now_s(), 1000, None)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 7) -> dict[str, int]:
        """Schedule and pretend to compute: request id -> tokens computed."""
        plan = self.scheduler.schedule()
        sampling = [item.sequence for item in plan if item.samples]
        for item in plan:
            item.sequence.num_computed += item.num_tokens
            self.blocks.publish(item.sequence.table, item.sequence.tokens, item.sequence.num_computed)
        for sequence in sampling:
            sequence.append(token, self.clock.now_s(), ())
        return {item.sequence.request.request_id: item.num_tokens for item in plan}
