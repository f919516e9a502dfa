"""A plan that holds in the simulator before it is handed out.

The models say where to begin; clusters of so many GPUs are replayed, the most promising first, until one
holds.  From there fewer GPUs are tried until none does at two successive numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moe_lora.core.errors import SloError
from moe_lora.dist.lora_server.protocol.partition import Layout
from moe_lora.provision.admission.iar import expected_active

from . import verify
from .cluster_size import Cluster
from .inputs import PlanInputs
from .plan import CHECK, Plan, cluster_of, make_plan, plan_of
from .sizing import candidate
from .verify import PlannedLoad, Replay, holds, missed_text, read_load, replays, verdicts

TRIED_AT_ONCE = 4
"""Clusters of equally many GPUs that are replayed before more GPUs are."""
PATIENCE = 2
"""Successive numbers of GPUs none of whose clusters holds, after which no smaller ones are tried."""
FARTHEST = 1.3
"""Clusters are replayed whose models miss a goal by less than this factor."""
BUSIEST = 1.1
"""... and those whose links are that busy at most, by the model of misses."""
SEEDS = 0, 2
"""Of the draws that a plan is chosen by."""
GROWTH = 10
"""Where nothing holds, a tenth more GPUs are tried next; up to MOST times as many and MORE."""
MOST, MORE = 2, 16


@dataclass(frozen=True)
class SizedCluster:
    """num_instances instances beside a LoRA Server of `layout`."""

    layout: Layout
    num_instances: int


class PlaceSearch:
    """Clusters by number of GPUs, and what became of them in replays.

    loads: a cluster holds if it does in all of them, tried in turn: near the most that links can load, one
    draw of arrivals and adapters may hold where the next does not.  farthest, busiest: see FARTHEST and
    BUSIEST.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        cluster: Cluster,
        loads: Sequence[PlannedLoad],
        *,
        farthest: float = FARTHEST,
        busiest: float = BUSIEST,
    ) -> None:
        self._inputs, self._cluster, self._loads = inputs, cluster, loads
        self._farthest, self._busiest = farthest, busiest
        self._found: dict[SizedCluster, list[Replay]] = {}
        self._nearness: dict[SizedCluster, float] = {}
        self._layouts: dict[int, list[Layout]] = defaultdict(list)
        for layout in cluster.layouts:
            self._layouts[layout.num_ranks].append(layout)

    @property
    def num_replayed(self) -> int:
        """Clusters."""
        return len(self._found)

    def holds(self, place: SizedCluster) -> bool:
        """Whether it keeps all targets in every kind of arrivals of every load."""
        return holds(self._inputs, self.replayed(place))

    def replayed(self, place: SizedCluster) -> list[Replay]:
        """Replays of the last load, or of the first that it does not hold, up to where it no longer can."""
        if place not in self._found:
            for load in self._loads:
                self._found[place] = replays(
                    self._inputs,
                    self._cluster,
                    place.layout,
                    place.num_instances,
                    load,
                    to_the_end=False,
                )
                if not holds(self._inputs, self._found[place]):
                    break
        return self._found[place]

    def of(self, num_gpus: int) -> list[SizedCluster]:
        """Clusters of so many GPUs that may hold by the models, those with most to spare first."""
        near = [place for place in self._all_of(num_gpus) if self.nearness(place) <= self._farthest]
        return sorted(near, key=lambda place: (self.nearness(place), place.layout.ep))

    def holding(self, num_gpus: int, at_most: int = TRIED_AT_ONCE) -> SizedCluster | None:
        """The first of the most promising ones that holds."""
        return next((place for place in self.of(num_gpus)[:at_most] if self.holds(place)), None)

    @cached_property
    def fewest_gpus(self) -> int | None:
        """Of any cluster that may hold; None if none does."""
        most = 64 * self._inputs.instance_gpus
        return next((number for number in range(1, most) if self.of(number)), None)

    def nearness(self, place: SizedCluster) -> float:
        """The largest of what the models predict, by what is allowed; infinite where out of question."""
        if place not in self._nearness:
            self._nearness[place] = self._predicted(place)
        return self._nearness[place]

    def shortfall(self, place: SizedCluster, most: int) -> str:
        """Why a load is refused: what this place misses.  most: GPUs, up to which others were tried."""
        said = [missed_text(one) for one in verdicts(self._inputs, self.replayed(place)) if one.held is False]
        return (
            f"simulated, none of {self.num_replayed} clusters of up to {most} GPUs holds it; the models' "
            f"one, {place.num_instances} instances and {place.layout}, {'; '.join(said)}; raise --slo-ttft-s "
            "or --slo-tpot-s, give more --gpus, or lower the load"
        )

    def _all_of(self, num_gpus: int) -> Iterator[SizedCluster]:
        each = self._inputs.instance_gpus
        for num_instances in range(1, num_gpus // each + 1):
            if self._inputs.instances in (None, num_instances):
                for layout in self._layouts.get(num_gpus - num_instances * each, ()):
                    yield SizedCluster(layout, num_instances)

    def _predicted(self, place: SizedCluster) -> float:
        cluster, layout, num_instances = self._cluster, place.layout, place.num_instances
        most = cluster.max_batch[0]
        alone = cluster.batch(layout.ep, num_instances)
        slots = cluster.slots(layout)
        if alone > self._farthest * most or slots < 1:
            return math.inf
        probabilities, inputs = self._inputs.probabilities, self._inputs
        batch = cluster.batch(layout.ep, num_instances, layout)
        if batch > self._farthest * most:  # loads that the links can't keep up with, or nearly
            batch = alone
        # A slot is held for a step more than a request has tokens: while its lease is asked for.
        held = batch * num_instances * inputs.adapter_share * (1 + 1 / inputs.output_tokens)
        one = candidate(cluster, layout, 1, num_instances, batch)
        busy = one.queue.utilisation
        if inputs.global_batch is None:
            assert inputs.rate_per_s is not None  # one of the two is given
            busy = cluster.load_queue(layout, inputs.rate_per_s * (1 + cluster.margin)).utilisation
        if busy > self._busiest:
            return math.inf
        return max(
            busy,
            batch / most,
            expected_active(probabilities, held) / slots if slots < len(probabilities) else 0.0,
            one.p95_ttft_s / inputs.slo_ttft_s if busy < 1 else 1.0,
            one.step_s / inputs.slo_tpot_s if busy < 1 else 1.0,
        )


def checked_plan(inputs: PlanInputs, trace: str | Path, format: str | None = None) -> Plan:
    """The plan of `make_plan`, or the nearest one that holds in replays of the trace and of Poisson arrivals.

    Raises SloError where none is found, and as `make_plan`.
    """
    cluster = cluster_of(inputs)
    modelled: Plan | None = None
    refusal = ""
    try:
        modelled = make_plan(inputs)
        rate_per_s = planned_rate(inputs, modelled)
    except SloError as refused:
        if inputs.rate_per_s is None or inputs.gpus is not None:
            raise
        refusal, rate_per_s = str(refused), inputs.rate_per_s * (1 + inputs.load_margin)
    search = PlaceSearch(inputs, cluster, searched_loads(inputs, rate_per_s, trace, format))
    place = _smallest(search, modelled, refusal)
    if modelled is None or place != place_of(modelled):
        modelled = replace(
            plan_of(inputs, cluster, place.num_instances, place.layout),
            binding_constraint=CHECK,
            serviceable_rate_per_s=None if modelled is None else modelled.serviceable_rate_per_s,
            rate_limited_by=None if modelled is None else modelled.rate_limited_by,
        )
    return replace(modelled, checked=tuple(search.replayed(place)))


def searched_loads(
    inputs: PlanInputs,
    rate_per_s: float,
    trace: str | Path,
    format: str | None = None,
    *,
    seeds: tuple[int, int] = SEEDS,
) -> tuple[PlannedLoad, PlannedLoad]:
    """What places are tried with: two thirds of the requests of a check, and then as many by other draws."""
    number = max(1, 2 * verify.NUM_REQUESTS // 3)
    return (
        read_load(inputs, rate_per_s, trace, format, num_requests=number, seed=seeds[0]),
        read_load(inputs, rate_per_s, trace, format, seed=seeds[1]),
    )


def place_of(plan: Plan) -> SizedCluster:
    """Where the plan puts its load."""
    return SizedCluster(Layout.parse(plan.layout), plan.instances)


def planned_rate(inputs: PlanInputs, plan: Plan) -> float:
    """Requests per second: the given ones, or those that keep a given global batch running as predicted."""
    if inputs.global_batch is not None:
        return plan.global_batch / (inputs.output_tokens * plan.tpot_s)
    assert inputs.rate_per_s is not None  # PlanInputs has one of the two
    return inputs.rate_per_s * (1 + inputs.load_margin)


def _smallest(search: PlaceSearch, modelled: Plan | None, refusal: str) -> SizedCluster:
    if modelled is not None and modelled.serviceable_rate_per_s is not None:
        return _in_budget(search, modelled)
    begin = search.fewest_gpus if modelled is None else modelled.total_gpus
    if begin is None:
        raise SloError(refusal)
    most = MOST * begin + MORE
    place, number, failed = None, begin, set[int]()
    nearest = place_of(modelled) if modelled is not None else None
    if nearest is not None and search.holds(nearest):
        place = nearest
    while place is None and number <= most:
        place = search.holding(number)
        if place is None:
            failed.add(number)
            nearest = nearest or next(iter(search.of(number)), None)
            number += max(1, number // GROWTH)
    if place is None:
        if refusal or nearest is None:
            raise SloError(refusal)
        raise SloError(search.shortfall(nearest, most))
    missed, number = 0, number - 1
    while missed < PATIENCE and number >= 1:
        smaller = None if number in failed else search.holding(number)
        missed = missed + 1 if smaller is None else 0
        place, number = smaller or place, number - 1
    return place


def _in_budget(search: PlaceSearch, modelled: Plan) -> SizedCluster:
    """The split of highest rate if it holds, else the most promising other one."""
    nearest = place_of(modelled)
    if search.holds(nearest):
        return nearest
    for number in range(modelled.total_gpus, max(0, modelled.total_gpus - modelled.instance_gpus), -1):
        place = search.holding(number)
        if place is not None:
            return place
    raise SloError(search.shortfall(nearest, modelled.total_gpus))
