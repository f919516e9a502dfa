# SPDX-License-Identifier: Apache-2.0
"""Plan of bench_cluster's simulation: step times, loads and systems, with the origin of each number.

Step times are of Llama-7B on one A100, seconds; R rank, T tokens or rows.  Toppings (section 2.3, figures 4
and 6) gives prefill 44 ms for 256 tokens and 90 ms for 1024, so 28.7 ms + 60 us a token; decode with BGMV
34.8 ms for 24 requests of rank 32 and 35.8 ms for 16 of rank 64, so 31.8 ms + 3.9 us · T · max R; with MBGMV
35.3 and 35.9 ms, so 33.5 ms + 2.3 us · sum R.  LoRAServe (section III-A1): a prefill of 2000 tokens takes
2.7 times as long at rank 128 as at rank 8: 1.19 us a token and unit of rank.  Neither paper gives a decode
step's growth with the batch's KV, so these times have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from moe_lora.policies.routing.demand import DemandForecast
from moe_lora.policies.routing.model_routing import CostModel
from moe_lora.policies.routing.routers import PhiRouting, RoutingContext, make_router
from moe_lora.provision.operating_points import (
    PointLoad,
    RateRun,
    SloGoal,
    find_operating_point,
    simulated_run,
)
from moe_lora.provision.placement.placement_problem import Table
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    PlacementConfig,
    SystemConfig,
)
from moe_lora.timing.step_model import StepModel
from moe_lora.workload.popularity.popularity import Popularity
from moe_lora.workload.replay_plan import PlannedRequest

HIDDEN, NUM_LAYERS, DTYPE_BYTES = 4096, 32, 2
PREFILL_S, PREFILL_TOKEN_S, PREFILL_RANK_S = 28.7e-3, 60e-6, 1.19e-6
BGMV_S, BGMV_RANK_S = 31.8e-3, 3.9e-6
MBGMV_S, MBGMV_RANK_S = 33.5e-3, 2.3e-6
FLOPS_PER_S, READ_BYTES_PER_S = 0.5 * 312e12, 0.8 * 1.94e12
"""Assumed reached shares of an A100's peaks, without measurements in the papers."""
HOST_BYTES_PER_S, FETCH_BYTES_PER_S = 20e9, 12.5e9
"""Assumed: PCIe 4 from the host's memory, 100 Gbit/s from another host's."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, NUM_SLOTS, KV_TOKENS = 64, 2048, 64, 90_000
"""Of an instance; 64 requests is Toppings' usual maximum, KV is the rest of 80 GB."""
INTERVAL_S = 30.0


def rank_bytes(num_modules: int) -> float:
    """Bytes of an adapter per unit of rank."""
    return 2.0 * HIDDEN * num_modules * NUM_LAYERS * DTYPE_BYTES


def step_models(num_modules: int) -> dict[str, StepModel]:
    """padded: BGMV.  true_rank: MBGMV, prefill at the same time per unit of rank.  roofline: true ranks by
    FLOPs and bytes alone, on the base of BGMV: a bound for kernels.
    """
    prefill = {"step": PREFILL_S, "tokens": PREFILL_TOKEN_S}
    flops_s = rank_bytes(num_modules) / DTYPE_BYTES * 2 / FLOPS_PER_S
    read_s = rank_bytes(num_modules) / READ_BYTES_PER_S
    return {
        "padded": _model(
            "bgmv",
            {"step": BGMV_S, "padded_ranks": BGMV_RANK_S},
            {**prefill, "padded_ranks": PREFILL_RANK_S},
        ),
        "true_rank": _model(
            "mbgmv", {"step": MBGMV_S, "ranks": MBGMV_RANK_S}, {**prefill, "ranks": PREFILL_RANK_S}
        ),
        "roofline": _model(
            "sgmv",
            {"step": BGMV_S, "adapter_ranks": read_s},
            {**prefill, "ranks": flops_s, "adapter_ranks": read_s},
        ),
    }


def _model(kernel: str, decode_s: Mapping[str, float], prefill_s: Mapping[str, float]) -> StepModel:
    return StepModel(kernel=kernel, form="full", expert_share=1.0, decode_s=decode_s, prefill_s=prefill_s)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests, at any rate.  lengths: (prompt, answer) tokens of so many requests.  seed: of the draws."""

    popularity: Popularity
    ranks: Mapping[str, int]
    lengths: Callable[[int, np.random.Generator], tuple[Sequence[int], Sequence[int]]]
    tokens_per_request: float
    num_modules: int
    duration_s: float
    since_s: float
    seed: int = 0

    def plan(self, rate_per_s: float) -> list[PlannedRequest]:
        """Poisson; other rates are the same draws, faster or slower."""
        rngs = [np.random.default_rng(3 * self.seed + number) for number in range(3)]
        count = round(rate_per_s * self.duration_s * 1.2) + 100
        arrivals = np.cumsum(rngs[0].exponential(1.0, count)) / rate_per_s
        arrivals = arrivals[arrivals < self.duration_s]
        adapters = self.popularity.draw(arrivals / self.duration_s, rngs[1])
        prompts, answers = self.lengths(len(arrivals), rngs[2])
        return [
            PlannedRequest(index, at_s, adapters[index], int(prompts[index]), int(answers[index]))
            for index, at_s in enumerate(arrivals.tolist())
        ]

    def expected(self, rate_per_s: float) -> dict[str, float]:
        """Tokens/s of each adapter at the begin."""
        first = self.popularity.at(0.0)
        pairs = zip(first.adapters, first.probabilities, strict=True)
        return {name: float(share) * rate_per_s * self.tokens_per_request for name, share in pairs}


class Planner:
    """The front end's controller: a forecast from earlier steps, and a new placement from the last table.

    expected: tokens/s before the first step.  forecast: of the steps; None: with its defaults.
    """

    def __init__(
        self,
        place: Callable[..., Table],
        ranks: Mapping[str, int],
        num_servers: int,
        points: Mapping[int, float],
        expected: Mapping[str, float],
        forecast: DemandForecast | None = None,
    ) -> None:
        self._place, self._ranks, self._points = place, ranks, points
        self._servers = list(range(num_servers))
        self._forecast = forecast or DemandForecast()
        self._forecast.observe(expected, 1.0)
        self._table: Table | None = None

    def __call__(self, tokens: Mapping[str, float], length_s: float) -> dict[str, list[tuple[int, float]]]:
        if length_s:
            self._forecast.observe(tokens, length_s)
        demand = self._forecast.read()
        self._table = self._place(self._ranks, self._servers, self._points, demand, self._table)
        return cast("dict[str, list[tuple[int, float]]]", self._table)


@dataclass(frozen=True, kw_only=True)
class Systems:
    """Systems of one load and step model.  points: for placements.  slo_tpot_s: of `rank_aware`."""

    load: Load
    model: StepModel
    points: Mapping[int, float]
    mean_output_tokens: float
    slo_tpot_s: float = float("inf")

    def placed(
        self,
        place: Callable[..., Table],
        num_servers: int,
        rate_per_s: float,
        forecast: Callable[[], DemandForecast] = DemandForecast,
    ) -> SystemConfig:
        """Adapters on their placement's servers, requests by its shares."""
        expected = self.load.expected(rate_per_s)

        def planner() -> Planner:
            return Planner(place, self.load.ranks, num_servers, self.points, expected, forecast())

        placement = PlacementConfig(planner=planner, interval_s=INTERVAL_S)
        return replace(self.routed("phi", num_servers), router=PhiRouting, placement=placement)

    def routed(self, routing: str, num_servers: int) -> SystemConfig:
        """All adapters on every host, requests by a router."""
        per_rank = rank_bytes(self.load.num_modules)
        context = RoutingContext(
            max_num_seqs=MAX_NUM_SEQS,
            model=CostModel(
                steps=self.model,
                slo_tpot_s=self.slo_tpot_s,
                mean_output_tokens=self.mean_output_tokens,
                adapter_load_s_per_rank=per_rank / HOST_BYTES_PER_S,
            ),
            ranks=self.load.ranks,
        )
        return SystemConfig(
            num_instances=num_servers,
            instance=InstanceConfig(
                steps=self.model,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                kv_tokens=KV_TOKENS,
            ),
            adapters=LocalConfig(
                capacity=NUM_SLOTS, load_bytes_per_s=HOST_BYTES_PER_S, fetch_bytes_per_s=FETCH_BYTES_PER_S
            ),
            adapter_bytes={name: rank * per_rank for name, rank in self.load.ranks.items()},
            lora_ranks=self.load.ranks,
            router=lambda: make_router(routing, context),
        )


def simulated_points(
    model: StepModel, ranks: Sequence[int], load: PointLoad, slo: SloGoal
) -> dict[int, float]:
    """Operating points in tokens/s, from the simulator on one instance per rank."""

    def run(lora_rank: int, rate_per_s: float, seed: int) -> RateRun:
        batch = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
        return simulated_run(model, lora_rank, load, slo, rate_per_s, seed, **batch)

    found: dict[int, float] = {}
    for rank in ranks:
        point = find_operating_point(
            partial(run, rank),
            lora_rank=rank,
            tokens_per_request=load.tokens_per_request,
            start_per_s=6.0,
            repeats=1,
        )
        found[rank] = point.tokens_per_s
    return found
