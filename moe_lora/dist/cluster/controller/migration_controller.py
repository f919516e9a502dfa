# SPDX-License-Identifier: Apache-2.0
"""Moves of requests between instances: collect loads, call the policy, send orders.

Source: dLoRA, section 5.2.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.front_end import MigrationConfig
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import EngineDeadError, LastProblem
from moe_lora.core.request import AdapterInfo, EngineStats
from moe_lora.dist.cluster.adapter_calls import ask
from moe_lora.dist.cluster.instances import Instance, InstanceRegistry
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.messages import MoveOrder, RequestLoad
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
    ReplicaPressure,
    cheaper_move,
    move_factor,
)
from moe_lora.timing.answer_lengths import AnswerLengths
from moe_lora.timing.host_times import LinkTime
from moe_lora.timing.step_model import Row, StepModel

from .routes import Routes

logger = logging.getLogger(__name__)

FIRST_TOKEN_S = 0.02
"""Seconds per token before a measurement."""
ORDER_S = 2.0
"""An order without effect for this time counts as refused."""


_ATTEMPT = re.compile(r"~\d+( \(\d+\))?$")


def request_of(name: str) -> str:
    """The front end's id of an engine's request."""
    return _ATTEMPT.sub("", name)


@dataclass(frozen=True)
class Report:
    """Load report of an instance."""

    instance: Instance
    stats: EngineStats
    requests: list[RequestLoad]

    @property
    def pressure(self) -> ReplicaPressure:
        waited_s = [one.waited_s for one in self.requests if one.waited_s is not None and not one.held]
        return ReplicaPressure(self.instance.name, 1 - self.stats.kv_usage, max(waited_s, default=0.0))


class MigrationController:
    """Checks the instances in each migration_interval_s, until cancelled.

    Plans only after the last plan's moves: no request gets two targets and no load counts twice.
    same_layout: KV can move between instances.  num_orders: requested moves so far.
    """

    def __init__(
        self,
        config: MigrationConfig,
        instance_registry: InstanceRegistry,
        *,
        max_num_seqs: int,
        ranks: dict[str, int],
        steps: StepModel | None = None,
        same_layout: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.num_orders = 0
        self.policy = DLoraMigration(config)
        self._config = config
        self._instance_registry = instance_registry
        self._max_num_seqs = max_num_seqs
        self._ranks = ranks
        self._steps = steps
        self._same_layout = same_layout
        self._clock = clock or WallClock()
        self._lengths = AnswerLengths()
        self._seen: dict[str, RequestLoad] = {}
        self._tokens: dict[str, tuple[float, int]] = {}
        self._token_s = FIRST_TOKEN_S
        self._ordered: set[tuple[str, str]] = set()
        self._changed_s = 0.0
        self._problem = LastProblem()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._config.migration_interval_s)
            try:
                await self.step()
                self._problem.over()
            except EngineDeadError:
                continue  # no instance
            except Exception as error:  # requests stay on their instances
                if self._problem.is_new(repr(error)):
                    logger.warning("requests can't be moved: %r", error, exc_info=True)

    async def step(self) -> int:
        """Check the instances; returns the number of requested moves."""
        live = self._instance_registry.undrained
        if len(live) < 2:
            return 0
        answers, _ = await ask(self._instance_registry, live, [_report(one.client) for one in live])
        reports = [Report(instance, *found) for instance, found in answers]
        self._learn(reports)
        under_way = self._moves_under_way(reports)
        pressures = [report.pressure for report in reports]
        if not any(map(self.policy.is_pressed, pressures)):
            self.policy.decide(pressures, lambda: self._problem_of(reports, [], {}), self._clock.now_s())
            return 0
        if under_way:
            return 0
        infos = await reports[0].instance.client.list_adapters()
        kinds: dict[tuple[str, str], str] = {}
        plan = await asyncio.to_thread(
            self.policy.decide,
            pressures,
            lambda: self._problem_of(reports, infos, kinds),
            self._clock.now_s(),
        )
        return 0 if plan is None else await self._pass_on(plan, kinds)

    def _moves_under_way(self, reports: list[Report]) -> bool:
        """True while a request is held, or an ordered move may start."""
        now_s, ordered = self._clock.now_s(), self._ordered
        is_held = any(load.held for report in reports for load in report.requests)
        self._ordered = ordered & {
            (report.instance.name, request_of(load.name))
            for report in reports
            for load in report.requests
            if not load.held
        }
        if is_held or self._ordered != ordered:
            self._changed_s = now_s
        elif now_s - self._changed_s > ORDER_S:
            self.policy.note_failed(
                [
                    (report.instance.name, load.name)
                    for report in reports
                    for load in report.requests
                    if (report.instance.name, request_of(load.name)) in self._ordered
                ],
                now_s,
            )
            self._ordered = set()
        return is_held or bool(self._ordered)

    def _learn(self, reports: list[Report]) -> None:
        now_s = self._clock.now_s()
        loads = [load for report in reports for load in report.requests]
        loads.sort(key=lambda load: not load.held)  # of a held request's two entries the other counts
        seen = {request_of(load.name): load for load in loads}
        for name, load in self._seen.items():
            if name not in seen:
                self._lengths.note(load.adapter, load.num_generated)
        self._lengths.retain(lambda name: self._instance_registry.served_version(name) is not None)
        self._seen = seen
        token_s = []
        for report in reports:
            name, num_tokens = report.instance.name, report.stats.generation_tokens
            before_s, before = self._tokens.get(name, (now_s, num_tokens))
            if num_tokens > before:
                token_s.append((now_s - before_s) / (num_tokens - before))
            self._tokens[name] = now_s, num_tokens
        self._token_s = min(token_s, default=self._token_s)

    def _problem_of(
        self, reports: list[Report], infos: list[AdapterInfo], kinds: dict[tuple[str, str], str]
    ) -> MigrationProblem:
        """The current problem; fills `kinds` with each request's kind of move."""
        config, requests = self._config, []
        sizes = {info.name: info.nbytes for info in infos}
        for report in reports:
            for load in report.requests:
                if load.held or (load.adapter is not None and load.adapter not in sizes):
                    continue  # unloaded meanwhile
                name = report.instance.name, load.name
                requests.append(self._view(report.instance.name, load))
                waits = load.waited_s is not None
                kinds[name] = "tokens" if waits else self._move_of(load).kind
        link = LinkTime(config.migration_bytes_per_s)
        return MigrationProblem(
            [
                ReplicaView(
                    report.instance.name,
                    float(report.stats.device_bytes),
                    adapters=frozenset(report.stats.resident_adapters),
                    free_seats=self._max_num_seqs - len(report.requests),
                )
                for report in reports
            ],
            requests,
            [AdapterSize(name, float(size), link.seconds(size)) for name, size in sizes.items()],
            affinity_s=config.migration_affinity_s,
        )

    def _waits(self, request: Hashable) -> bool:
        _, name = cast("tuple[str, str]", request)
        return self._seen[request_of(name)].waited_s is not None

    def _view(self, replica: str, load: RequestLoad) -> RequestView:
        so_far = load.num_generated
        exec_s = self._token_s * self._lengths.left(load.adapter, so_far, so_far + load.num_left)
        cost = None if load.waited_s is not None else self._move_of(load)
        return RequestView(
            (replica, load.name),
            load.adapter,
            replica,
            float(load.num_bytes),
            exec_s,
            move_factor(exec_s, cost, self._token_s),
        )

    def _move_of(self, load: RequestLoad) -> MoveCost:
        lora_rank = 0 if load.adapter is None else self._ranks.get(load.adapter, 0)
        row = Row(load.adapter, lora_rank, load.num_tokens)
        rate = self._config.migration_bytes_per_s
        return cheaper_move(row, load.num_bytes, self._steps, rate, same_layout=self._same_layout)

    async def _pass_on(self, plan: MigrationPlan, kinds: dict[tuple[str, str], str]) -> int:
        orders: defaultdict[str, list[MoveOrder]] = defaultdict(list)
        for request, source, target in sorted(plan.moves, key=lambda move: not self._waits(move[0])):
            key = cast("tuple[str, str]", request)
            orders[str(source)].append(MoveOrder(key[1], str(target), kinds[key]))
        logger.info(
            "moving %d requests: the slowest instance would take %.3g s instead of %.3g s",
            len(plan.moves),
            plan.objective,
            plan.objective_before,
        )
        sources = [one for one in self._instance_registry.live if one.name in orders]
        calls = [one.client.call("pass_on", orders[one.name]) for one in sources]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        self._ordered = {(one.name, request_of(order.name)) for one in sources for order in orders[one.name]}
        self._changed_s = self._clock.now_s()
        num_orders = sum(answer for answer in answers if isinstance(answer, int))
        self.num_orders += num_orders
        return num_orders


async def _report(client: EngineClient) -> tuple[EngineStats, list[RequestLoad]]:
    stats, loads = await asyncio.gather(client.stats(), client.call("request_loads"))
    return stats, loads


def make_migration_controller(
    cluster: ClusterConfig, routes: Routes, instance_registry: InstanceRegistry
) -> MigrationController:
    """The controller by the file's settings."""
    return MigrationController(
        cluster.front_end,
        instance_registry,
        max_num_seqs=cluster.engine.max_num_seqs,
        ranks=routes.ranks,
        steps=routes.steps,
        same_layout=cluster.engine.num_ranks == 1,
    )
