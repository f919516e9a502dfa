# SPDX-License-Identifier: Apache-2.0
"""Builds the routing of requests from settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lora.config import EngineConfig, RoutingConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.cluster.instances import Instance
from moe_lora.policies.routing.routing import LeastOutstanding, Router

if TYPE_CHECKING:
    from moe_lora.dist.cluster.pool.pool import FleetPool
    from moe_lora.dist.cluster.routing_client import FleetClient
    from moe_lora.policies.routing.demand import DemandMeter
    from moe_lora.policies.routing.model_routing import CostModel
    from moe_lora.policies.routing.routers import PhiRouting
    from moe_lora.timing.step_model import StepModel

    from .placement_controller import PlacementController


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """A router, with meters and ranks filled by clients of instances.

    table: swapped by placements; the router, or a record of preloads.  meter: of the demand, for a placement.
    """

    config: RoutingConfig
    router: Router
    has_server: bool = False
    table: PhiRouting | None = None
    meter: DemandMeter | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    steps: StepModel | None = None

    @property
    def by_adapter(self) -> bool:
        """True if the router reads which adapters an instance has."""
        return self.config.routing in ("adapter_affinity", "rank_aware", "shortest_pending_time")

    @property
    def table_version(self) -> int:
        """Number of routing tables so far."""
        return 0 if self.table is None else self.table.version

    def placement(self, client: FleetClient, pool: FleetPool | None = None) -> PlacementController | None:
        """The controller of the router's table; None without placement.  Raises ConfigError."""
        table = self.table
        if table is None or self.meter is None:
            return None
        from .placement_controller import PlacementController

        by_table = table is self.router
        return PlacementController(
            self.config, client, table, self.meter, pool=pool, routes_by_table=by_table
        )

    def take(self, table: Mapping[str, list[tuple[int, float]]], instances: Iterable[Instance]) -> None:
        """Route by another process's table, if any."""
        if self.table is None:
            return
        if self.table is self.router:
            self.table.swap(table)
        else:
            show_preloaded(table, self.table, instances)


def show_preloaded(
    rows: Mapping[str, list[tuple[int, float]]], table: PhiRouting, instances: Iterable[Instance]
) -> None:
    """Show load-counting routers the adapters on devices."""
    table.swap(rows)
    for instance in instances:
        for name, row in rows.items():
            if any(index == instance.index for index, _ in row):
                instance.load.note(name)


def make_routes(cluster: ClusterConfig) -> Routes:
    """The routing of a front end's requests.  Raises ConfigError for unreadable files."""
    config, engine = cluster.front_end, cluster.engine
    name = config.routing or ("least_outstanding" if config.placement is None else "phi")
    ranks: dict[str, int] = {}
    model = _cost_model(cluster)
    steps = None if model is None else model.steps
    if name == "least_outstanding" and config.placement is None:
        return Routes(config=config, router=LeastOutstanding(), ranks=ranks, steps=steps)
    from moe_lora.policies.routing.routers import PhiRouting, RoutingContext, make_router

    # Adapters of a LoRA Server need not all take an instance's slots; those of instances for prompts do.
    has_server = cluster.lora_server is not None
    max_loras = None if has_server and not config.prefill_instances else engine.max_loras
    context = RoutingContext(max_num_seqs=engine.max_num_seqs, max_loras=max_loras, model=model, ranks=ranks)
    router = make_router(name, context)
    table, meter = router if isinstance(router, PhiRouting) else None, None
    if config.placement is not None:
        from moe_lora.policies.routing.demand import DemandMeter

        table, meter = table or PhiRouting(), DemandMeter(config.mean_output_tokens)
    return Routes(
        config=config,
        router=router,
        has_server=has_server,
        table=table,
        meter=meter,
        ranks=ranks,
        steps=steps,
    )


def _weights(engine: EngineConfig) -> str | None:
    """The weight format; None: the model isn't on this host."""
    return engine.weights_name() if (Path(engine.model_dir) / "config.json").is_file() else None


def _cost_model(cluster: ClusterConfig) -> CostModel | None:
    config, engine = cluster.front_end, cluster.engine
    path = config.performance_model
    if path is None:
        return None
    from moe_lora.dist.host_workers.profile import routed_host_start
    from moe_lora.policies.routing.model_routing import CostModel
    from moe_lora.provision.performance_models import read_step_model

    host = None
    if cluster.lora_server is None:  # its workers, and sites left to instances, are unknown here
        host = routed_host_start(engine, engine.performance_model or path)
    return CostModel(
        steps=read_step_model(
            path, kernel=engine.lora_kernel, form=config.performance_form, weights=_weights(engine)
        ),
        slo_tpot_s=math.inf if config.slo_tpot_s is None else config.slo_tpot_s,
        mean_output_tokens=config.mean_output_tokens,
        cost=config.rank_aware_cost,
        adapter_load_s_per_rank=config.adapter_load_s_per_rank,
        host=host,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
