"""A simulated instance whose pages, adapters and history are kept by the real cache (`cache.unified`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_lora.cache.orders import Namespace
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.errors import CapacityError
from moe_lora.policies.caching import CacheCosts, CachingPolicy
from moe_lora.scheduling.plan import Scheduled
from moe_lora.scheduling.scheduler import Scheduler
from moe_lora.workload.conversations import TurnRequest

from .cached_adapters import CachedAdapters
from .cached_requests import CachedRequest
from .cached_result import CachedResult
from .copy_links import CopyLinks
from .events import EventQueue
from .transformer_time import TransformerTime

STUCK_S = 60.0
"""Time after which a request that nothing else is in the way of will never have room."""
SAMPLE_S = 1.0
"""Time between two looks at what the arenas hold."""

Plan = list[Scheduled[CachedRequest]]
"""The work of one step."""


@dataclass(frozen=True, kw_only=True)
class CachedConfig:
    """One instance.

    adapter_pages: of each adapter, one extent.  block_size: tokens of a page.  link_bytes_per_s: between host
    and device, each way.  tick_s: time between two decisions of the cache ahead of need.  upper, lower: its
    thresholds (`UnifiedCache`).
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
    tick_s: float = 0.1
    upper: float = 0.95
    lower: float = 0.70

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.time.kv_token_bytes

    def costs(self) -> CacheCosts:
        """What the policies are told."""
        return CacheCosts(
            page_bytes=self.page_bytes,
            transfer_bytes_per_s=self.link_bytes_per_s,
            disk_bytes_per_s=self.link_bytes_per_s,
            prefill_tokens_per_s=self.time.prefill_tokens_per_s,
            attention_s_per_token2=self.time.attention_s_per_token2,
            wait_s=self.time.step_s(1, 0.0, 0.0, 0.0),
        )


@dataclass(eq=False)
class _State:
    done: list[CachedRequest] = field(default_factory=list)
    samples: list[Mapping[str, int]] = field(default_factory=list)
    num_steps: int = 0
    last_step_s: float = 0.0
    computing: bool = False
    aborted: bool = False


class CachedInstance:
    """Continuous batching in steps; a request whose bytes are on their way waits alone."""

    def __init__(
        self, config: CachedConfig, policy: CachingPolicy, requests: Sequence[TurnRequest], max_waiting: int
    ) -> None:
        self.events = EventQueue()
        self.state = _State()
        self._config = config
        self._requests = requests
        self._max_waiting = max_waiting
        self.cache = UnifiedCache(
            num_device_pages=config.num_device_pages,
            num_host_pages=config.num_host_pages,
            block_size=config.block_size,
            policy=policy,
            upper=config.upper,
            lower=config.lower,
        )
        for name, pages in config.adapter_pages.items():
            self.cache.add_adapter(name, (pages,), 0.0)
        self.links = CopyLinks(
            self.events, config.link_bytes_per_s, config.page_bytes, self._load_pages, self._copied
        )
        self.scheduler: Scheduler[CachedRequest] = Scheduler(
            self.cache,
            CachedAdapters(self.cache, config.adapter_pages, self.events),
            self.events,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            starvation_s=config.starvation_s,
        )
        self._arrive(0)
        self.events.at(0.0, self._tick)

    def _load_pages(self, namespace: Namespace) -> int:
        assert isinstance(namespace, str)
        return self._config.adapter_pages[namespace]

    @property
    def _over(self) -> bool:
        return self.state.aborted or len(self.state.done) == len(self._requests)

    def _arrive(self, index: int) -> None:
        if index == len(self._requests):
            return
        planned = self._requests[index]

        def come() -> None:
            self._arrive(index + 1)
            self.scheduler.add(CachedRequest(planned))
            self.state.aborted |= len(self.scheduler.waiting) > self._max_waiting
            self._step()

        self.events.at(planned.arrival_s, come)

    def _tick(self) -> None:
        if self._over:
            return
        now_s = self.events.now_s()
        oldest = self.scheduler.oldest
        if oldest is not None and now_s - STUCK_S > max(self.state.last_step_s, oldest.arrival_s):
            index = oldest.planned.index
            raise CapacityError(f"request {index} alone has no room; raise num_device_pages or shorten it")
        if now_s >= len(self.state.samples) * SAMPLE_S:
            self.state.samples.append(self.cache.usage())
        self.cache.tick(now_s, len(self.scheduler.running))
        self.links.submit(self.cache.take_orders(), urgent=False)
        self.events.at(now_s + self._config.tick_s, self._tick)
        self._step()

    def _copied(self, copy_id: int) -> None:
        self.cache.copied(copy_id)
        self._step()

    def _step(self) -> None:
        """Begin a step unless one is under way or there is nothing to compute."""
        if self.state.computing or self._over:
            return
        plan = self.scheduler.schedule()
        now_s = self.events.now_s()
        for request in self.scheduler.loading:
            if request.waits.loading_s == now_s:
                self.links.hurry(request.adapter_uid)
        self.links.submit(self.cache.take_orders(), urgent=True)
        if plan:
            self.state.computing = True
            self.state.num_steps += 1
            self.events.at(now_s + self._step_s(plan), lambda: self._end(plan))

    def _step_s(self, plan: Plan) -> float:
        context = attended = 0.0
        rows = 0
        for item in plan:
            request, num_tokens = item.sequence, item.num_tokens
            rows += num_tokens
            attended += num_tokens * (request.num_computed + num_tokens / 2)
            if num_tokens == 1:
                context += len(request.tokens)
        pages = sum(self._config.adapter_pages[name] for name in {item.sequence.adapter for item in plan})
        return self._config.time.step_s(rows, attended, context, pages * self._config.page_bytes)

    def _end(self, plan: Plan) -> None:
        now_s = self.events.now_s()
        self.state.computing, self.state.last_step_s = False, now_s
        self.scheduler.advance(plan)
        for item in plan:
            request = item.sequence
            if not request.num_uncomputed and request.append(now_s):
                self.scheduler.finish(request)
                self.state.done.append(request)
        self._step()


def simulate_cached(
    config: CachedConfig, policy: CachingPolicy, requests: Sequence[TurnRequest], *, max_waiting: int = 10**9
) -> CachedResult:
    """Every request to its last token.  Nothing is drawn: equal arguments, equal results.

    requests: by arrival; each answer has a token at least.  max_waiting: stop when more wait for room than
    that (far above saturation the rest tells nothing).  Raises CapacityError for a request that never finds
    room.
    """
    instance = CachedInstance(config, policy, requests, max_waiting)
    instance.events.run()
    state = instance.state
    return CachedResult(
        requests=state.done,
        counters=instance.cache.counters,
        samples=state.samples,
        num_preemptions=instance.scheduler.num_preemptions,
        num_steps=state.num_steps,
        copied_s=(instance.links.busy_s[0], instance.links.busy_s[1]),
        end_s=instance.events.now_s(),
        num_device_pages=config.num_device_pages,
        num_host_pages=config.num_host_pages,
        aborted=state.aborted,
    )
