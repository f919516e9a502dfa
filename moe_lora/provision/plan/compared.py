# SPDX-License-Identifier: Apache-2.0
"""The cheapest of coupled instances, divided instances and instances beside a LoRA Server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from moe_lora.core.errors import SloError
from moe_lora.provision.device_profile import MissingRateError
from moe_lora.workload.traces.records import Trace

from .checked import PATIENCE, PlaceSearch, checked_server_plan, replaced, searched_loads
from .cluster_size import MS, Cluster
from .coupled import MOST_PROMPTS, Apart, Coupled, LargerSteps, sizing_of
from .evidence import bound_of
from .inputs import PlanInputs, SizedCluster
from .plan import CHECK, TAIL, Plan, assumptions, shared_fields
from .verify import ARRIVALS, PlannedLoad, Replay, holds, missed_texts, planned_load, replays, verdicts

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
        self._loads: Sequence[PlannedLoad] = ()
        self._found: dict[SizedCluster, list[Replay]] = {}
        self._held: dict[int, SizedCluster | None] = {}

    def smallest(self) -> SizedCluster:
        """The smallest place that meets all goals.  Raises SloError with the missed goals."""
        inputs = self.cluster.inputs
        number = inputs.instances
        if inputs.gpus is not None:
            number = max(1, inputs.gpus // inputs.instance_gpus)
        if number is not None:
            found = self.holding(number)
            if found is None:
                raise SloError(self._shortfall(number))
            return found
        return self._bisected(self.fewest())

    def replayed(self, place: SizedCluster) -> list[Replay]:
        """Replays of the last load, or of the first missed."""
        if place not in self._found:
            if not self._loads:
                self._loads = self._loads_of(self._rate_per_s(place.num_instances))
            for load in self._loads:
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

    def _rate_per_s(self, num_instances: int) -> float:
        inputs = self.cluster.inputs
        if inputs.global_batch is not None:
            step_s = self._coupled.tpot_s(inputs.global_batch / num_instances)
            return inputs.global_batch / (inputs.output_tokens * step_s)
        assert inputs.rate_per_s is not None
        return inputs.rate_per_s * (1 + inputs.load_margin)

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


MOST = 4
"""Models size a LoRA Server up to this factor of coupled GPUs."""
FARTHEST, BUSIEST = 1.5, 1.2
"""Of LoRA Servers in place of coupled instances: beyond `checked`'s limits, as replays decide."""


def checked_plan(inputs: PlanInputs, trace: Trace) -> Plan:
    """The cheaper kind of cluster; the plan holds in replays of the trace and of Poisson arrivals.

    If another device computes prompts, sizes only a LoRA Server.  Raises SloError if neither kind holds,
    ConfigError for inputs without a size.
    """
    if inputs.prompts is None:
        return checked_server_plan(inputs, trace)
    cluster = Cluster(inputs)
    cluster.check_prompts()
    coupled, refused = _coupled(cluster, trace)
    coupled, apart = with_apart(cluster, trace, coupled)
    plan = _cheaper(cluster, coupled, trace) if coupled else _server_only(inputs, trace, refused, apart)
    if plan.kind == "coupled":
        return replace(plan, apart=apart)
    without = f"; without one {apart}" if apart else ""
    return replace(plan, apart=f"not sized beside a LoRA Server{without}")


def _coupled(cluster: Cluster, trace: Trace) -> tuple[Plan | None, Exception | None]:
    search = CoupledSearch(cluster, lambda rate_per_s: searched_loads(cluster.inputs, rate_per_s, trace))
    try:
        place = search.smallest()
        return replace(coupled_plan(cluster, place), checked=tuple(search.replayed(place))), None
    except (SloError, MissingRateError) as refused:
        return None, refused


def with_apart(cluster: Cluster, trace: Trace, together: Plan | None) -> tuple[Plan | None, str]:
    """The plan of fewer GPUs, with prompts together with answers or apart; the reason, or "" if untried."""
    inputs, loads_of = cluster.inputs, cache(partial(searched_loads, cluster.inputs, trace=trace))
    if inputs.instance_gpus > 1 or inputs.rate_per_s is None or inputs.global_batch is not None:
        several = "instances of several GPUs move no KV"
        why = several if inputs.instance_gpus > 1 else "--global-batch states no rate of prompts"
        return together, f"not compared: {why}" if together else ""
    best, steps = together, ""
    with suppress(SloError, MissingRateError):
        larger = _fewer(CoupledSearch(cluster, loads_of, LargerSteps(cluster)), together)
        if larger is not None:
            before = f"takes {together.total_gpus} GPUs" if together else "is refused"
            steps = f", with steps of up to {larger.max_num_batched_tokens} prompt tokens"
            steps += f" (with steps within the TPOT SLO it {before})"
            best = larger
    try:
        apart = Apart(cluster)
        search = CoupledSearch(cluster, loads_of, apart)
        divided = _fewer(search, best)
    except (SloError, MissingRateError) as refused:
        if best is None:
            return None, f"{refused}"
        return best, f"together{steps}; not compared: {refused}" if steps else f"not compared: {refused}"
    if divided is None:
        assert best is not None
        return best, f"together{steps}: {_beside(search, apart, best)}; {_prompt_times(apart)}"
    arrivals = divided.checked[-1].arrivals
    before = "is refused"
    if best is not None:
        before = f"takes {best.total_gpus} GPUs ({_numbers(best.checked, arrivals)}){steps}"
    return divided, (
        f"apart: {divided.prefill_instances} of {divided.instances} instances compute prompts "
        f"({_numbers(divided.checked, arrivals)}, with {ARRIVALS[arrivals]}); together {before}; "
        f"{_prompt_times(apart)}"
    )


def _fewer(search: CoupledSearch, than: Plan | None) -> Plan | None:
    """The smallest plan of fewer GPUs, if there is one.  Raises SloError if no number is known."""
    inputs = search.cluster.inputs
    if than is not None and (inputs.instances or inputs.gpus):
        return None
    place = search.smallest() if than is None else search.below(than.instances)
    if place is None:
        return None
    return replace(coupled_plan(search.cluster, place), checked=tuple(search.replayed(place)))


def _beside(search: CoupledSearch, apart: Apart, together: Plan) -> str:
    """Both on the same GPUs."""
    places = apart.places(together.instances)
    if not places:
        busy = f"prompts alone take {apart.prompts_share(1):.2f} of {together.instances} instances"
        return f"{busy}, and a division leaves too few for answers"
    place = search.along(places) or search.nearest(places)
    found = search.replayed(place)
    missed = "; ".join(missed_texts(verdicts(apart.cluster.inputs, found)))
    arrivals = found[-1].arrivals
    number = f"{place.prefill_instances} of {place.num_instances} instances"
    held = f"which does not hold: {missed}" if missed else "which holds"
    divided = (
        f"with {number} for prompts {_numbers(found, arrivals)} (both with {ARRIVALS[arrivals]}), {held}"
    )
    return f"{_numbers(together.checked, arrivals)}; {divided}"


def _numbers(replays: Sequence[Replay], arrivals: str) -> str:
    one = next(one for one in replays if one.arrivals == arrivals)
    if one.p95_ttft_s is None or one.mean_tpot_s is None:
        return "no request was judged"
    return f"P95 TTFT {one.p95_ttft_s * MS:.0f} ms, TPOT {one.mean_tpot_s * MS:.1f} ms"


def _prompt_times(apart: Apart) -> str:
    cluster = apart.together
    tokens, us = cluster.step_tokens(None, 0.0), 1e6
    slow, fast = (cluster.token_s(None, number) * us for number in (tokens, apart.full_step))
    return (
        f"a prompt token takes {slow:.3g} us in steps within the TPOT SLO ({tokens} tokens), {fast:.3g} us "
        f"in steps of {apart.full_step}; a mean prompt's KV moves in {apart.move_s * MS:.1f} ms"
    )


def _server_only(inputs: PlanInputs, trace: Trace, refused: Exception | None, apart: str) -> Plan:
    try:
        plan = checked_server_plan(inputs, trace)
    except (SloError, MissingRateError) as error:
        if isinstance(error, MissingRateError) and isinstance(refused, MissingRateError):
            raise refused from error
        nor = f". Nor with prompts apart: {apart}" if apart else ""
        raise SloError(f"{refused}{nor}. Nor does a LoRA Server: {error}") from error
    return replace(plan, compared=f"a LoRA Server, as coupled instances do not hold the load: {refused}")


def _cheaper(cluster: Cluster, coupled: Plan, trace: Trace) -> Plan:
    inputs = cluster.inputs
    if inputs.global_batch is not None or inputs.gpus is not None or inputs.instances is not None:
        return _of_given(inputs, coupled, trace)
    assert inputs.rate_per_s is not None
    rate_per_s = inputs.rate_per_s * (1 + inputs.load_margin)
    try:
        # All requests of a check too: the queue of a busy server grows slowly.
        loads = [*searched_loads(inputs, rate_per_s, trace), planned_load(inputs, rate_per_s, trace)]
        search = PlaceSearch(cluster, loads, farthest=FARTHEST, busiest=BUSIEST)
        if not sized(search, coupled.total_gpus - 1):
            return replace(coupled, compared=_coupled_wins(cluster, coupled, search))
        place = smallest_server(search, coupled.total_gpus)
    except (SloError, MissingRateError) as refused:
        return replace(coupled, compared=f"coupled; a LoRA Server was not compared: {refused}")
    if place is None:
        return replace(coupled, compared=_coupled_wins(cluster, coupled, search))
    plan = replace(replaced(cluster, place, None), checked=tuple(search.replayed(place)))
    fewer = coupled.total_gpus - plan.total_gpus
    return replace(
        plan,
        compared="a LoRA Server, as it holds adapters once for all instances: coupled instances take "
        f"{fewer} GPUs more ({coupled.total_gpus})",
    )


def _of_given(inputs: PlanInputs, coupled: Plan, trace: Trace) -> Plan:
    try:
        plan = checked_server_plan(inputs, trace)
    except (SloError, MissingRateError) as refused:
        return replace(coupled, compared=f"coupled, as a LoRA Server does not hold this: {refused}")
    more = plan.total_gpus - coupled.total_gpus
    if more >= 0:
        return replace(
            coupled,
            compared=f"coupled: a LoRA Server takes {plan.total_gpus} GPUs, {more} more ({plan.layout})",
        )
    return replace(
        plan, compared=f"a LoRA Server: coupled instances take {coupled.total_gpus} GPUs, {-more} more"
    )


def _window(search: PlaceSearch, number: int) -> range:
    """Numbers of GPUs from `number` down: instances and layouts make no cluster of some."""
    return range(number, max(0, number - max(PATIENCE, search.instance_gpus)), -1)


def sized(search: PlaceSearch, number: int) -> bool:
    """True if the models size a cluster of about so many GPUs."""
    return any(map(search.of, _window(search, number)))


def smallest_server(search: PlaceSearch, limit: int) -> SizedCluster | None:
    """The smallest cluster found to hold with fewer GPUs than `limit`."""
    low = _first(lambda number: sized(search, number), 1, limit - 1) or limit
    found = next(filter(None, map(search.holding, _window(search, limit - 1))), None)
    if found is None:
        return None
    place, high, low = found, found.num_gpus(search.instance_gpus), low - 1
    while high - low > 1:
        middle = (high + low) // 2
        found = search.holding(middle)
        place, high, low = (place, high, middle) if found is None else (found, middle, low)
    return _walked_down(search, place)


def _walked_down(search: PlaceSearch, place: SizedCluster) -> SizedCluster:
    """Tries fewer GPUs past as many misses as an instance has GPUs."""
    number, missed = place.num_gpus(search.instance_gpus) - 1, 0
    while missed < max(PATIENCE, search.instance_gpus) and number >= 1:
        found = search.holding(number)
        place, missed = (place, missed + 1) if found is None else (found, 0)
        number -= 1
    return place


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _coupled_wins(cluster: Cluster, coupled: Plan, search: PlaceSearch) -> str:
    total = coupled.total_gpus
    number, by = _first(lambda gpus: bool(search.of(gpus, 1.0)), total, MOST * total), " by the models"
    if number == total:
        number, by = _replayed_from(search, total), ""
    if number is None:
        far = f"a LoRA Server takes more than {(MOST if by else 2) * total} GPUs{by}"
    elif number == total:
        far = "a LoRA Server takes as many GPUs"
    else:
        far = f"a LoRA Server takes {number} GPUs{by}, {number - total} more"
    return f"coupled: {far}; {_server_cost(cluster)}"


def _replayed_from(search: PlaceSearch, number: int) -> int | None:
    most = 2 * number
    while number <= most:
        if search.holding(number) is not None:
            return number
        number += max(1, number // 4)
    return None


def _server_cost(cluster: Cluster) -> str:
    """Bytes of a prompt token beside a LoRA Server."""
    shape = cluster.inputs.shape
    chosen, width, inner = max(1, shape.num_experts_per_token), shape.hidden_size, shape.intermediate_size
    values = shape.num_layers * chosen * (2 * width + 3 * inner)
    return f"each of its rows, prompts too, moves {values * shape.dtype_bytes / 1e6:.1f} MB over the network"


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
