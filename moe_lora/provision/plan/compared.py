# SPDX-License-Identifier: Apache-2.0
"""The cheapest of coupled instances, divided instances and instances beside a LoRA Server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from moe_lora.core.errors import SloError
from moe_lora.provision.device_profile import MissingRateError
from moe_lora.workload.traces.records import Trace

from .checked import (
    PATIENCE,
    DividedSearch,
    Loads,
    LoadsOf,
    PlaceSearch,
    checked_server_plan,
    divided_plan,
    replaced,
    smallest_place,
)
from .cluster_size import MS, Cluster
from .coupled import Apart, LargerSteps
from .coupled_search import CoupledSearch, coupled_plan
from .inputs import PlanInputs, SizedCluster
from .plan import Plan
from .verify import ARRIVALS, PlannedLoad, Replay, missed_texts, verdicts

MOST = 4
"""Models size a LoRA Server up to this factor of coupled GPUs."""
AT_SERVER = "a LoRA Server for answers, adapters of their own for instances with prompts"
FARTHEST, BUSIEST = 1.5, 1.2
"""Of LoRA Servers in place of coupled instances: beyond `checked`'s limits, as replays decide."""
BUSY = 0.8
"""Share of a server's links' time: above, a queue outgrows shorter replays."""


def checked_plan(inputs: PlanInputs, trace: Trace) -> Plan:
    """The cheapest kind of cluster; the plan holds in replays of the trace and of Poisson arrivals.

    If another device computes prompts, sizes only a LoRA Server.  Raises SloError if no kind holds,
    ConfigError for inputs without a size.
    """
    loads = Loads(inputs, trace)
    if inputs.prompts is None:
        return checked_server_plan(inputs, loads)
    cluster = Cluster(inputs)
    cluster.check_prompts()
    coupled, refused = _coupled(cluster, loads)
    coupled, apart = with_apart(cluster, loads, coupled)
    try:
        plan = _cheaper(cluster, coupled, loads) if coupled else _server_only(inputs, loads, refused, apart)
    except SloError as refusal:
        divided, why = _at_server(cluster, loads, None, "")
        if divided is None:
            nor = f". Nor do answers alone beside a LoRA Server: {why}" if why else ""
            raise SloError(f"{refusal}{nor}") from refusal
        return replace(divided, compared=f"{AT_SERVER}, as nothing else holds the load: {refusal}")
    divided, why = _at_server(cluster, loads, plan, apart)
    if divided is not None:
        other = "coupled instances take" if plan.kind == "coupled" else "a LoRA Server for prompts too takes"
        fewer = plan.total_gpus - divided.total_gpus
        return replace(divided, compared=f"{AT_SERVER}: {other} {fewer} GPUs more ({plan.total_gpus})")
    if apart and plan.kind != "coupled":
        apart = f"without a LoRA Server: {apart}"
    beside = f"beside a LoRA Server: {why}" if why else ""
    return replace(plan, apart="; ".join(filter(None, (apart, beside))))


def _at_server(cluster: Cluster, loads: Loads, than: Plan | None, apart: str) -> tuple[Plan | None, str]:
    """The division beside a LoRA Server of fewer GPUs, or the reason; "": as without one.

    apart: what holds for divisions without one.
    """
    inputs = cluster.inputs
    if inputs.instance_gpus > 1:
        return None, ""
    if inputs.rate_per_s is None or inputs.global_batch or (than and (inputs.gpus or inputs.instances)):
        return None, "not sized for a given number"
    try:
        search = DividedSearch(cluster, _server_loads(cluster, loads), farthest=FARTHEST, busiest=BUSIEST)
        if inputs.gpus:
            found = search.holding(inputs.gpus)
            if found is None:
                return None, f"no division of {inputs.gpus} GPUs holds"
            place = found
        elif than is None:
            place = smallest_place(search, None, "the models see no division that holds")
        elif not sized(search, than.total_gpus - 1):
            return None, f"by the models no division of fewer than {than.total_gpus} GPUs holds"
        else:
            found = smallest_server(search, than.total_gpus)
            if found is None:
                return None, f"no division of fewer than {than.total_gpus} GPUs holds"
            place = found
        plan = replace(divided_plan(cluster, place), checked=tuple(search.replayed(place)))
    except MissingRateError:
        return None, ""
    except SloError as refused:
        return None, f"{refused}"
    arrivals = plan.checked[-1].arrivals
    return replace(
        plan,
        apart=f"apart: {place.prefill_instances} of {place.num_instances} instances compute prompts, with "
        f"{place.slots} adapters of their own ({_numbers(plan.checked, arrivals)}, with "
        f"{ARRIVALS[arrivals]}); "
        + (f"without a LoRA Server: {apart}" if apart else _prompt_times(search.apart)),
    ), ""


def _server_loads(cluster: Cluster, loads: Loads) -> LoadsOf:
    """All requests of a check too where links are busy: their queue grows slowly."""
    assert cluster.inputs.rate_per_s is not None
    rate_per_s = cluster.inputs.rate_per_s * (1 + cluster.inputs.load_margin)

    def loads_of(place: SizedCluster) -> Iterator[PlannedLoad]:
        yield from loads.searched(rate_per_s)
        if place.layout and cluster.load_queue(place.layout, rate_per_s).utilisation > BUSY:
            yield loads.whole(rate_per_s)

    return loads_of


def _coupled(cluster: Cluster, loads: Loads) -> tuple[Plan | None, Exception | None]:
    search = CoupledSearch(cluster, loads.searched)
    try:
        place = search.smallest()
        return replace(coupled_plan(cluster, place), checked=tuple(search.replayed(place))), None
    except (SloError, MissingRateError) as refused:
        return None, refused


def with_apart(cluster: Cluster, loads: Loads, together: Plan | None) -> tuple[Plan | None, str]:
    """The plan of fewer GPUs, with prompts together with answers or apart; the reason, or "" if untried."""
    inputs = cluster.inputs
    if inputs.instance_gpus > 1 or inputs.rate_per_s is None or inputs.global_batch is not None:
        several = "instances of several GPUs move no KV"
        why = several if inputs.instance_gpus > 1 else "--global-batch states no rate of prompts"
        return together, f"not compared: {why}" if together else ""
    best, steps = together, ""
    with suppress(SloError, MissingRateError):
        larger = _fewer(CoupledSearch(cluster, loads.searched, LargerSteps(cluster)), together)
        if larger is not None:
            before = f"takes {together.total_gpus} GPUs" if together else "is refused"
            steps = f", with steps of up to {larger.max_num_batched_tokens} prompt tokens"
            steps += f" (with steps within the TPOT SLO it {before})"
            best = larger
    try:
        apart = Apart(cluster)
        search = CoupledSearch(cluster, loads.searched, apart)
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


def _server_only(inputs: PlanInputs, loads: Loads, refused: Exception | None, apart: str) -> Plan:
    try:
        plan = checked_server_plan(inputs, loads)
    except (SloError, MissingRateError) as error:
        if isinstance(error, MissingRateError) and isinstance(refused, MissingRateError):
            raise refused from error
        nor = f". Nor with prompts apart: {apart}" if apart else ""
        raise SloError(f"{refused}{nor}. Nor does a LoRA Server: {error}") from error
    return replace(plan, compared=f"a LoRA Server, as coupled instances do not hold the load: {refused}")


def _cheaper(cluster: Cluster, coupled: Plan, loads: Loads) -> Plan:
    inputs = cluster.inputs
    if inputs.global_batch is not None or inputs.gpus is not None or inputs.instances is not None:
        return _of_given(inputs, coupled, loads)
    try:
        search = PlaceSearch(cluster, _server_loads(cluster, loads), farthest=FARTHEST, busiest=BUSIEST)
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


def _of_given(inputs: PlanInputs, coupled: Plan, loads: Loads) -> Plan:
    try:
        plan = checked_server_plan(inputs, loads)
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
