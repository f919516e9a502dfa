# SPDX-License-Identifier: Apache-2.0
"""Simulated systems of `bench_rates`: coupled instances, or fewer instances beside a LoRA Server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from bench.provision.plan_cases import model_inputs, zipf
from moe_lora.config.optional_parts import StepProfile
from moe_lora.core.partition import Layout
from moe_lora.policies.routing.routers import PhiRouting, make_router
from moe_lora.policies.routing.routing import Router
from moe_lora.provision.placement.placement import balanced_assignment
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.coupled import Coupled
from moe_lora.provision.plan.stages import StepTokens
from moe_lora.provision.plan.verify import SampledStage, step_profile
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    SimLoraServerConfig,
    SystemConfig,
)
from moe_lora.workload.popularity.popularity import Popularity
from moe_lora.workload.traces.records import Trace

NUM_ADAPTERS, ZIPF_S = 512, 1.2
MAX_NUM_SEQS = 512
ADAPTER_SHARES = (0.7, 0.5, 0.85, 0.3, 0.95)
"""Adapters' part of the memory beside the weights."""
BALANCED = "balanced_assignment"
ROUTERS = ("adapter_affinity", BALANCED, "least_outstanding")
NOMINAL_ROWS = 64
"""Decode rows of an instance at which layouts are compared."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """slots: of each instance, or, with a layout, of the LoRA Server.  layout: "": coupled.

    router: a name of `ROUTERS`.  adapter_share: the split of a coupled instance.
    """

    num_instances: int
    slots: int
    router: str
    layout: str = ""
    adapter_share: float = 0.0


class Systems:
    """The systems of a model with the mean lengths of a trace.  Prompts are computed elsewhere."""

    def __init__(self, model: str, trace: Trace) -> None:
        number = len(trace.requests)
        output_tokens = sum(one.output_tokens for one in trace.requests) / number
        prompt_tokens = sum(one.prompt_tokens for one in trace.requests) / number
        shares = zipf(NUM_ADAPTERS, ZIPF_S)
        names = tuple(f"adapter-{index:03}" for index in range(NUM_ADAPTERS))
        self.popularity = Popularity(names, tuple(shares.tolist()))
        self.cluster = Cluster(
            model_inputs(
                model,
                probabilities=shares,
                output_tokens=output_tokens,
                context_tokens=prompt_tokens + output_tokens,
                rate_per_s=1.0,
            )
        )
        self._coupled = Coupled(self.cluster)
        self._profile = cache(self._coupled_profile)
        self._remote_profile = cache(partial(step_profile, self.cluster, most=MAX_NUM_SEQS))

    def coupled(self, num_gpus: int) -> list[Setting]:
        """Every split with every router."""
        inputs = self.cluster.inputs
        room = self._coupled.kv_requests(0) * inputs.shape.kv_bytes_per_token() * inputs.context_tokens
        return [
            Setting(
                num_instances=num_gpus // inputs.instance_gpus,
                slots=max(1, min(NUM_ADAPTERS, int(share * room / inputs.adapter_bytes))),
                router=router,
                adapter_share=share,
            )
            for share in ADAPTER_SHARES
            for router in ROUTERS
        ]

    def served(self, num_gpus: int) -> list[Setting]:
        """Every number of instances, the equal division first; of each the layout of the shortest layer."""
        cluster, each, found = self.cluster, self.cluster.inputs.instance_gpus, []
        numbers = range(1, (num_gpus - 1) // each + 1)
        for number in sorted(numbers, key=lambda number: abs(2 * number * each - num_gpus)):
            layouts = [one for one in cluster.layouts if one.num_ranks == num_gpus - number * each]
            layout = min(layouts, key=partial(self._layer_s, number), default=None)
            if layout is not None and cluster.slots(layout):
                slots = min(NUM_ADAPTERS, cluster.slots(layout))
                found.append(
                    Setting(num_instances=number, slots=slots, router=ROUTERS[-1], layout=str(layout))
                )
        return found

    def config(self, setting: Setting, kernel_ratio: float) -> SystemConfig:
        """kernel_ratio: time of a coupled instance's LoRA kernels over the LoRA Server's.

        Popular adapters are there at the start.  Loads block no step.
        """
        return SystemConfig(
            num_instances=setting.num_instances,
            instance=self._instance(setting, kernel_ratio),
            adapters=self._adapters(setting),
            adapter_bytes=self.cluster.inputs.adapter_bytes,
            router=partial(self._router, setting),
        )

    def _instance(self, setting: Setting, kernel_ratio: float) -> InstanceConfig:
        inputs = self.cluster.inputs
        if setting.layout:
            profile = self._remote_profile(Layout.parse(setting.layout))
            kv_requests = self.cluster.kv_requests
        else:
            profile, kv_requests = self._profile(kernel_ratio), self._coupled.kv_requests(setting.slots)
        return InstanceConfig(
            profile=profile,
            num_layers=inputs.shape.num_layers,
            max_num_seqs=MAX_NUM_SEQS,
            kv_tokens=kv_requests * inputs.context_tokens,
        )

    def _adapters(self, setting: Setting) -> LocalConfig:
        inputs = self.cluster.inputs
        given: dict[str, Any] = {
            "capacity": setting.slots,
            "prefetched": self.popularity.adapters[: setting.slots],
        }
        if setting.layout:
            layout = Layout.parse(setting.layout)
            given["load_bytes_per_s"] = inputs.adapter_bytes / self.cluster.load_s(layout)
            return SimLoraServerConfig(num_stages=layout.pp, **given)
        if load_s := self._coupled.load_s(setting.slots):
            given["load_bytes_per_s"] = inputs.adapter_bytes / load_s
        return LocalConfig(blocking=False, **given)

    def _router(self, setting: Setting) -> Router:
        if setting.router != BALANCED:
            return make_router(setting.router)
        shares = dict(zip(self.popularity.adapters, self.popularity.probabilities, strict=True))
        owners = balanced_assignment(shares, setting.num_instances)
        return PhiRouting({name: [(index, 1.0)] for name, index in owners.items()})

    def _coupled_profile(self, kernel_ratio: float) -> StepProfile:
        stages, rows = self.cluster.stages, range(1, MAX_NUM_SEQS + 1)

        def sampled(seconds: Callable[[int], float]) -> SampledStage:
            return SampledStage([0.0, *map(seconds, rows)])

        return StepProfile(
            attention=sampled(stages.attention_s),
            experts=sampled(stages.experts_s),
            lora=sampled(lambda number: kernel_ratio * stages.local_deltas_s(StepTokens(number))),
            overlap=False,
        )

    def _layer_s(self, num_instances: int, layout: Layout) -> float:
        """A layer at NOMINAL_ROWS, or the LoRA Server's longest stage for all instances."""
        stages = self.cluster.stages
        served = stages.server(layout.ep, NOMINAL_ROWS)
        layer_s = stages.attention_s(NOMINAL_ROWS) + max(stages.experts_s(NOMINAL_ROWS), served.total_s)
        return max(layer_s, served.longest[1] * num_instances / layout.pp)


def text_of(setting: Setting) -> str:
    """A short text."""
    if setting.layout:
        return f"{setting.num_instances} instances and {setting.layout}"
    return f"{setting.adapter_share:.0%} for {setting.slots} adapters, {setting.router}"
