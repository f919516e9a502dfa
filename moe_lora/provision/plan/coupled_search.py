# SPDX-License-Identifier: Apache-2.0
"""The search of coupled instances, and their plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from moe_lora.core.errors import SloError

from .cluster_size import MS, Cluster
from .coupled import MOST_PROMPTS, Coupled, sizing_of
from .evidence import bound_of
from .inputs import SizedCluster
from .plan import CHECK, TAIL, Plan, assumptions, shared_fields
from .verify import PlannedLoad, Replay, holds, missed_texts, replays, verdicts

GROWTH = 16
"""After a miss, tries a sixteenth more instances; up to MOST_TIMES as many and AND_MORE."""
MOST_TIMES, AND_MORE = 2, 8
WAITED = 0.01
"""Share of requests with a wait for a slot: above, splits with more slots come next; below, with more KV."""
IDLE = 0.02
"""Share of an instance's time: below, further instances change no step."""


class CoupledSearch:
    """Numbers of instances, with splits and replays.  loads_of: the loads of a rate."""

    def __init__(
        self,
        cluster: Cluster,
        loads_of: Callable[[float], Sequence[PlannedLoad]],
        coupled: Coupled | None = None,
    ) -> None:
        self.cluster, self._coupled = cluster, coupled or Coupled(cluster)
        self._loads_of = loads_of
        self._found: dict[SizedCluster, list[Replay]] = {}
        self._held: dict[int, SizedCluster | None] = {}

    def smallest(self) -> SizedCluster:
        """The smallest place that meets all goals.  Raises SloError with the missed goals."""
        inputs = self.cluster.inputs
        number = inputs.instances
        if inputs.gpus is not None:
            number = inputs.gpus // inputs.instance_gpus
        if number == 0:
            few = f"--gpus {inputs.gpus} is less than an instance's --instance-gpus {inputs.instance_gpus}"
            raise SloError(f"{few}; give more --gpus")
        if number is not None:
            found = self.holding(number)
            if found is None:
                raise SloError(self._shortfall(number))
            return found
        return self._bisected(self.fewest())

    def replayed(self, place: SizedCluster) -> list[Replay]:
        """Replays of the last load, or of the first missed."""
        if place not in self._found:
            for load in self._loads_of(self._coupled.rate_per_s(place.num_instances)):
                self._found[place] = replays(self.cluster, place, load, to_the_end=False)
                if not holds(self.cluster.inputs, self._found[place]):
                    break
        return self._found[place]

    def holds(self, place: SizedCluster) -> bool:
        """True if the place meets all goals."""
        return holds(self.cluster.inputs, self.replayed(place))

    def fewest(self) -> int:
        """The modelled number of instances.  Raises SloError if none suffices."""
        low, high = self._least() - 1, self._least()
        while self._nearness(high) > 1:
            if self._coupled.prompts_share(high) < IDLE and high > 64:
                raise SloError(self._too_slow(high))
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._nearness(middle) > 1 else (low, middle)
        return high

    def _least(self) -> int:
        inputs = self.cluster.inputs
        bound = None if inputs.rate_per_s is None else bound_of(inputs, inputs.rate_per_s)
        if bound is None or inputs.global_batch is not None:
            return 1
        return math.ceil(bound.gpus / inputs.instance_gpus)

    def _nearness(self, num_instances: int) -> float:
        return min(map(self._coupled.nearness, self._coupled.places(num_instances)), default=math.inf)

    def holding(self, num_instances: int) -> SizedCluster | None:
        """A split of this number of instances with all goals met."""
        if num_instances not in self._held:
            self._held[num_instances] = self._first_split(self._coupled.places(num_instances))
        return self._held[num_instances]

    def _first_split(self, places: list[SizedCluster]) -> SizedCluster | None:
        if not places:
            return None
        first = places[0]
        if first.step_tokens:
            return self.along(places)
        if self.holds(first):
            return first
        waited = any((one.waited_for_adapter or 0.0) > WAITED for one in self.replayed(first))
        others = sorted(places[1:], key=lambda place: place.slots, reverse=waited)
        return next(filter(self.holds, others), None)

    def along(self, places: Sequence[SizedCluster]) -> SizedCluster | None:
        """One that holds.  Along the places TTFT falls and TPOT rises: steps double, then halve."""
        low, high, at = -1, len(places), 0
        while low < at < high:
            if self.holds(places[at]):
                return places[at]
            slow = self._misses(places[at]).get("slo_tpot_s")
            low, high = (low, at) if slow else (at, high)
            at = min(2 * at + 1, high - 1) if high == len(places) else (low + high) // 2
        return None

    def nearest(self, places: Sequence[SizedCluster]) -> SizedCluster:
        """Of the replayed places the one with the smallest largest miss."""
        replayed = (place for place in places if place in self._found)
        return min(replayed, key=lambda place: max(self._misses(place).values(), default=math.inf))

    def _misses(self, place: SizedCluster) -> dict[str, float]:
        """Missed parts of the goals."""
        judged = verdicts(self.cluster.inputs, self.replayed(place))
        missed = sorted((one.missed_by / one.goal, one.target) for one in judged if one.missed_by)
        return {target: part for part, target in missed}

    def _bisected(self, first: int) -> SizedCluster:
        low, high, most = self._least() - 1, first, MOST_TIMES * first + AND_MORE
        while (found := self.holding(high)) is None:
            if high >= most:
                raise SloError(self._shortfall(first))
            low, high = high, min(most, high + max(1, high // GROWTH))
        if low < first:
            low = max(low, self._first_miss(low, high))
        return self._between(low, high, found)

    def below(self, number: int) -> SizedCluster | None:
        """The smallest place of fewer instances, if one fewer holds."""
        high, low = number - 1, self._least() - 1
        found = self.holding(high) if high > low else None
        return None if found is None else self._between(self._first_miss(low, high), high, found)

    def _between(self, low: int, high: int, found: SizedCluster) -> SizedCluster:
        while high - low > 1:
            middle = (low + high) // 2
            smaller = self.holding(middle)
            low, high, found = (middle, high, found) if smaller is None else (low, middle, smaller)
        return found

    def _first_miss(self, low: int, high: int) -> int:
        """A number below `high` with a missed goal, at least `low`."""
        step = 1
        while high - step > low and self.holding(high - step) is not None:
            step *= 2
        return max(low, high - step)

    def _shortfall(self, num_instances: int) -> str:
        inputs, places = self.cluster.inputs, self._coupled.places(num_instances)
        if not places:
            return (
                f"{num_instances} coupled instances of {inputs.instance_gpus} GPUs: "
                f"{self._why_no_place(num_instances)}; give more instances or GPUs, or lower the load"
            )
        place = self.nearest(places)
        said = missed_texts(verdicts(inputs, self.replayed(place)))
        return (
            f"simulated, {place}: {'; '.join(said)}; raise --slo-ttft-s or --slo-tpot-s, give more "
            "GPUs, or lower the load"
        )

    def _why_no_place(self, num_instances: int) -> str:
        share = self._coupled.prompts_share(num_instances)
        if share > MOST_PROMPTS:
            return (
                f"full steps of prompts take {share:.0%} of their time, {MOST_PROMPTS:.0%} at most is planned"
            )
        gpu, name = self.cluster.inputs.profile.gpu, self.cluster.inputs.profile.name
        gpu.needed("load_bytes_per_s", name)
        return "the KV of requests that run, or of the longest one, leaves no room for an adapter"

    def _too_slow(self, num_instances: int) -> str:
        inputs, coupled = self.cluster.inputs, self._coupled
        places = coupled.places(num_instances)
        if not places:
            return f"coupled instances of {inputs.instance_gpus} GPUs: {self._why_no_place(num_instances)}"
        batch = coupled.batch(num_instances)
        tpot_s = coupled.tpot_s(batch)
        ttft_s = coupled.p95_ttft_s(places[0], tpot_s, coupled.queue(places[0], batch, tpot_s))
        return (
            f"coupled instances of {inputs.instance_gpus} GPUs, however many: P95 TTFT {ttft_s:.3f} s "
            f"without any queue, {coupled.prompt_s(places[0], tpot_s):.3f} s of it for further steps of a "
            f"long prompt (SLO {inputs.slo_ttft_s:g} s), TPOT {tpot_s * MS:.1f} ms "
            f"(SLO {inputs.slo_tpot_s * MS:g} ms); the "
            f"{'steps are' if ttft_s > inputs.slo_ttft_s else 'step is'} the longer term; raise "
            "--slo-ttft-s or --slo-tpot-s, or --instance-gpus"
        )


_NO_SERVER: dict[str, Any] = {
    "lora_server_gpus": 0,
    "layout": "",
    "metrics": None,
    "gpus_by_constraint": {},
    "rate_limited_by": None,
    "serviceable_rate_per_s": None,
}


def coupled_plan(cluster: Cluster, place: SizedCluster) -> Plan:
    """The plan of a place; adapter counts are per instance."""
    inputs, coupled = cluster.inputs, sizing_of(cluster, place)
    batch = coupled.batch(place.num_decoding)
    running = batch / (1 + cluster.margin)
    tpot_s, at_load_s = coupled.tpot_s(running), coupled.tpot_s(batch)
    queue = coupled.queue(place, running, tpot_s)
    prefill, decoding = place.prefill_instances, place.num_decoding
    links = 2 * min(prefill, decoding) if prefill else decoding
    in_service = batch * inputs.adapter_share * cluster.in_service
    needed = {name: capacity(batch * cluster.in_service) for name, capacity in cluster.capacity_of.items()}
    capacity = needed[inputs.estimator], in_service
    shared = shared_fields(cluster, place, batch, running, tpot_s, capacity, queue)
    p95_ttft_s, decode_s = coupled.p95_ttft_s(place, tpot_s, queue), coupled.p95_decode_ttft_s(tpot_s, queue)
    queues = shared["slots_iar_corrected"] < TAIL
    return Plan(
        kind="coupled",
        capacity_paper=needed["paper"],
        capacity_corrected=needed["corrected"],
        loads_per_s=queue.loads_per_s * links,
        load_wait_s=queue.wait_s if math.isfinite(queue.wait_s) else 0.0,
        **_NO_SERVER,
        memory_gb_per_rank=place.slots * inputs.coupled_adapter_bytes / inputs.instance_gpus / 1e9,
        binding_constraint=CHECK,
        max_num_seqs=coupled.most_rows(place),
        p95_ttft_s=None if queues else p95_ttft_s,
        p95_decode_ttft_s=None if queues else decode_s,
        prompt_share=coupled.prompts_share(prefill or decoding, place.step_tokens),
        max_num_batched_tokens=coupled.step_tokens(place),
        prefill_instances=prefill,
        full_steps=place.step_tokens > 0,
        tpot_at_load_s=at_load_s,
        layer_ms=_layer_ms(coupled.cluster, batch),
        assumptions=assumptions(inputs, batch * place.num_decoding, coupled=True),
        **shared,
    )


def _layer_ms(cluster: Cluster, batch: float) -> dict[str, float]:
    stages = cluster.stages
    times_s = {
        "slo_layer": cluster.layer_budget_s,
        "attention": stages.attention_s(batch),
        "experts": stages.experts_s(batch),
        "deltas": stages.local_deltas_s(stages.prompts.step(batch)),
    }
    return {name: time_s * MS for name, time_s in times_s.items()}
