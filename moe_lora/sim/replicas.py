"""Several simulated instances with caches: a router before them, adapters preloaded, requests that move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from moe_lora.cache.orders import Readiness
from moe_lora.core.errors import ConfigError
from moe_lora.policies.caching import CachingPolicy
from moe_lora.policies.migration import (
    AdapterSize,
    MigrationPlan,
    MigrationProblem,
    ReplicaView,
    RequestView,
)
from moe_lora.policies.routing import Router
from moe_lora.workload.conversations import TurnRequest

from .cached_instance import CachedConfig, CachedInstance
from .cached_requests import CachedRequest
from .events import EventQueue

Planner: TypeAlias = Callable[[MigrationProblem], MigrationPlan]


@dataclass(frozen=True, kw_only=True)
class SimMigration:
    """planner: which requests go where.  Asked every interval_s, when some replica is overloaded: a request
    has waited for longer than queue_s, or less than free_share of its pages is free (the triggers of dLoRA
    section 5.2).  plan_s: how long the planner takes: nothing moves before.  mean_answer_tokens: as requests
    are expected to be long.
    """

    planner: Planner
    interval_s: float = 1.0
    queue_s: float = 0.5
    free_share: float = 0.05
    plan_s: float = 0.005
    mean_answer_tokens: float = 200.0


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """instance: each replica's.  caching, router: make a run's.  preloaded: adapters of each replica that are
    on its device before the first request, as far as there is room.  migration: None: requests stay.
    """

    num_replicas: int
    instance: CachedConfig
    caching: Callable[[], CachingPolicy]
    router: Callable[[], Router]
    preloaded: Sequence[Iterable[str]] = ()
    migration: SimMigration | None = None

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} must be 1 or more")
        if len(self.preloaded) not in (0, self.num_replicas):
            raise ConfigError(
                f"preloaded names {len(self.preloaded)} replicas, there are {self.num_replicas}; name all"
            )


class Replicas:
    """The replicas after every request's last token: `done`, by the order in which they ended.

    num_moves: requests that went to another replica; num_plans: times that the planner was asked.
    Nothing is drawn: equal arguments, equal results.  Raises CapacityError as `simulate_cached` does.
    """

    def __init__(self, config: ReplicasConfig, requests: Sequence[TurnRequest]) -> None:
        self.events = EventQueue()
        self.done: list[CachedRequest] = []
        self.num_moves = self.num_plans = 0
        self._config = config
        self._num_expected = len(requests)
        self._router = config.router()
        self.instances = [
            CachedInstance(
                config.instance,
                config.caching(),
                index=index,
                events=self.events,
                is_over=lambda: len(self.done) == self._num_expected,
                on_done=self.done.append,
            )
            for index in range(config.num_replicas)
        ]
        for instance, names in zip(self.instances, config.preloaded, strict=False):
            self._preload(instance, names)
        self._expect(iter(requests))
        if config.migration is not None:
            self.events.at(config.migration.interval_s, partial(self._look, config.migration))
        self.events.run()

    @property
    def num_steps(self) -> int:
        return sum(instance.num_steps for instance in self.instances)

    @property
    def busy_s(self) -> list[float]:
        """Of each replica, computing."""
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
        if planned is not None:
            self.events.at(planned.arrival_s, partial(self._arrive, planned, requests))

    def _arrive(self, planned: TurnRequest, later: Iterable[TurnRequest]) -> None:
        self._expect(later)
        self._router.choose(_Routed(planned), self.instances).add(CachedRequest(planned))

    def _look(self, migration: SimMigration) -> None:
        """Plan moves if a replica is overloaded, and carry them out when the plan is there."""
        if len(self.done) == self._num_expected:
            return
        now_s = self.events.now_s()
        self.events.at(now_s + migration.interval_s, partial(self._look, migration))
        if any(self._is_overloaded(instance, migration) for instance in self.instances):
            problem = self._problem(migration)
            self.num_plans += 1
            self.events.at(now_s + migration.plan_s, partial(self._move, migration.planner(problem)))

    def _is_overloaded(self, instance: CachedInstance, migration: SimMigration) -> bool:
        now_s = self.events.now_s()
        waits = any(now_s - r.arrival_s > migration.queue_s for r in instance.scheduler.waiting)
        pages = instance.cache.usage()
        used = pages["device_kv_used"] / self._config.instance.num_device_pages
        return waits or 1 - used < migration.free_share

    def _problem(self, migration: SimMigration) -> MigrationProblem:
        config, page_bytes = self._config.instance, self._config.instance.page_bytes
        requests, replicas = [], []
        for instance in self.instances:
            names = [
                name for name in config.adapter_pages if instance.cache.readiness(name) is Readiness.READY
            ]
            replicas.append(
                ReplicaView(instance.index, config.num_device_pages * page_bytes, adapters=frozenset(names))
            )
            unfinished = instance.unfinished
            rows = max(1, min(len(unfinished), config.max_num_seqs))
            token_s = config.time.step_s(rows, 0.0, 0.0, 0.0) / rows
            for request in unfinished:
                so_far = len(request.tokens) - len(request.planned.prompt)
                left = max(1.0, migration.mean_answer_tokens - so_far)
                exec_s = token_s * left
                again_s = request.num_computed / config.time.prefill_tokens_per_s
                requests.append(
                    RequestView(
                        request.planned.index,
                        request.adapter,
                        instance.index,
                        float(len(request.tokens) * config.time.kv_token_bytes),
                        exec_s,
                        1.0 + again_s / exec_s,
                    )
                )
        adapters = [
            AdapterSize(name, float(pages * page_bytes), pages * page_bytes / config.link_bytes_per_s)
            for name, pages in config.adapter_pages.items()
        ]
        return MigrationProblem(replicas, requests, adapters, config.link_bytes_per_s)

    def _move(self, plan: MigrationPlan) -> None:
        """As the plan says, as far as things are still so."""
        where = {
            (request.planned.index, instance.index): request
            for instance in self.instances
            for request in instance.unfinished
        }
        for name, source, target in plan.moves:
            assert isinstance(name, int)
            assert isinstance(source, int)
            assert isinstance(target, int)
            if (name, source) in where:
                self.num_moves += 1
                self.instances[source].take(where[name, source], self._arrives_at(target))

    def _arrives_at(self, target: int) -> Callable[[CachedRequest], None]:
        """It goes on there, once the call that took it is over."""

        def arrive(request: CachedRequest) -> None:
            self.events.at(self.events.now_s(), partial(self.instances[target].add, request))

        return arrive


@dataclass(frozen=True, slots=True)
class _Routed:
    """`policies.routing.RoutedView` of a planned request."""

    planned: TurnRequest

    @property
    def adapter(self) -> str:
        return self.planned.adapter

    @property
    def prompt_tokens(self) -> int:
        return len(self.planned.prompt)
