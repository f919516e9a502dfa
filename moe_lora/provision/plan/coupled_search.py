# SPDX-License-Identifier: Apache-2.0
"""Search for the fewest coupled instances: the load holds in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moe_lora.core.errors import SloError

from .cluster_size import MS, Cluster
from .coupled import MOST_PROMPTS, Coupled
from .evidence import bound_of
from .inputs import SizedCluster
from .verify import PlannedLoad, Replay, holds, missed_texts, replays, verdicts

GROWTH = 16
"""After a miss, tries a sixteenth more instances; up to MOST times as many and MORE."""
MOST, MORE = 2, 8
WAITED = 0.01
"""Share of requests with a wait for a slot: above, the next split has more slots; below, more KV."""
IDLE = 0.02
"""Share of an instance's time: below, further instances change no step."""


class CoupledSearch:
    """Numbers of instances, their best splits, and the replays of these.

    loads_of: from a rate to the loads of every replay.
    """

    def __init__(self, cluster: Cluster, loads_of: Callable[[float], Sequence[PlannedLoad]]) -> None:
        self._cluster, self._coupled = cluster, Coupled(cluster)
        self._loads_of = loads_of
        self._loads: Sequence[PlannedLoad] = ()
        self._found: dict[SizedCluster, list[Replay]] = {}
        self._held: dict[int, SizedCluster | None] = {}

    def smallest(self) -> SizedCluster:
        """The smallest place with all goals met; for a given number of instances the best split.

        Raises SloError with the missed goals if no place meets them.
        """
        inputs = self._cluster.inputs
        number = inputs.instances
        if inputs.gpus is not None:
            number = max(1, inputs.gpus // inputs.instance_gpus)
        first = self.fewest() if number is None else number
        self._loads = self._loads_of(self._rate_per_s(first))
        if number is not None:
            found = self.holding(number)
            if found is None:
                raise SloError(self._shortfall(number))
            return found
        return self._bisected(first)

    def replayed(self, place: SizedCluster) -> list[Replay]:
        """Replays of the last load, or of the first missed load."""
        if place not in self._found:
            for load in self._loads:
                self._found[place] = replays(self._cluster, place, load, to_the_end=False)
                if not holds(self._cluster.inputs, self._found[place]):
                    break
        return self._found[place]

    def fewest(self) -> int:
        """The number of instances by the models.  Raises SloError if no number meets the goals."""
        low, high = self._least() - 1, self._least()
        while self._nearness(high) > 1:
            if self._coupled.prompt_share(high) < IDLE and high > 64:
                raise SloError(self._too_slow(high))
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._nearness(middle) > 1 else (low, middle)
        return high

    def _least(self) -> int:
        inputs = self._cluster.inputs
        bound = None if inputs.rate_per_s is None else bound_of(inputs, inputs.rate_per_s)
        if bound is None or inputs.global_batch is not None:
            return 1
        return math.ceil(bound.gpus / inputs.instance_gpus)

    def _nearness(self, num_instances: int) -> float:
        places = self._coupled.places(num_instances)
        return min(map(self._coupled.nearness, places), default=math.inf)

    def _rate_per_s(self, num_instances: int) -> float:
        inputs = self._cluster.inputs
        if inputs.global_batch is not None:
            step_s = self._coupled.tpot_s(inputs.global_batch / num_instances)
            return inputs.global_batch / (inputs.output_tokens * step_s)
        assert inputs.rate_per_s is not None
        return inputs.rate_per_s * (1 + inputs.load_margin)

    def holding(self, num_instances: int) -> SizedCluster | None:
        """A split with all goals met, of this number of instances."""
        if not self._loads:
            self._loads = self._loads_of(self._rate_per_s(num_instances))
        if num_instances not in self._held:
            self._held[num_instances] = self._first_split(self._coupled.places(num_instances))
        return self._held[num_instances]

    def _first_split(self, places: list[SizedCluster]) -> SizedCluster | None:
        if not places:
            return None
        inputs, first = self._cluster.inputs, places[0]
        if holds(inputs, self.replayed(first)):
            return first
        waited = any((one.waited_for_adapter or 0.0) > WAITED for one in self.replayed(first))
        slots = [place.slots for place in places]
        other = places[slots.index(max(slots) if waited else min(slots))]
        return other if other != first and holds(inputs, self.replayed(other)) else None

    def _bisected(self, first: int) -> SizedCluster:
        low, high, most = self._least() - 1, first, MOST * first + MORE
        while (found := self.holding(high)) is None:
            if high >= most:
                raise SloError(self._shortfall(first))
            low, high = high, min(most, high + max(1, high // GROWTH))
        if low < first:
            low = max(low, self._first_miss(low, high))
        while high - low > 1:
            middle = (low + high) // 2
            smaller = self.holding(middle)
            low, high, found = (middle, high, found) if smaller is None else (low, middle, smaller)
        return found

    def _first_miss(self, low: int, high: int) -> int:
        """A number below `high` with a missed goal, in growing steps; at least `low`."""
        step = 1
        while high - step > low and self.holding(high - step) is not None:
            step *= 2
        return max(low, high - step)

    def _shortfall(self, num_instances: int) -> str:
        inputs, places = self._cluster.inputs, self._coupled.places(num_instances)
        if not places:
            return (
                f"{num_instances} coupled instances of {inputs.instance_gpus} GPUs: "
                f"{self._why_no_place(num_instances)}; give more instances or GPUs, or lower the load"
            )
        said = missed_texts(verdicts(inputs, self.replayed(places[0])))
        return (
            f"simulated, {places[0]}: {'; '.join(said)}; raise --slo-ttft-s or --slo-tpot-s, give more "
            "GPUs, or lower the load"
        )

    def _why_no_place(self, num_instances: int) -> str:
        share = self._coupled.prompt_share(num_instances)
        if share > MOST_PROMPTS:
            return (
                f"full steps of prompts take {share:.0%} of their time, {MOST_PROMPTS:.0%} at most is planned"
            )
        gpu, name = self._cluster.inputs.profile.gpu, self._cluster.inputs.profile.name
        gpu.needed("load_bytes_per_s", name)
        return "the KV of requests that run, or of the longest one, leaves no room for an adapter"

    def _too_slow(self, num_instances: int) -> str:
        inputs, coupled, cluster = self._cluster.inputs, self._coupled, self._cluster
        places = coupled.places(num_instances)
        if not places:
            return f"coupled instances of {inputs.instance_gpus} GPUs: {self._why_no_place(num_instances)}"
        batch = coupled.batch(num_instances)
        tpot_s = coupled.tpot_s(batch)
        queue = coupled.queue(places[0], batch, tpot_s)
        ttft_s = coupled.p95_ttft_s(places[0], tpot_s, queue)
        return (
            f"coupled instances of {inputs.instance_gpus} GPUs, however many: P95 TTFT {ttft_s:.3f} s "
            f"without any queue, {cluster.prefill_s(None, tpot_s):.3f} s of it for further steps of a long "
            f"prompt (SLO "
            f"{inputs.slo_ttft_s:g} s), TPOT {tpot_s * MS:.1f} ms (SLO {inputs.slo_tpot_s * MS:g} ms); the "
            f"{'steps are' if ttft_s > inputs.slo_ttft_s else 'step is'} the longer term; raise "
            "--slo-ttft-s or --slo-tpot-s, or --instance-gpus"
        )
