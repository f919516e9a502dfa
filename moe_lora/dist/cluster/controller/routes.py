"""From settings to what routes requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moe_lora.config import RoutingConfig
from moe_lora.policies.token_meter import TokenMeter
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.model_routing import CostModel
from moe_lora.policies.phi_routing import PhiRouting
from moe_lora.policies.routers import RoutingContext, make_router
from moe_lora.policies.routing import Router
from moe_lora.provision.performance.performance_file import read_step_model

from .placement_controller import PlacementController


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """A router, and what the clients of instances have to tell: tokens and ranks of adapters."""

    config: RoutingConfig
    router: Router
    meter: TokenMeter = field(default_factory=TokenMeter)
    ranks: dict[str, int] = field(default_factory=dict)

    def placement(self, client: EngineClient) -> PlacementController | None:
        """The controller of the router's table, if there is a placement.  Raises ConfigError."""
        if not isinstance(self.router, PhiRouting):
            return None
        return PlacementController(self.config, client, self.router, self.meter)


def make_routes(config: RoutingConfig, max_num_seqs: int, lora_kernel: str) -> Routes:
    """max_num_seqs, lora_kernel: of the instances.  Raises ConfigError for an unknown name and for files that
    can't be read.
    """
    name = config.routing or ("least_outstanding" if config.placement is None else "phi")
    ranks: dict[str, int] = {}
    context = RoutingContext(max_num_seqs=max_num_seqs, model=_cost_model(config, lora_kernel), ranks=ranks)
    return Routes(config=config, router=make_router(name, context), ranks=ranks)


def _cost_model(config: RoutingConfig, lora_kernel: str) -> CostModel | None:
    if config.performance_model is None:
        return None
    return CostModel(
        steps=read_step_model(config.performance_model, kernel=lora_kernel, form=config.performance_form),
        slo_tpot_s=math.inf if config.slo_tpot_s is None else config.slo_tpot_s,
        mean_output_tokens=config.mean_output_tokens,
        adapter_load_s_per_rank=config.adapter_load_s_per_rank,
    )
