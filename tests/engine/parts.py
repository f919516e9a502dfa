# SPDX-License-Identifier: Apache-2.0
"""Small real parts for tests of the engine's bookkeeping: no model, a few pages, adapters of one layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.packed import PackedAdapter, PackedLayer
from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.adapters.adapter_store import AdapterStore, AdapterVersion, ShardSizes
from moe_lora.engine.adapters.copies import Arenas, RankCopier, Steps
from moe_lora.engine.adapters.leased_adapters import LeasedAdapters
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.engine.adapters.transfers import Transfers
from moe_lora.engine.arena_size import ArenaSize, caching_policy
from moe_lora.engine.ranks.followers import Followers
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.operands import SlotTable
from moe_lora.policies.admission.host_start import HostLoads
from moe_lora.scheduling.scheduler import Scheduler, StepLimits
from moe_lora.scheduling.views import RequestQueue
from moe_lora.scheduling.views import shortest_first as shortest_first_order
from tests.virtual_clock import VirtualClock

PAGE_BYTES = 64
BLOCK_SIZE = 4


def packed(name: str, num_pages: int = 1, value: float = 1.0) -> PackedAdapter:
    """An adapter of one layer that takes `num_pages` pages, filled with `value`."""
    data = torch.full((num_pages * PAGE_BYTES // 4,), value)
    table = torch.tensor([[0, 0, 1]])
    layer = PackedLayer(data=data, table=table, scale=torch.ones(1))
    return PackedAdapter(
        name=name,
        layers=(layer,),
        max_lora_rank=1,
        nbytes=layer.nbytes,
        content_hash=f"{name} {num_pages} {value}",
        targets=("o",),
    )


class HeldMover:
    """A `Mover` without a thread: copies are done when the test says so."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._orders: deque[tuple[int, Steps]] = deque()
        self._done: list[tuple[int, Exception | None]] = []
        self.num_broken = 0
        self._on_done = on_done

    def submit(self, number: int, steps: Steps) -> None:
        self._orders.append((number, steps))

    def work(self, num_orders: int = 1_000_000) -> None:
        """Do this many of the copies."""
        for _ in range(min(num_orders, len(self._orders))):
            number, steps = self._orders.popleft()
            broken, self.num_broken = self.num_broken > 0, max(0, self.num_broken - 1)
            if not broken:
                deque(steps, maxlen=0)
            self._done.append((number, OSError("the disk is gone") if broken else None))
            self._on_done()

    def finished(self) -> list[tuple[int, Exception | None]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._orders.clear()


class PromptManager(AdapterManager):
    """Adapters are there as soon as they are asked for."""

    bring_now: Callable[[], None]

    def _hold(self, adapter: AdapterVersion, *, again: bool, num_tokens: int = 1) -> Readiness:
        readiness = super()._hold(adapter, again=again, num_tokens=num_tokens)
        self.bring_now()
        return readiness if readiness is Readiness.NO_ROOM else self.readiness(adapter)


class Parts:
    """Everything below an `EngineCore`, wired as `build_engine` does.

    room_pages: what adapters may take beside one request; None: all but a page.  prompt: adapters are there
    as soon as they are asked for; else copies are done when `mover.work` is called.  host_loads: host workers
    compute prompts when it says so, at most host_tokens in a step beside others.
    """

    def __init__(
        self,
        *,
        num_pages: int = 20,
        num_host_pages: int = 0,
        kv_pages: int | None = None,
        room_pages: int | None = None,
        max_loras: int = 2,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        starvation_s: float = 5.0,
        shortest_first: bool = False,
        policy: str = "fastlibra",
        prompt: bool = True,
        clock: VirtualClock | None = None,
        leases: LeasedAdapters | None = None,
        host_loads: HostLoads | None = None,
        host_tokens: int = 0,
    ) -> None:
        self.clock = clock or VirtualClock()
        room_pages = num_pages - 1 if room_pages is None else room_pages
        size = ArenaSize(
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            max_kv_pages=kv_pages or num_pages,
            request_pages=num_pages - room_pages,
            adapter_pages=min(3, room_pages),
        )
        config = EngineConfig(model_dir="", cache_policy=policy, kv_cache_gb=kv_pages)
        self.cache = UnifiedCache(
            num_device_pages=num_pages,
            num_host_pages=num_host_pages,
            block_size=BLOCK_SIZE,
            policy=caching_policy(config, size, PAGE_BYTES),
            max_kv_pages=kv_pages,
            max_adapters=max_loras,
        )
        self.arena = torch.zeros(num_pages * PAGE_BYTES, dtype=torch.uint8)
        self.host_arena = torch.zeros(num_host_pages * PAGE_BYTES, dtype=torch.uint8)
        self.slots = SlotTable(max_loras, 1, 1, torch.device("cpu"))
        self.kept = AdapterStore(host=SimpleNamespace() if host_loads else None) if leases is None else leases
        whole = np.ones(1, dtype=bool)
        shape = SimpleNamespace(num_layers=1)
        arenas = Arenas(self.arena, self.host_arena, PAGE_BYTES)
        self.manager = (PromptManager if prompt else AdapterManager)(
            self.cache,
            self.kept,
            ShardSizes(shape, PAGE_BYTES, [whole]),
            AdapterContents(shape, torch.float32),
            self.clock,
            num_pages=room_pages,
            host_loads=host_loads,
        )
        self.transfers = Transfers(
            self.cache,
            self.manager,
            RankCopier(arenas, self.slots, shape, whole, self.kept.find),
            self.clock,
            make_mover=self._make_mover,
            interval_s=0.1,
            followers=Followers(),
        )
        self.manager.bring_now = self.move
        self.scheduler = Scheduler(
            self.cache,
            self.manager,
            self.clock,
            StepLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                starvation_s=starvation_s,
                max_host_tokens=host_tokens,
            ),
            queue=RequestQueue(shortest_first_order) if shortest_first else None,
        )

    def _make_mover(self, on_done: Callable[[], None]) -> HeldMover:
        self.mover = HeldMover(on_done)
        return self.mover

    def break_copies(self, number: int) -> None:
        """Have the next so many copies fail."""
        self.mover.num_broken = number

    def move(self) -> None:
        """Do all copies that were ordered."""
        self.transfers.send()
        self.mover.work()
        self.transfers.settle()

    @property
    def num_free(self) -> int:
        return self.cache.usage()["device_free"]

    def acquire(self, adapter: AdapterVersion) -> bool:
        """Whether the adapter is there for a request now."""
        self.manager.begin_round()
        return self.manager.acquire(adapter) is Readiness.READY

    def add(
        self,
        name: str,
        prompt: range,
        adapter: AdapterVersion | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> Sequence:
        request = GenerateRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            tenant=tenant,
            priority=priority,
            cache_salt=tenant,
        )
        sequence = Sequence(request, adapter, self.clock.now_s(), 1000, None)
        self.scheduler.add(sequence)
        return sequence

    def _check_adapter(self, sequence: Sequence) -> None:
        """The slot of a sequence that computes leads to its adapter's bytes, if it has any here."""
        adapter = sequence.adapter
        if adapter is None or not adapter.packed.nbytes or sequence.cold_tokens:
            return
        assert adapter.slot is not None
        assert self.slots.lora_rank[adapter.slot, 0, 0] == 1
        data, start = adapter.packed.layers[0].data, int(self.slots.a_offset[adapter.slot, 0, 0])
        place = self.arena[start : start + data.nbytes]
        assert place.view(torch.float32).equal(data), "another adapter's bytes, or none"

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Stand-in for KV: 16 bytes a token that tell its namespace, its tenant, and all tokens before it.
        What the sequence builds on must be there.
        """
        cells = self.arena.view(torch.int64).view(-1, BLOCK_SIZE, PAGE_BYTES // BLOCK_SIZE // 8)
        uid = -1 if sequence.adapter_uid is None else sequence.adapter_uid
        for position in range(sequence.num_computed + num_tokens):
            cell = cells[sequence.table.pages[position // BLOCK_SIZE], position % BLOCK_SIZE]
            kv = torch.tensor([uid, hash((sequence.cache_salt, *sequence.tokens[: position + 1]))])
            if position < sequence.num_computed:
                assert cell.equal(kv), f"KV of position {position} is not that of {sequence.tokens}"
            else:
                cell.copy_(kv)

    def step(self, token: int = 7) -> dict[str, int]:
        """Schedule and pretend to compute: request id -> tokens computed."""
        self.transfers.settle()
        self.manager.bring_pinned()
        self.transfers.tick(len(self.scheduler.running))
        plan = self.scheduler.schedule()
        self.transfers.send()
        sampling = [item.sequence for item in plan if item.samples]
        now_s = self.clock.now_s()
        for item in plan:
            self._check_adapter(item.sequence)
            self._compute(item.sequence, item.num_tokens)
        self.scheduler.advance(plan)
        for sequence in sampling:
            sequence.append(token, now_s, ())
        return {item.sequence.request.request_id: item.num_tokens for item in plan}
