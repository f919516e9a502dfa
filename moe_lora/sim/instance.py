# SPDX-License-Identifier: Apache-2.0
"""A simulated instance with the real cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.cache.orders import Namespace
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.policies.admission.host_start import HostLoads, HostStart
from moe_lora.policies.caching.caching import CachingPolicy
from moe_lora.policies.routing.routing import InstanceLoad
from moe_lora.scheduling.scheduler import Scheduler, StepLimits
from moe_lora.scheduling.views import Scheduled
from moe_lora.timing.host_times import CacheCosts, ColdAdapter
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import TurnRequest
from moe_lora.workload.statistics import mean, percentile

from .adapters import CachedAdapters, CopyLinks, LoraWork, SimMergedWeights, SimMerging
from .events import EventQueue
from .lora_server import SimLeases, SimServer
from .requests import PARTS, CachedRequest, LayerTime, step_rows

STUCK_S = 60.0
"""Longest wait without an obstacle; then a request never finds room."""
SAMPLE_S = 1.0

Plan = list[Scheduled[CachedRequest]]


@dataclass(frozen=True, kw_only=True)
class CachedConfig:
    """One instance.

    adapter_pages: of each adapter, one extent.  link_bytes_per_s: each way.  merging: None: unmerged.
    tick_s: period of prefetches.  upper, lower, max_kv_pages, max_adapters: as `UnifiedCache`.  host: workers
    for prompts of loading adapters, or None.  layers: time of one of num_layers equal layers; None: steps
    follow `time`.
    """

    time: TransformerTime
    adapter_pages: Mapping[str, int]
    num_device_pages: int
    num_host_pages: int
    link_bytes_per_s: float
    block_size: int = 32
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    starvation_s: float = 5.0
    merging: SimMerging | None = None
    tick_s: float = 0.1
    upper: float = 0.95
    lower: float = 0.70
    host: HostStart | None = None
    lora_ranks: Mapping[str, int] = field(default_factory=dict)
    max_kv_pages: int | None = None
    max_adapters: int | None = None
    max_waiting: int = 10**9
    layers: LayerTime | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.layers is not None and (self.merging is not None or self.host is not None):
            raise ConfigError("layers has no time of merges or host workers; leave merging and host out")

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.time.kv_token_bytes

    def costs(self) -> CacheCosts:
        return CacheCosts(
            page_bytes=self.page_bytes,
            transfer_bytes_per_s=self.link_bytes_per_s,
            disk_bytes_per_s=self.link_bytes_per_s,
            prefill_tokens_per_s=self.time.prefill_tokens_per_s,
            attention_s_per_token2=self.time.attention_s_per_token2,
            wait_s=self.time.step_s(1, 0.0, 0.0, 0.0),
        )


def _cache(config: CachedConfig, policy: CachingPolicy) -> UnifiedCache:
    cache = UnifiedCache(
        num_device_pages=config.num_device_pages,
        num_host_pages=config.num_host_pages,
        block_size=config.block_size,
        policy=policy,
        max_kv_pages=config.max_kv_pages,
        max_adapters=config.max_adapters,
        upper=config.upper,
        lower=config.lower,
    )
    for name, pages in config.adapter_pages.items():
        cache.add_adapter(name, (pages,), 0.0)
    return cache


class CachedInstance:
    """Continuous batching in steps; a loading request waits alone.

    An `InstanceView`.  is_over: True at the run's end; None: once all `requests` are done.  on_done: called
    with finished requests, by default adds to `done`.  samples: `UnifiedCache.usage` every second.
    """

    on_prompt_step: Callable[[CachedRequest], None] | None = None
    """Called after steps before a prompt's last."""

    def __init__(
        self,
        config: CachedConfig,
        policy: CachingPolicy,
        requests: Sequence[TurnRequest] = (),
        *,
        index: int = 0,
        events: EventQueue | None = None,
        is_over: Callable[[], bool] | None = None,
        server: SimServer | None = None,
    ) -> None:
        self.index = index
        self.events = events or EventQueue()
        self.load = InstanceLoad()
        self.done: list[CachedRequest] = []
        self.samples: list[Mapping[str, int]] = []
        self.num_steps, self.busy_s, self.aborted = 0, 0.0, False
        self._computing: dict[CachedRequest, None] = {}
        self._last_step_s = 0.0
        self._config = config
        self._requests = requests
        self._is_over = is_over or (lambda: len(self.done) == len(requests))
        self.on_done: Callable[[CachedRequest], None] = self.done.append
        self.on_first_token: Callable[[CachedRequest], None] | None = None
        self._received: dict[CachedRequest, Callable[[CachedRequest, bool], None]] = {}
        self._outstanding: int | None = None
        self._leaving: dict[CachedRequest, Callable[[], None]] = {}
        self.cache = _cache(config, policy)
        self.links = CopyLinks(
            self.events, config.link_bytes_per_s, config.page_bytes, self._load_pages, self._copied
        )
        host = config.host
        self._host_loads = None if host is None else HostLoads(host, config.max_num_batched_tokens)
        self.num_host_tokens = 0
        self.leases: SimLeases | None = None
        adapters: CachedAdapters | SimLeases
        if server is None:
            adapters = CachedAdapters(
                self.cache, config.adapter_pages, self.events, self._host_loads, self._cold_adapter
            )
        else:
            adapters = self.leases = server.leases(index, self.cache, self._step)
        self.scheduler: Scheduler[CachedRequest] = Scheduler(
            self.cache,
            adapters,
            self.events,
            StepLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                starvation_s=config.starvation_s,
                max_host_tokens=0 if host is None else host.tokens_per_step(config.max_num_batched_tokens),
            ),
        )
        self.weights = (
            SimMergedWeights(config.merging, adapters, config.max_num_seqs, self.events)
            if config.merging is not None
            else None
        )
        self._arrive(0)
        self.events.at(self.events.now_s(), self._tick)

    @property
    def unfinished(self) -> list[CachedRequest]:
        """In FCFS order: running, loading, waiting."""
        scheduler = self.scheduler
        return [*scheduler.running, *scheduler.loading, *scheduler.waiting]

    @property
    def outstanding_tokens(self) -> int:
        if self._outstanding is None:
            self._outstanding = sum(one.num_uncomputed + one.num_left for one in self.unfinished)
        return self._outstanding

    @property
    def has_spare_seat(self) -> bool:
        """True if a further request leaves a seat (`Scheduler.is_full`)."""
        return len(self.unfinished) + 1 < max(2, self._config.max_num_seqs)

    def add(self, request: CachedRequest) -> None:
        """Queue a new or moved request."""
        self._outstanding = None
        self.load.add(request.adapter, request.num_uncomputed)
        self.scheduler.add(request)
        self.aborted |= len(self.scheduler.waiting) > self._config.max_waiting
        self._step()

    def take(self, request: CachedRequest, on_taken: Callable[[CachedRequest], None]) -> None:
        """Release an unfinished request before its next step; then call on_taken."""
        if request in self._computing:
            self._leaving[request] = partial(self.take, request, on_taken)
            return
        self._outstanding = None
        self.scheduler.finish(request)
        self.load.end(request.adapter, request.load_tokens, started=request.has_started)
        request.start_over()
        on_taken(request)

    def hold(self, request: CachedRequest, on_held: Callable[[], None]) -> None:
        """Stop an unfinished request before its next step; then call on_held."""
        if request in self._computing:
            self._leaving[request] = partial(self.hold, request, on_held)
            return
        request.held = True
        on_held()

    def receive(
        self, request: CachedRequest, on_ready: Callable[[CachedRequest, bool], None]
    ) -> CachedRequest:
        """Queue a request before its KV.  on_ready: called with this request, and True if KV can come."""
        moved = request.continued()
        self._received[moved] = on_ready
        self.add(moved)
        return moved

    def remove(self, request: CachedRequest, *, is_ready: bool = False) -> bool:
        """Drop a received request; False if ready, unless is_ready."""
        if self._received.pop(request, None) is None and not is_ready:
            return False
        self.release(request)
        return True

    def start_received(self, request: CachedRequest, num_kv: int, source: CachedRequest) -> None:
        """Continue a ready request, with KV of num_kv tokens, as at the source."""
        request.follow(source)
        if request.awaits_kv:
            request.table.num_matched = num_kv
        request.awaits_kv = False
        self.resume(request)

    def resume(self, request: CachedRequest) -> None:
        """Continue a held request."""
        request.held = False
        self._step()

    def release(self, request: CachedRequest) -> None:
        """Drop a request that continues elsewhere."""
        self.take(request, lambda _: self._step())

    def _call_ready(self) -> None:
        """A ready request has pages, or its tokens if pages were lost (`engine.moving`)."""
        for request in list(self._received):
            if request.awaits_kv:
                has_adapter = request in self.scheduler.loading and request.waits.adapter_s is not None
                ready = has_adapter and self.scheduler.reserve(request, len(request.tokens))
            else:
                ready = request.num_uncomputed == 1 and request in self.scheduler.running
            if ready:
                self._received.pop(request)(request, request.awaits_kv)

    def _cold_adapter(self, name: str) -> ColdAdapter:
        num_bytes = self._config.adapter_pages[name] * self._config.page_bytes
        return ColdAdapter(lora_rank=self._config.lora_ranks.get(name, 1), num_bytes=num_bytes)

    def _load_pages(self, namespace: Namespace) -> int:
        assert isinstance(namespace, str)
        return self._config.adapter_pages[namespace]

    @property
    def _over(self) -> bool:
        return self.aborted or self._is_over()

    def _arrive(self, index: int) -> None:
        if index == len(self._requests):
            return
        planned = self._requests[index]

        def come() -> None:
            self._arrive(index + 1)
            self.add(CachedRequest(planned))

        self.events.at(planned.arrival_s, come)

    def _tick(self) -> None:
        if self._over:
            return
        now_s = self.events.now_s()
        oldest = self.scheduler.oldest
        if oldest is not None and now_s - STUCK_S > max(self._last_step_s, oldest.arrival_s):
            index = oldest.planned.index
            raise CapacityError(f"request {index} alone has no room; raise num_device_pages or shorten it")
        if now_s >= len(self.samples) * SAMPLE_S:
            self.samples.append(self.cache.usage())
        self.cache.tick(now_s, len(self.scheduler.running))
        self.links.submit(self.cache.take_orders(), urgent=False)
        self.events.at(now_s + self._config.tick_s, self._tick)
        self._step()

    def _copied(self, copy_id: int) -> None:
        self.cache.copied(copy_id)
        self._step()

    def _step(self) -> None:
        if self._computing or self._over:
            return
        self._outstanding = None
        plan = self.scheduler.schedule(self._may_compute())
        self.load.held_back = self.scheduler.held_back and bool(self.scheduler.waiting)
        now_s = self.events.now_s()
        for request in self.scheduler.loading:
            if request.waits.loading_s == now_s:
                self.links.hurry(request.adapter_uid)
        if self._received:
            self._call_ready()
        self.links.submit(self.cache.take_orders(), urgent=True)
        if plan:
            self._computing = {item.sequence: None for item in plan}
            self.num_steps += 1
            self.busy_s += self._compute(plan)
        elif self.leases is not None:
            self.leases.rest()

    def _compute(self, plan: Plan) -> float:
        """Schedule the step's end; returns the seconds of its work."""
        layers, end = self._config.layers, partial(self._end, plan)
        if layers is None:
            step_s = self._step_s(plan)
        else:
            rows = step_rows(plan)
            layer_s, work_s = layers(rows)
            if self.leases is not None:
                return self.leases.run_layers(rows.adapters, layer_s, work_s, end)
            step_s = self._config.num_layers * layer_s
        self.events.at(self.events.now_s() + step_s, end)
        return step_s

    def _may_compute(self) -> frozenset[Hashable] | None:
        requests = self.unfinished
        if self.weights is None or not requests:
            return None
        return self.weights.decide(requests, held_back=self.scheduler.held_back)

    def _step_s(self, plan: Plan) -> float:
        time = self._config.time
        context = attended = 0.0
        rows: Counter[str | None] = Counter()
        weighed: dict[str | None, float] = {}
        adapters: dict[str, float] = {}
        for item in plan:
            request = item.sequence
            num_tokens = item.num_tokens - min(
                item.num_tokens, max(0, request.num_brought - request.num_computed)
            )
            rows[request.adapter] += num_tokens
            attended += num_tokens * (request.num_computed + num_tokens / 2)
            if num_tokens == 1:
                context += len(request.tokens)
            weight = 1.0 if num_tokens == 1 else num_tokens * time.prompt_delta
            weighed[request.adapter] = weighed.get(request.adapter, 0.0) + weight
            if request.adapter is not None:
                adapters[request.adapter] = 1.0
        lora = LoraWork(sum(weighed[name] for name in adapters), adapters)
        if self.weights is not None:
            lora = self.weights.lora_work(weighed)
        pages = sum(self._config.adapter_pages[name] * share for name, share in lora.adapters.items())
        adapter_bytes = pages * self._config.page_bytes
        step_s = time.step_s(sum(rows.values()), attended, context, adapter_bytes, lora.rows)
        if self.weights is not None:
            step_s += self.weights.took(rows, step_s)
            self.weights.keep_apart(item.sequence for item in plan)
        return step_s + self._host_extra_s(plan)

    def _host_extra_s(self, plan: Plan) -> float:
        cold = [item for item in plan if item.sequence.cold_tokens]
        if self._host_loads is None or not cold:
            return 0.0
        total, now_s = sum(item.num_tokens for item in cold), self.events.now_s()
        self.num_host_tokens += total
        return max(
            self._host_loads.extra_s(item.sequence.adapter, item.num_tokens, total - item.num_tokens, now_s)
            for item in cold
        )

    def _end(self, plan: Plan) -> None:
        now_s = self.events.now_s()
        self._outstanding = None
        self._computing, self._last_step_s = {}, now_s
        self.scheduler.advance(plan)
        for item in plan:
            request = item.sequence
            if request.num_uncomputed:
                if self.on_prompt_step is not None and not request.has_started and request.num_left > 1:
                    self.on_prompt_step(request)
                continue
            request.num_brought = 0
            if request.append(now_s):
                self.scheduler.finish(request)
                self.load.end(request.adapter, request.load_tokens, started=request.has_started)
                self.on_done(request)
            elif not request.has_started:
                request.has_started = True
                self.load.start(request.adapter, request.load_tokens)
                if self.on_first_token is not None:
                    request.held = True
                    self.on_first_token(request)
        leaving, self._leaving = self._leaving, {}
        for request, leave in leaving.items():
            if request.num_left:
                leave()
        self._step()

    def summary(self, since_s: float = 0.0) -> dict[str, Any]:
        """Means over the requests with arrival >= since_s (ms), shares over the whole run.

        ttft = queue + adapter_cold + history_cold + prefill.  invalid_kv_share: device KV without its
        adapter, mean over samples.
        """
        judged = [request for request in self.done if request.arrival_s >= since_s]
        ttft_ms = _milliseconds(judged, "ttft_s")
        looks = [look for second, look in enumerate(self.samples) if second >= since_s]
        num_device_pages, num_host_pages = self._config.num_device_pages, max(1, self._config.num_host_pages)
        counters, end_s = self.cache.counters, self.events.now_s()
        num_acquires = counters.adapter_hits + counters.adapter_misses
        return {
            "num_requests": len(judged),
            "ttft_ms": mean(ttft_ms),
            "p99_ttft_ms": percentile(ttft_ms, 99),
            **{f"{part}_ms": mean(_milliseconds(judged, f"{part}_s")) for part in PARTS},
            "tpot_ms": mean(_milliseconds(judged, "tpot_s")),
            "adapter_hit_rate": _share(counters.adapter_hits, num_acquires),
            "kv_device_hit_rate": _share(counters.kv_device_hit_tokens, counters.kv_query_tokens),
            "kv_host_hit_rate": _share(counters.kv_host_hit_tokens, counters.kv_query_tokens),
            "invalid_kv_share": mean(
                [_share(look["device_kv_invalid"], look["device_kv"]) or 0.0 for look in looks]
            ),
            "device_usage": mean([1 - look["device_free"] / num_device_pages for look in looks]),
            "device_adapter_usage": mean([look["device_adapters"] / num_device_pages for look in looks]),
            "host_usage": mean([1 - look["host_free"] / num_host_pages for look in looks]),
            "link_in_busy": self.links.busy_s[0] / end_s,
            "link_out_busy": self.links.busy_s[1] / end_s,
            "num_preemptions": self.scheduler.num_preemptions,
            "aborted": self.aborted,
        }


def _milliseconds(requests: Sequence[CachedRequest], name: str) -> NDArray[np.float64]:

    values = np.array([getattr(request, name) for request in requests], dtype=np.float64)
    return values[~np.isnan(values)] * 1e3


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
