# SPDX-License-Identifier: Apache-2.0
"""The smallest LoRA Server, and the smallest cluster (InfiniLoRA section 4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moe_lora.core.errors import SloError
from moe_lora.core.partition import Layout
from moe_lora.provision.admission.admitted import largest

from .cluster_size import CONSTRAINTS, EQ5, EQ6, FIRST_TOKEN, LOADS, MEMORY, MS, Cluster
from .memory import STEPS_TO_FIRST_TOKEN, LoadQueue, bytes_text
from .stages import ServerRound, StepTokens

MOST_ROWS = 1024
ROUND = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout under a load: capacity, times, and met constraints."""

    layout: Layout
    num_instances: int
    batch: float
    """Rows of an instance."""
    capacity: int
    """Needed adapters."""
    slots: int
    round: ServerRound
    step_s: float
    """With waits for `queue`."""
    queue: LoadQueue
    p95_ttft_s: float
    """Of requests with a slot."""
    met: Mapping[str, bool]

    @property
    def feasible(self) -> bool:
        return all(self.met.values())

    @property
    def longest_s(self) -> float:
        """Longest stage of a round over all instances (equation 6)."""
        return self.round.longest[1] * math.ceil(self.num_instances / self.layout.pp)


def candidate(cluster: Cluster, layout: Layout, capacity: int, num_instances: int, batch: float) -> Candidate:
    """This layout with M = capacity and L = num_instances of `batch` rows."""
    served = cluster.stages.server(layout.ep, batch)
    slots = cluster.slots(layout)
    step_s, queue = cluster.step_s(layout, num_instances, batch)
    first_load_s, steps_s = cluster.first_token_s(layout, cluster.tpot_s(layout.ep, batch))
    p95_ttft_s = first_load_s + queue.p95_ttft_s(step_s, num_instances)
    return Candidate(
        layout=layout,
        num_instances=num_instances,
        batch=batch,
        capacity=capacity,
        slots=slots,
        round=served,
        step_s=step_s,
        queue=queue,
        p95_ttft_s=p95_ttft_s,
        met={
            MEMORY: slots >= capacity,
            LOADS: p95_ttft_s <= cluster.inputs.slo_ttft_s and step_s <= cluster.inputs.slo_tpot_s,
            FIRST_TOKEN: first_load_s + steps_s <= cluster.inputs.slo_ttft_s,
            **_equations(cluster, layout, num_instances, batch),
        },
    )


def _equations(cluster: Cluster, layout: Layout, num_instances: int, batch: float) -> dict[str, bool]:
    served = cluster.stages.server(layout.ep, batch)
    return {
        EQ5: served.total_s <= cluster.ffn_budget_s(batch),
        EQ6: served.longest[1] * math.ceil(num_instances / layout.pp) <= cluster.layer_budget_s,
    }


def candidates(cluster: Cluster, num_instances: int) -> list[Candidate]:
    """Every layout with its steady batch, if the base model and KV allow."""
    alone = {layout: cluster.batch(layout, num_instances, loads=False) for layout in cluster.layouts}
    found = [
        loaded(cluster, layout, num_instances)
        for layout, batch in alone.items()
        if batch <= cluster.max_batch[0]
    ]
    if not any(one.feasible for one in found):
        return found
    fewest: int | None = None
    sized = []
    if cluster.inputs.prompts is not None:
        alone = dict.fromkeys(alone, max(alone[one.layout] for one in found))
    for one in found:
        own = one.feasible and fewest in (None, one.layout.num_ranks)
        batch = one.batch if own else alone[one.layout]
        needed = with_capacity(one, cluster.needed(batch * num_instances))
        if needed.feasible and fewest is None:
            fewest = one.layout.num_ranks
        sized.append(needed)
    return sized


def with_capacity(one: Candidate, capacity: int) -> Candidate:
    return replace(one, capacity=capacity, met={**one.met, MEMORY: one.slots >= capacity})


def loaded(cluster: Cluster, layout: Layout, num_instances: int) -> Candidate:
    """The layout with the steady batch of steps and loads, for one adapter.

    If waits make the batch too large: the batch without waits, and LOADS is not met.
    """
    batch = cluster.batch(layout, num_instances, loads=True)
    if batch <= cluster.max_batch[0]:
        return candidate(cluster, layout, 1, num_instances, batch)
    one = candidate(cluster, layout, 1, num_instances, cluster.batch(layout, num_instances, loads=False))
    return replace(one, met={**one.met, LOADS: False})


def most_rows(cluster: Cluster, layout: Layout, num_instances: int) -> int:
    """Most decoding requests of an instance: within the TPOT SLO, (5), (6) and KV.

    Between the mean plus four standard deviations and MOST_ROWS; a multiple of ROUND if large enough.
    """

    def in_time(rows: int) -> bool:
        if cluster.inputs.prompts is not None:
            return cluster.stages.remote_layer_s(layout.ep, StepTokens(rows)) <= cluster.layer_budget_s
        return cluster.base_holds(rows) and all(_equations(cluster, layout, num_instances, rows).values())

    batch = cluster.batch(layout, num_instances, loads=False)
    return most_running(cluster, layout.ep, batch, in_time, cluster.kv_requests)


def most_running(
    cluster: Cluster, ep: int | None, batch: float, in_time: Callable[[int], bool], kv_requests: float
) -> int:
    """See `most_rows`; ep: None: deltas on the instance."""
    running = batch * cluster.in_service
    least = math.ceil(running + 4 * math.sqrt(running))
    most = min(MOST_ROWS, int(kv_requests))
    if cluster.inputs.prompts is not None:
        most = min(most, cluster.step_tokens(ep, batch))
        least = min(least, most)
    if most <= least:
        return least
    found = largest(in_time, most, least)
    return max(least, found - found % ROUND)


def shortfall(cluster: Cluster, found: Sequence[Candidate]) -> str:
    """A refusal: the first constraint missed by every layout."""
    best_round = min(found, key=lambda one: one.round.total_s)
    if not any(one.met[EQ5] for one in found):
        batch = best_round.batch
        served, budget_s = best_round.round, cluster.ffn_budget_s(batch)
        name, longest_s = served.longest
        return (
            f"eq. 5: receive + compute + send = {served.receive_s * MS:.3f} + {served.compute_s * MS:.3f} + "
            f"{served.send_s * MS:.3f} = {served.total_s * MS:.3f} ms at a batch of {batch:.1f} (EP"
            f"{best_round.layout.ep}, the fastest) exceeds SLO_FFN = {budget_s * MS:.3f} ms (SLO_Layer "
            f"{cluster.layer_budget_s * MS:.3f} - attention {cluster.stages.attention_s(batch) * MS:.3f}) by "
            f"{(served.total_s - budget_s) * MS:.3f} ms; the longest is {name}, {longest_s * MS:.3f} ms; "
            "raise --slo-tpot-s, or add instances"
        )
    if not any(one.met[EQ6] for one in found):
        best = min(found, key=lambda one: one.longest_s)
        name, longest_s = best.round.longest
        over_s = best.longest_s - cluster.layer_budget_s
        return (
            f"eq. 6: {name} = {longest_s * MS:.3f} ms for each of {best.num_instances} instances over "
            f"{best.layout.pp} stages = {best.longest_s * MS:.3f} ms at best ({best.layout}) exceeds "
            f"SLO_Layer = {cluster.layer_budget_s * MS:.3f} ms by {over_s * MS:.3f} ms; raise --slo-tpot-s"
        )
    if not any(one.met[FIRST_TOKEN] for one in found):
        return _first_token(cluster, found)
    if not any(one.met[LOADS] for one in found):
        return _loads(cluster, found)
    most = max(found, key=lambda one: one.slots)
    capacity = most.capacity
    if most.slots < capacity:
        return (
            f"memory: M* = {capacity} adapters of {bytes_text(cluster.inputs.adapter_bytes)}; "
            f"the largest layout, {most.layout}, holds {most.slots}, {capacity - most.slots} too few; lower "
            "--target-iar, the load or the ranks, or give more --gpus"
        )
    return (
        f"no layout meets memory (M* = {capacity}), first token, eq. 5 and 6 at once for "
        f"{best_round.num_instances} instances of {best_round.batch:.1f} rows; raise "
        "--slo-tpot-s or give more --gpus"
    )


def _loads(cluster: Cluster, found: Sequence[Candidate]) -> str:
    best = min(found, key=lambda one: one.p95_ttft_s)
    queue = best.queue
    return (
        f"loads: {queue.loads_per_s:.1f} adapters/s of {queue.load_s * MS:.1f} ms keep the links of the LoRA "
        f"Server busy for {queue.utilisation:.0%} of the time at best ({best.layout}): P95 TTFT "
        f"{best.p95_ttft_s * MS:.0f} ms and TPOT {best.step_s * MS:.0f} ms, allowed are "
        f"{cluster.inputs.slo_ttft_s * MS:.0f} and {cluster.inputs.slo_tpot_s * MS:.0f} ms; raise "
        "--slo-ttft-s, or give adapters of smaller rank, or fewer"
    )


def _first_token(cluster: Cluster, found: Sequence[Candidate]) -> str:
    terms = (cluster.first_token_s(one.layout, cluster.tpot_s(one.layout.ep, one.batch)) for one in found)
    load_s, steps_s = min(terms, key=sum)
    over_s = load_s + steps_s - cluster.inputs.slo_ttft_s
    return (
        f"TTFT SLO {cluster.inputs.slo_ttft_s:g} s: without any queueing, loading the first layer takes "
        f"{load_s * MS:.3f} ms and {STEPS_TO_FIRST_TOKEN} steps {steps_s * MS:.3f} ms, {over_s * MS:.3f} ms "
        f"too long in all; the {'load is' if load_s > steps_s else 'steps are'} the longer term; raise "
        "--slo-ttft-s"
    )


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """The chosen layout."""

    chosen: Candidate
    gpus_by_constraint: Mapping[str, int]
    """Fewest ranks by one constraint."""

    @property
    def binding(self) -> str:
        """The constraint of most ranks; ties: the first."""
        return max(self.gpus_by_constraint, key=lambda name: self.gpus_by_constraint[name], default=MEMORY)


def smallest_server(cluster: Cluster, found: Sequence[Candidate], num_gpus: int | None = None) -> ServerSize:
    """The fewest ranks that meet all constraints, with the shortest round; ties: the smaller x (table 1).

    found: by number of ranks.  num_gpus: exact.  Raises SloError with the term, budget and excess.
    """
    allowed = [one for one in found if num_gpus in (None, one.layout.num_ranks)]
    if not allowed:
        raise SloError(
            f"no EPx-PPy of {num_gpus} ranks fits this model and {cluster.inputs.instance_gpus} GPUs a "
            "instance; choose another number"
        )
    feasible = [one for one in allowed if one.feasible]
    if not feasible:
        raise SloError(shortfall(cluster, allowed))
    fewest = feasible[0].layout.num_ranks
    chosen = min(
        (one for one in feasible if one.layout.num_ranks == fewest),
        key=lambda one: (one.round.total_s, one.layout.ep),
    )
    return server_size(chosen, found)


def server_size(chosen: Candidate, found: Sequence[Candidate]) -> ServerSize:
    """The layout with the ranks of each constraint met in `found`."""
    needs = {
        name: next(one.layout.num_ranks for one in found if one.met[name])
        for name in CONSTRAINTS
        if any(one.met[name] for one in found)
    }
    return ServerSize(chosen=chosen, gpus_by_constraint=needs)


def fewest_instances(cluster: Cluster) -> int:
    """Least L with batches within the base model's time and KV."""
    degrees = [layout for layout in cluster.layouts if layout.pp == 1]

    def enough(num_instances: int) -> bool:
        batches = (cluster.batch(layout, num_instances, loads=False) for layout in degrees)
        return min(batches) <= cluster.max_batch[0]

    high = 1
    while not enough(high):
        high *= 2
    return largest(lambda num_instances: not enough(num_instances), high, high // 2) + 1 if high > 1 else 1


def smallest_cluster(cluster: Cluster) -> ServerSize:
    """Fewest total GPUs; ties: fewest instances.  Raises SloError if no load holds."""

    def size(num_instances: int) -> ServerSize:
        return smallest_server(cluster, candidates(cluster, num_instances))

    def gpus(server: ServerSize) -> int:
        one = server.chosen
        return one.num_instances * cluster.inputs.instance_gpus + one.layout.num_ranks

    num_instances = fewest_instances(cluster)
    failed, most = num_instances - 1, max(num_instances, math.ceil(_load(cluster, num_instances)))
    while True:
        try:
            best = size(num_instances)
            break
        except SloError:
            if num_instances >= most:
                raise
        failed, num_instances = num_instances, min(most, num_instances + max(1, num_instances // 8))
    least = cluster.needed(_load(cluster, most))
    fewest_ranks = next((one.num_ranks for one in cluster.layouts if cluster.slots(one) >= least), 1)
    tried = failed + 1
    while tried * cluster.inputs.instance_gpus + fewest_ranks <= gpus(best):
        with suppress(SloError):
            best = min(best, size(tried), key=lambda one: (gpus(one), one.chosen.num_instances))
        tried += 1
    return best


def _load(cluster: Cluster, num_instances: int) -> float:
    batches = (cluster.batch(layout, num_instances, loads=False) for layout in cluster.layouts)
    return num_instances * min(batches)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Instances beside a server of `layout`, and the largest load."""

    layout: Layout
    num_instances: int
    global_batch: int
    tokens_per_s: float
    binding: str
    """First constraint of a larger batch, or "instances"."""


def best_split(cluster: Cluster) -> Split:
    """The split of highest rate, or of largest batch for a given global batch.

    Ties: fewer server GPUs, then the shorter round.  Raises SloError without any.
    """
    inputs = cluster.inputs
    capacity_of = cluster.capacity_of[inputs.estimator]
    held: dict[tuple[int, int], int] = {}
    best: tuple[tuple[float, ...], Split] | None = None

    def split(layout: Layout, num_instances: int, global_batch: int, binding: str) -> tuple[float, Split]:
        """With its value: the rate, or the given batch."""
        tokens_per_s = cluster.tokens_at(layout, num_instances, global_batch)
        found = Split(
            layout=layout,
            num_instances=num_instances,
            global_batch=global_batch,
            tokens_per_s=tokens_per_s,
            binding=binding,
        )
        return tokens_per_s if inputs.global_batch is None else global_batch, found

    for layout in cluster.layouts:
        fastest = _fastest(cluster, layout)
        if fastest is None or (best and split(layout, *fastest)[0] < best[0][0]):
            continue
        num_instances, most, binding = fastest
        key = cluster.slots(layout), most
        if key not in held:
            admitted = capacity_of.largest_load(cluster.slots(layout), int(most * cluster.in_service))
            held[key] = min(most, int(admitted / cluster.in_service))
        if not held[key]:
            continue
        value, found = split(layout, num_instances, held[key], MEMORY if held[key] < most else binding)
        round_s = cluster.stages.server(layout.ep, held[key] / num_instances).total_s
        order = (value, -layout.num_ranks, -round_s)
        if best is None or order > best[0]:
            best = (order, found)
    if best is None:
        raise SloError(
            f"--gpus {inputs.gpus}: no split into instances of {inputs.instance_gpus} GPUs and a LoRA Server "
            f"holds a single request within the SLOs; give more GPUs, {inputs.instance_gpus + 1} at least"
        )
    return best[1]


def _fastest(cluster: Cluster, layout: Layout) -> tuple[int, int, str] | None:
    """L, the largest load within (5), (6) and the first token's time, and the limit; None: no load."""
    assert cluster.inputs.gpus is not None
    num_instances = (cluster.inputs.gpus - layout.num_ranks) // cluster.inputs.instance_gpus
    if num_instances < 1 or cluster.slots(layout) < 1:
        return None

    def met(global_batch: int) -> dict[str, bool]:
        found = candidate(cluster, layout, 1, num_instances, global_batch / num_instances).met
        return {name: found[name] for name in (FIRST_TOKEN, LOADS, EQ5, EQ6)}

    if not all(met(1).values()):
        return None
    most = max(1, int(num_instances * cluster.max_batch[0]))
    batch = largest(lambda rows: all(met(rows).values()), most)
    slow = (name for name, holds in met(batch + 1).items() if not holds)
    return num_instances, batch, "instances" if batch == most else next(slow)
