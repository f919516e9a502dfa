# SPDX-License-Identifier: Apache-2.0
"""Plans checked in the simulator, from the models' plan on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

from moe_lora.core.errors import SloError
from moe_lora.core.partition import Layout
from moe_lora.provision.admission.iar import expected_active
from moe_lora.workload.traces.records import Trace

from . import verify
from .cluster_size import Cluster
from .coupled import MOST_PROMPTS, Apart
from .evidence import evidence
from .inputs import CHUNK_TOKENS, PlanInputs, SizedCluster
from .memory import BLOCK_TOKENS, miss_share
from .plan import CHECK, Plan, assumptions, make_plan, plan_of
from .sizing import candidate
from .verify import TAIL, PlannedLoad, Replay, holds, missed_texts, planned_load, replays, verdicts

TRIED_AT_ONCE = 4
"""Replayed clusters per GPU count."""
PATIENCE = 2
"""Successive failed GPU counts before the search ends."""
FARTHEST = 1.3
"""Replays clusters up to this factor over a modelled goal."""
BUSIEST = 1.1
"""Replays clusters up to this modelled link utilisation."""
SEEDS = 0, 2
CHUNKS, LEAST_REQUESTS = 4, 1500
"""Prompts above CHUNKS steps reduce a search's requests, down to LEAST_REQUESTS."""
GROWTH = 10
"""After a miss, tries a tenth more GPUs; up to MOST times as many and MORE."""
MOST, MORE = 2, 16

LoadsOf = Callable[[SizedCluster], Iterable[PlannedLoad]]


class Loads:
    """Of a trace, by requests per second; each is made once, when needed."""

    def __init__(self, inputs: PlanInputs, trace: Trace) -> None:
        self.searched = cache(partial(searched_loads, inputs, trace=trace))
        self.whole = cache(partial(planned_load, inputs, trace=trace))


class PlaceSearch:
    """Clusters by number of GPUs, and replays.

    loads_of: a cluster must hold in all; near the links' limit draws differ.
    """

    def __init__(
        self,
        cluster: Cluster,
        loads_of: LoadsOf,
        *,
        farthest: float = FARTHEST,
        busiest: float = BUSIEST,
    ) -> None:
        self._inputs, self._cluster, self._loads_of = cluster.inputs, cluster, loads_of
        self._replayed, self._near = cluster, cache(self._nearness)
        self.instance_gpus = cluster.inputs.instance_gpus
        self._farthest, self._busiest = farthest, busiest
        self._found: dict[SizedCluster, list[Replay]] = {}
        self._layouts: dict[int, list[Layout]] = defaultdict(list)
        for layout in cluster.layouts:
            self._layouts[layout.num_ranks].append(layout)

    @property
    def num_replayed(self) -> int:
        """Number of replayed clusters."""
        return len(self._found)

    def holds(self, place: SizedCluster) -> bool:
        """True if the cluster keeps all targets in every load."""
        return holds(self._inputs, self.replayed(place))

    def replayed(self, place: SizedCluster) -> list[Replay]:
        """Replays of the last load, or of the first failed."""
        if place not in self._found:
            for load in self._loads_of(place):
                self._found[place] = replays(self._replayed, place, load, to_the_end=False)
                if not holds(self._inputs, self._found[place]):
                    break
        return self._found[place]

    def of(self, num_gpus: int, farthest: float | None = None) -> list[SizedCluster]:
        """Clusters of num_gpus GPUs within the models' limits, largest margin first."""
        most = self._farthest if farthest is None else farthest
        near = [one for one in self._candidates(num_gpus) if one[0] <= most]
        return [place for *_, place in sorted(near, key=lambda one: one[:2])]

    def _candidates(self, num_gpus: int) -> list[tuple[float, int, SizedCluster]]:
        """With nearness, and EP degree."""
        return [
            (self._near(layout, number), layout.ep, SizedCluster(layout, number))
            for layout, number in self._all_of(num_gpus)
        ]

    def holding(self, num_gpus: int, at_most: int = TRIED_AT_ONCE) -> SizedCluster | None:
        """The first promising cluster that holds, or None."""
        return next((place for place in self.of(num_gpus)[:at_most] if self.holds(place)), None)

    def fewest_gpus(self, refusal: str) -> int:
        """Fewest GPUs of a promising cluster.  Raises SloError with the refusal."""
        for number in range(1, 64 * self._inputs.instance_gpus):
            if self.of(number):
                return number
        raise SloError(refusal)

    def shortfall(self, place: SizedCluster, most: int) -> str:
        """A refusal: the missed goals.  most: largest tried number of GPUs."""
        said = missed_texts(verdicts(self._inputs, self.replayed(place)))
        return (
            f"simulated, none of {self.num_replayed} clusters of up to {most} GPUs holds it; the models' "
            f"one, {place}, {'; '.join(said)}; raise --slo-ttft-s "
            "or --slo-tpot-s, give more --gpus, or lower the load"
        )

    def _all_of(self, num_gpus: int) -> Iterator[tuple[Layout, int]]:
        each = self._inputs.instance_gpus
        for num_instances in range(1, num_gpus // each + 1):
            if self._inputs.instances in (None, num_instances):
                for layout in self._layouts.get(num_gpus - num_instances * each, ()):
                    yield layout, num_instances

    def _nearness(self, layout: Layout, num_instances: int) -> float:
        cluster, inputs = self._cluster, self._inputs
        most = cluster.max_batch[0]
        alone = cluster.batch(layout, num_instances, loads=False)
        slots = cluster.slots(layout)
        if alone > self._farthest * most or slots < 1:
            return math.inf
        batch = cluster.batch(layout, num_instances, loads=True)
        if batch > self._farthest * most:
            batch = alone
        one = candidate(cluster, layout, 1, num_instances, batch)
        busy = one.queue.utilisation
        if inputs.global_batch is None:
            assert inputs.rate_per_s is not None
            busy = cluster.load_queue(layout, inputs.rate_per_s * (1 + cluster.margin)).utilisation
        if busy > self._busiest:
            return math.inf
        # The lease call keeps a slot busy for one more step.
        held = (
            batch * cluster.in_service * num_instances * inputs.adapter_share * (1 + 1 / inputs.output_tokens)
        )
        server = one.longest_s / cluster.layer_budget_s if inputs.prompts is not None else 0.0
        return max(
            busy,
            server,
            batch / most,
            expected_active(inputs.probabilities, held) / slots if slots < len(inputs.probabilities) else 0.0,
            one.p95_ttft_s / inputs.slo_ttft_s if busy < 1 else 1.0,
            one.step_s / inputs.slo_tpot_s if busy < 1 else 1.0,
        )


class DividedSearch(PlaceSearch):
    """Instances for answers beside a LoRA Server, and instances for prompts with adapters of their own.

    Raises MissingRateError without a rate for KV.
    """

    def __init__(self, cluster: Cluster, loads_of: LoadsOf, *, farthest: float, busiest: float) -> None:
        self.apart = Apart(cluster)
        super().__init__(self.apart.cluster, loads_of, farthest=farthest, busiest=busiest)
        self._inputs, self._replayed = replace(cluster.inputs, instances=None), cluster
        self._given = cluster.inputs.instances

    def _candidates(self, num_gpus: int) -> list[tuple[float, int, SizedCluster]]:
        apart, slots = self.apart, self.apart.own_slots
        kv_tokens = self._cluster.kv_requests * self._inputs.context_tokens
        if not slots or kv_tokens < apart.prompts.longest_kv_tokens:
            return []
        found = []
        for number in apart.prompt_numbers(num_gpus - 2):
            share = apart.prompts_share(number) / MOST_PROMPTS
            for near, ep, place in super()._candidates(num_gpus - number):
                instances = number + place.num_instances
                divided = SizedCluster(place.layout, instances, slots, number, apart.full_step)
                link = apart.link_share(place.num_instances)
                if self._given in (None, instances):
                    found.append((max(near, share, link), ep, divided))
        return found


def checked_server_plan(inputs: PlanInputs, loads: Loads) -> Plan:
    """The plan of `make_plan`, or the nearest that holds in replays of the loads.

    Raises SloError without a plan.
    """
    modelled: Plan | None = None
    refusal = ""
    try:
        modelled = make_plan(inputs)
        rate_per_s = planned_rate(inputs, modelled)
    except SloError as refused:
        if inputs.rate_per_s is None or inputs.gpus is not None:
            raise
        refusal, rate_per_s = str(refused), inputs.rate_per_s * (1 + inputs.load_margin)
    cluster = Cluster(inputs)

    def loads_of(place: SizedCluster) -> Iterable[PlannedLoad]:
        if inputs.global_batch is None or place.layout is None:
            return loads.searched(rate_per_s)
        tokens_per_s = cluster.tokens_at(place.layout, place.num_instances, inputs.global_batch)
        return loads.searched(tokens_per_s / inputs.output_tokens)

    search = PlaceSearch(cluster, loads_of)
    place = smallest_place(search, modelled, refusal)
    if modelled is None or place != place_of(modelled):
        modelled = replaced(cluster, place, modelled)
    return replace(modelled, checked=tuple(search.replayed(place)))


def replaced(cluster: Cluster, place: SizedCluster, modelled: Plan | None) -> Plan:
    """The plan of a place, chosen by the simulated check."""
    assert place.layout is not None
    return replace(
        plan_of(cluster, place.num_instances, place.layout),
        binding_constraint=CHECK,
        serviceable_rate_per_s=None if modelled is None else modelled.serviceable_rate_per_s,
        rate_limited_by=None if modelled is None else modelled.rate_limited_by,
    )


def divided_plan(cluster: Cluster, place: SizedCluster) -> Plan:
    """The plan of a place of `DividedSearch`; rows and layers are those of answers."""
    apart, inputs = Apart(cluster), cluster.inputs
    plan = replaced(apart.cluster, SizedCluster(place.layout, place.num_decoding), None)
    misses = miss_share(inputs.probabilities, place.slots)
    prompt_s = apart.prompt_s(place, plan.tpot_s) + (apart.load_s(place.slots) if misses > TAIL else 0.0)
    kv_bytes = plan.kv_gb_per_rank * 1e9 - replace(inputs, mix=inputs.mix.largest()).coupled_adapter_bytes
    tokens = int(kv_bytes / inputs.kv_token_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    return replace(
        plan,
        instances=place.num_instances,
        total_gpus=place.num_gpus(inputs.instance_gpus),
        prefill_instances=place.prefill_instances,
        prefill_slots=place.slots,
        full_steps=True,
        prompt_share=apart.prompts_share(place.prefill_instances, place.step_tokens),
        max_num_batched_tokens=max(place.step_tokens, plan.max_num_seqs),
        max_model_len=tokens if tokens < inputs.shape.max_position else None,
        prefill_loads_per_s=plan.rate_per_s * inputs.adapter_share * misses,
        p95_ttft_s=None if plan.p95_ttft_s is None else plan.p95_ttft_s + prompt_s,
        inputs=inputs.to_json(),
        assumptions=assumptions(inputs, plan.global_batch),
        **evidence(inputs, place, plan.rate_per_s),
    )


def searched_loads(
    inputs: PlanInputs, rate_per_s: float, trace: Trace, seeds: tuple[int, int] = SEEDS
) -> list[PlannedLoad]:
    """Loads in two draws, of `searched_requests`."""
    return [
        planned_load(inputs, rate_per_s, trace, num_requests=number, seed=seed)
        for number, seed in zip(searched_requests(inputs), seeds, strict=True)
    ]


def searched_requests(inputs: PlanInputs) -> tuple[int, int]:
    """Two thirds of a check's requests, and all.

    With prompts half of these; fewer above CHUNKS steps.
    """
    most = verify.NUM_REQUESTS
    if inputs.prompts is not None:
        chunks = inputs.prompts.computed_tokens / CHUNK_TOKENS
        most = max(min(LEAST_REQUESTS, most), int(most / 2 / max(1.0, chunks / CHUNKS)))
    return max(1, 2 * most // 3), max(1, most)


def place_of(plan: Plan) -> SizedCluster:
    coupled, tokens = plan.kind == "coupled", plan.max_num_batched_tokens if plan.full_steps else None
    layout, slots = (None, plan.slots) if coupled else (Layout.parse(plan.layout), plan.prefill_slots)
    return SizedCluster(layout, plan.instances, slots, plan.prefill_instances, tokens or 0)


def planned_rate(inputs: PlanInputs, plan: Plan) -> float:
    """Requests per second: given, or predicted for a global batch."""
    if inputs.global_batch is not None:
        return plan.global_batch / (inputs.output_tokens * plan.tpot_s)
    assert inputs.rate_per_s is not None
    return inputs.rate_per_s * (1 + inputs.load_margin)


def smallest_place(search: PlaceSearch, modelled: Plan | None, refusal: str) -> SizedCluster:
    """The smallest cluster found.  modelled: the models' plan; None: refused.  Raises SloError."""
    if modelled is not None and modelled.serviceable_rate_per_s is not None:
        return _in_budget(search, modelled)
    place, nearest, failed = None, None, set[int]()
    if modelled is not None:
        number, nearest = modelled.total_gpus, place_of(modelled)
        place = nearest if search.holds(nearest) else None
    else:
        number = search.fewest_gpus(refusal)
    most = MOST * number + MORE
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
    nearest = place_of(modelled)
    if search.holds(nearest):
        return nearest
    for number in range(modelled.total_gpus, max(0, modelled.total_gpus - modelled.instance_gpus), -1):
        place = search.holding(number)
        if place is not None:
            return place
    raise SloError(search.shortfall(nearest, modelled.total_gpus))
