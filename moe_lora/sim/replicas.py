# SPDX-License-Identifier: Apache-2.0
"""Simulated instances with a router, preloaded adapters and moves of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from moe_lora.cache.orders import Readiness
from moe_lora.config.front_end import MigrationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.policies.caching.caching import CachingPolicy
from moe_lora.policies.migration.problem import (
    AdapterSize,
    MigrationPlan,
    MigrationProblem,
    ReplicaView,
    RequestView,
)
from moe_lora.policies.migration.triggers import (
    DLoraMigration,
    MoveCost,
    Planner,
    ReplicaPressure,
    cheaper_move,
    move_factor,
)
from moe_lora.policies.routing.routing import Router, listeners
from moe_lora.timing.answer_lengths import AnswerLengths
from moe_lora.timing.host_times import LinkTime
from moe_lora.timing.step_model import Row
from moe_lora.workload.replay_plan import TurnRequest

from .events import EventQueue
from .instance import CachedConfig, CachedInstance
from .lora_server import SimServer, SimServerConfig
from .prefill_first import PrefillConfig, PrefillFirst
from .requests import CachedRequest


@dataclass(frozen=True, kw_only=True)
class SimMigration:
    """planner: None: by migration_solver.  mean_answer_tokens: expected length before any answer."""

    settings: MigrationConfig = field(default_factory=lambda: MigrationConfig(migration="dlora"))
    planner: Planner | None = None
    check_s: float = 0.1
    plan_s: float = 0.02
    mean_answer_tokens: float = 200.0


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """preloaded: adapters on each replica's device at the start, given room.

    migration: None, or off: requests stay.  server: the LoRA Server, with all adapters.  prefill: instances
    for prompts; None: each does both.  prompts: these instances, beside a LoRA Server.
    """

    num_replicas: int
    instance: CachedConfig
    caching: Callable[[], CachingPolicy]
    router: Callable[[], Router]
    preloaded: Sequence[Iterable[str]] = ()
    migration: SimMigration | None = None
    server: SimServerConfig | None = None
    prefill: PrefillConfig | None = None
    prompts: CachedConfig | None = None

    def __post_init__(self) -> None:
        if self.prefill is not None and self.migration is not None:
            raise ConfigError("prefill has moves of its own; leave migration out")
        if (self.prefill is not None and self.server is not None) == (self.prompts is None):
            raise ConfigError("beside a LoRA Server, and only there, give prompt instances of their own")
        if self.server is not None and (
            self.instance.layers is None or any(self.instance.adapter_pages.values())
        ):
            raise ConfigError(
                "beside a LoRA Server give instances layers, whose time has the server's part, and adapters "
                "of 0 pages"
            )
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} must be 1 or more")
        if len(self.preloaded) not in (0, self.num_replicas):
            raise ConfigError(
                f"preloaded names {len(self.preloaded)} replicas, there are {self.num_replicas}; name all"
            )


class Replicas:
    """Runs every request to its last token: `done`, in order of finish.

    Deterministic.  on_done: replaces `done`.  num_moves: by kind: waiting, tokens, KV.  Raises CapacityError
    for a request that never finds room.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        requests: Iterable[TurnRequest],
        on_done: Callable[[CachedRequest], None] | None = None,
    ) -> None:
        self.events = EventQueue()
        self.done: list[CachedRequest] = []
        self.num_moves: Counter[str] = Counter()
        self.policy: DLoraMigration | None = None
        self._moving: set[CachedRequest] = set()
        self._config = config
        self._on_done = on_done or self.done.append
        self._num_left = 0
        self._more_come = True
        self._router = config.router()
        self._listeners = listeners(self._router)
        self.server = None if config.server is None else SimServer(config.server, self.events)
        self.instances = [self._made(index) for index in range(config.num_replicas)]
        for instance in self.instances:
            instance.on_done = self._finish
        self._for_prompts: Sequence[CachedInstance] = self.instances
        self.prefill_first: PrefillFirst | None = None
        if config.prefill is not None:
            self.prefill_first = PrefillFirst(config.prefill, self.events, self._router, self.instances)
            self._for_prompts = self.prefill_first.for_prompts
        for instance, names in zip(self.instances, config.preloaded, strict=False):
            self._preload(instance, names)
        self._expect(iter(requests))
        migration = config.migration
        if migration is not None and migration.settings.migration != "off":
            self.policy = DLoraMigration(migration.settings, migration.planner)
            self._lengths = AnswerLengths(migration.mean_answer_tokens)
            self._steps = config.instance.time.step_model(1.0, 0.0)
            self.events.at(migration.check_s, partial(self._look, migration, self.policy))
        self.events.run()

    def _made(self, index: int) -> CachedInstance:
        config, server = self._config.instance, self.server
        prefill = self._config.prefill
        if self._config.prompts is not None and prefill is not None and index < prefill.num_instances:
            config, server = self._config.prompts, None
        return CachedInstance(
            config,
            self._config.caching(),
            index=index,
            events=self.events,
            is_over=self._is_over,
            server=server,
        )

    @property
    def num_plans(self) -> int:
        """Problems solved."""
        return 0 if self.policy is None else self.policy.num_plans

    @property
    def num_steps(self) -> int:
        return sum(instance.num_steps for instance in self.instances)

    @property
    def busy_s(self) -> list[float]:
        """Compute time of each replica."""
        return [instance.busy_s for instance in self.instances]

    def _preload(self, instance: CachedInstance, names: Iterable[str]) -> None:
        for name in names:
            if instance.cache.hold(name, 0.0) is Readiness.NO_ROOM:
                return
            instance.cache.let_go(name, 0.0)
            instance.load.recent[name] = None
        instance.links.submit(instance.cache.take_orders(), urgent=True)

    def _expect(self, requests: Iterable[TurnRequest]) -> None:
        requests = iter(requests)
        planned = next(requests, None)
        self._more_come = planned is not None
        if planned is not None:
            self.events.at(planned.arrival_s, partial(self._arrive, planned, requests))

    def _is_over(self) -> bool:
        return not self._more_come and not self._num_left

    def _arrive(self, planned: TurnRequest, later: Iterable[TurnRequest]) -> None:
        self._num_left += 1
        self._expect(later)
        request = CachedRequest(planned)
        self._router.choose(request, self._for_prompts).add(request)

    def _finish(self, request: CachedRequest) -> None:
        self._num_left -= 1
        self._on_done(request)
        self._moving.discard(request)
        if self.prefill_first is not None:
            self.prefill_first.end(request)
        for listener in self._listeners:
            listener.stop(request, len(request.planned.answer))
        if self.policy is not None:
            self._lengths.note(request.adapter, len(request.planned.answer))

    def _look(self, migration: SimMigration, policy: DLoraMigration) -> None:
        if self._is_over():
            return
        now_s = self.events.now_s()
        self.events.at(now_s + migration.check_s, partial(self._look, migration, policy))
        if self._moving:
            return
        plan = policy.decide(map(self._pressure, self.instances), partial(self._problem, migration), now_s)
        if plan is not None:
            self.events.at(now_s + migration.plan_s, partial(self._move, plan, migration))

    def _pressure(self, instance: CachedInstance) -> ReplicaPressure:
        now_s = self.events.now_s()
        waits = (now_s - r.arrival_s for r in instance.scheduler.waiting if r.waits.admitted_s is None)
        free_share = 1 - instance.cache.usage()["device_kv_used"] / self._config.instance.num_device_pages
        return ReplicaPressure(instance.index, free_share, max(waits, default=0.0))

    def _problem(self, migration: SimMigration) -> MigrationProblem:
        config, page_bytes = self._config.instance, self._config.instance.page_bytes
        requests, replicas, link = [], [], LinkTime(config.link_bytes_per_s)
        for instance in self.instances:
            ready = [one for one in config.adapter_pages if instance.cache.readiness(one) is Readiness.READY]
            device_bytes = config.num_device_pages * page_bytes
            unfinished = instance.unfinished
            free_seats = config.max_num_seqs - len(unfinished)
            replicas.append(
                ReplicaView(instance.index, device_bytes, adapters=frozenset(ready), free_seats=free_seats)
            )
            rows = max(1, min(len(unfinished), config.max_num_seqs))
            token_s = config.time.step_s(rows, 0.0, 0.0, 0.0) / rows
            requests += [self._view(request, instance.index, token_s, migration) for request in unfinished]
        adapters = [
            AdapterSize(name, float(pages * page_bytes), link.seconds(pages * page_bytes))
            for name, pages in config.adapter_pages.items()
        ]
        affinity_s = migration.settings.migration_affinity_s
        return MigrationProblem(replicas, requests, adapters, config.link_bytes_per_s, affinity_s)

    def _view(
        self, request: CachedRequest, index: int, token_s: float, migration: SimMigration
    ) -> RequestView:
        """token_s: the instance's time per token."""
        num_prompt, num_tokens = len(request.planned.prompt), len(request.tokens)
        left = self._lengths.left(request.adapter, num_tokens - num_prompt, len(request.planned.answer))
        exec_s = token_s * left + request.num_uncomputed / self._config.instance.time.prefill_tokens_per_s
        cost = self._cost(request, migration)
        num_bytes = float(num_tokens * self._config.instance.time.kv_token_bytes)
        factor = move_factor(exec_s, cost, token_s)
        return RequestView(request.planned.index, request.adapter, index, num_bytes, exec_s, factor)

    def _cost(self, request: CachedRequest, migration: SimMigration) -> MoveCost | None:
        if not request.num_computed:
            return None
        num_bytes = request.num_computed * self._config.instance.time.kv_token_bytes
        row = Row(request.adapter, 0, request.num_computed)
        return cheaper_move(row, num_bytes, self._steps, migration.settings.migration_bytes_per_s)

    def _move(self, plan: MigrationPlan, migration: SimMigration) -> None:
        where = {
            (request.planned.index, instance.index): request
            for instance in self.instances
            for request in instance.unfinished
        }
        for name, source, target in plan.moves:
            assert isinstance(name, int)
            assert isinstance(source, int)
            assert isinstance(target, int)
            request = where.get((name, source))
            if request is None or request in self._moving:
                continue
            self._moving.add(request)
            cost = self._cost(request, migration)
            kind = "waiting" if cost is None else cost.kind
            # The source decodes on during a KV copy.
            copy_s = cost.seconds if cost is not None and cost.kind == "kv" else 0.0
            take = partial(self._take, request, source, target, kind)
            self.events.at(self.events.now_s() + copy_s, take)

    def _take(self, request: CachedRequest, source: int, target: int, kind: str) -> None:
        num_computed = request.num_computed if kind == "kv" else 0

        def arrive(request: CachedRequest) -> None:
            self._moving.remove(request)
            self.num_moves[kind] += 1
            request.num_brought = num_computed
            request.unshared &= num_computed > 0
            self.events.at(self.events.now_s(), partial(self.instances[target].add, request))

        if request.num_left:
            self.instances[source].take(request, arrive)
