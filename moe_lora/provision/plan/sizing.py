"""The smallest LoRA Server for a load, and the smallest cluster (InfiniLoRA section 4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_lora.core.errors import SloError
from moe_lora.dist.lora_server.protocol.partition import Layout
from moe_lora.provision.admission.admitted import Admitted, largest_load

from .cluster_size import CONSTRAINTS, EQ5, EQ6, FIRST_TOKEN, LOADS, MEMORY, MS, Cluster, largest
from .memory import STEPS_TO_FIRST_TOKEN, LoadQueue, bytes_text, kv_requests
from .stages import ServerRound

# How one layout of a LoRA Server fares under a load: equations 5 and 6, memory, the first token.


MOST_ROWS = 1024
ROUND = 8
CapacityOf = Callable[[float], int]
"""M* of a global batch."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout under one load: what fits, how long a round takes, and which constraints it meets.

    batch: rows of each instance.  capacity: adapters that the load needs.  step_s: of an instance, waits for
    the loads of `queue` included.  p95_ttft_s: of requests that find a slot.
    """

    layout: Layout
    batch: float
    capacity: int
    slots: int
    round: ServerRound
    step_s: float
    queue: LoadQueue
    p95_ttft_s: float
    met: Mapping[str, bool]

    @property
    def feasible(self) -> bool:
        return all(self.met.values())


def candidate(cluster: Cluster, layout: Layout, capacity: int, num_instances: int, batch: float) -> Candidate:
    """How this layout fares with M = capacity and L = num_instances of `batch` rows each."""
    served = cluster.stages.server(layout.ep, batch)
    slots = cluster.slots(layout)
    step_s, queue = cluster.step_s(layout, num_instances, batch)
    first_load_s, steps_s = cluster.first_token_s(layout, cluster.tpot_s(layout.ep, batch))
    p95_ttft_s = first_load_s + queue.p95_ttft_s(step_s, num_instances)
    return Candidate(
        layout=layout,
        batch=batch,
        capacity=capacity,
        slots=slots,
        round=served,
        step_s=step_s,
        queue=queue,
        p95_ttft_s=p95_ttft_s,
        met={
            MEMORY: slots >= capacity,
            LOADS: p95_ttft_s <= cluster.slo_ttft_s and step_s <= cluster.slo_tpot_s,
            FIRST_TOKEN: first_load_s + steps_s <= cluster.slo_ttft_s,
            **_equations(cluster, layout, num_instances, batch),
        },
    )


def _equations(cluster: Cluster, layout: Layout, num_instances: int, batch: float) -> dict[str, bool]:
    """Whether (5) and (6) hold."""
    served = cluster.stages.server(layout.ep, batch)
    return {
        EQ5: served.total_s <= cluster.ffn_budget_s(batch),
        EQ6: served.longest[1] * math.ceil(num_instances / layout.pp) <= cluster.layer_budget_s,
    }


def candidates(cluster: Cluster, capacity_of: CapacityOf, num_instances: int) -> list[Candidate]:
    """Every layout with the batch that it keeps running, but those whose batch the base model or KV forbid.

    Where only the waits for loads make a batch too large, it is the one without them, and LOADS is not met.
    M* is asked for only of layouts that meet all but memory, up to the first that does that too; beyond, it
    is that one's, and of the others the one of the batch without loads.
    """
    alone = {layout.ep: cluster.batch(layout.ep, num_instances) for layout in cluster.layouts}
    found = [
        _loaded(cluster, layout, num_instances, alone[layout.ep])
        for layout in cluster.layouts
        if alone[layout.ep] <= cluster.max_batch[0]
    ]
    if not any(one.feasible for one in found):
        return found
    fewest: int | None = None
    sized = []
    for one in found:
        loaded = one.feasible and (fewest is None or one.layout.num_ranks == fewest)
        batch = one.batch if loaded else alone[one.layout.ep]
        needed = with_capacity(one, capacity_of(batch * num_instances))
        if needed.feasible and fewest is None:
            fewest = one.layout.num_ranks
        sized.append(needed)
    return sized


def with_capacity(one: Candidate, capacity: int) -> Candidate:
    """The same, when so many adapters must be resident."""
    return replace(one, capacity=capacity, met={**one.met, MEMORY: one.slots >= capacity})


def _loaded(cluster: Cluster, layout: Layout, num_instances: int, alone: float) -> Candidate:
    """With the batch that steps and loads keep running; alone: the one without loads."""
    batch = cluster.batch(layout.ep, num_instances, layout)
    if batch <= cluster.max_batch[0]:
        return candidate(cluster, layout, 1, num_instances, batch)
    one = candidate(cluster, layout, 1, num_instances, alone)
    return replace(one, met={**one.met, LOADS: False})


def most_rows(cluster: Cluster, layout: Layout, num_instances: int) -> int:
    """Most requests that an instance may decode at once: within the TPOT SLO, (5), (6) and its KV.

    MOST_ROWS at most, as an engine keeps tables of that many, but always the mean batch and four standard
    deviations of a Poisson count.  A multiple of ROUND where that is not too few.
    """

    def in_time(rows: int) -> bool:
        return cluster.base_holds(rows) and all(_equations(cluster, layout, num_instances, rows).values())

    batch = cluster.batch(layout.ep, num_instances)
    least = math.ceil(batch + 4 * math.sqrt(batch))
    room = int(kv_requests(cluster.gpu, cluster.shape, cluster.instance_gpus, cluster.context_tokens))
    most = min(MOST_ROWS, room)
    if most <= least:
        return least
    found = largest(in_time, most, least)
    return max(least, found - found % ROUND)


# Why no layout will do: which term exceeds which budget, and by how much.


def shortfall(cluster: Cluster, found: Sequence[Candidate], num_instances: int) -> str:
    """What to tell a user whose load no candidate holds.

    The first constraint that no layout meets, by the layout that comes closest; else that none meets all.
    """
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
        best = min(found, key=lambda one: one.round.longest[1] * math.ceil(num_instances / one.layout.pp))
        name, longest_s = best.round.longest
        total_s = longest_s * math.ceil(num_instances / best.layout.pp)
        return (
            f"eq. 6: {name} = {longest_s * MS:.3f} ms for each of {num_instances} instances over "
            f"{best.layout.pp} stages = {total_s * MS:.3f} ms at best ({best.layout}) exceeds SLO_Layer = "
            f"{cluster.layer_budget_s * MS:.3f} ms by {(total_s - cluster.layer_budget_s) * MS:.3f} ms; "
            "raise --slo-tpot-s"
        )
    if not any(one.met[FIRST_TOKEN] for one in found):
        return _first_token(cluster, found)
    if not any(one.met[LOADS] for one in found):
        return _loads(cluster, found)
    most = max(found, key=lambda one: one.slots)
    capacity = most.capacity
    if most.slots < capacity:
        return (
            f"memory: M* = {capacity} adapters of {bytes_text(cluster.mix.adapter_bytes(cluster.shape))}; "
            f"the largest layout, {most.layout}, holds {most.slots}, {capacity - most.slots} too few; lower "
            "--target-iar, the load or the ranks, or give more --gpus"
        )
    return (
        f"no layout meets memory (M* = {capacity}), first token, eq. 5 and 6 at once for "
        f"{num_instances} instances of {best_round.batch:.1f} rows; raise --slo-tpot-s or give more --gpus"
    )


def _loads(cluster: Cluster, found: Sequence[Candidate]) -> str:
    best = min(found, key=lambda one: one.p95_ttft_s)
    queue = best.queue
    return (
        f"loads: {queue.loads_per_s:.1f} adapters/s of {queue.load_s * MS:.1f} ms keep the links of the LoRA "
        f"Server busy for {queue.utilisation:.0%} of the time at best ({best.layout}): P95 TTFT "
        f"{best.p95_ttft_s * MS:.0f} ms and TPOT {best.step_s * MS:.0f} ms, allowed are "
        f"{cluster.slo_ttft_s * MS:.0f} and {cluster.slo_tpot_s * MS:.0f} ms; raise --slo-ttft-s, or give "
        "adapters of smaller rank, or fewer"
    )


def _first_token(cluster: Cluster, found: Sequence[Candidate]) -> str:
    terms = (cluster.first_token_s(one.layout, cluster.tpot_s(one.layout.ep, one.batch)) for one in found)
    load_s, steps_s = min(terms, key=sum)
    over_s = load_s + steps_s - cluster.slo_ttft_s
    return (
        f"TTFT SLO {cluster.slo_ttft_s:g} s: without any queueing, loading the first layer takes "
        f"{load_s * MS:.3f} ms and {STEPS_TO_FIRST_TOKEN} steps {steps_s * MS:.3f} ms, {over_s * MS:.3f} ms "
        f"too long in all; the {'load is' if load_s > steps_s else 'steps are'} the longer term; raise "
        "--slo-ttft-s"
    )


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """The chosen layout.  gpus_by_constraint: the fewest ranks that each constraint alone needs."""

    chosen: Candidate
    gpus_by_constraint: Mapping[str, int]

    @property
    def binding(self) -> str:
        """The constraint that needs most ranks; of equals the first of CONSTRAINTS."""
        return max(self.gpus_by_constraint, key=lambda name: self.gpus_by_constraint[name], default=MEMORY)


def smallest_server(
    cluster: Cluster, found: Sequence[Candidate], num_instances: int, num_gpus: int | None = None
) -> ServerSize:
    """The fewest ranks, and among their layouts the one whose round is shortest, that meet all constraints.

    found: by number of ranks.  num_gpus: exactly so many.  Among equal rounds the smaller sync scope x wins
    (table 1).  Raises SloError that says which term exceeds which budget, and by how much.
    """
    allowed = [one for one in found if num_gpus in (None, one.layout.num_ranks)]
    if not allowed:
        raise SloError(
            f"no EPx-PPy of {num_gpus} ranks fits this model and {cluster.instance_gpus} GPUs a "
            "instance; choose another number"
        )
    feasible = [one for one in allowed if one.feasible]
    if not feasible:
        raise SloError(shortfall(cluster, allowed, num_instances))
    fewest = feasible[0].layout.num_ranks
    chosen = min(
        (one for one in feasible if one.layout.num_ranks == fewest),
        key=lambda one: (one.round.total_s, one.layout.ep),
    )
    return server_size(chosen, found)


def server_size(chosen: Candidate, found: Sequence[Candidate]) -> ServerSize:
    """The layout with what each constraint alone needs, where any of `found` meets it."""
    fewest = {
        name: next((one.layout.num_ranks for one in found if one.met[name]), None) for name in CONSTRAINTS
    }
    needs = {name: num_ranks for name, num_ranks in fewest.items() if num_ranks is not None}
    return ServerSize(chosen=chosen, gpus_by_constraint=needs)


def fewest_instances(cluster: Cluster) -> int:
    """L from which on the base model's time and KV allow the load's batches on some layout."""
    degrees = {layout.ep for layout in cluster.layouts}

    def too_few(num_instances: int) -> bool:
        return all(cluster.batch(ep, num_instances) > cluster.max_batch[0] for ep in degrees)

    low, high = 0, 1
    while too_few(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if too_few(middle) else (low, middle)
    return high


def smallest_cluster(cluster: Cluster, capacity_of: CapacityOf) -> tuple[int, ServerSize]:
    """(L, server) of the fewest GPUs in all, of equals the fewest instances.

    More instances have smaller batches, quicker steps, and so fewer requests at once: where nothing holds the
    load their number grows, by an eighth a time; from the first that does, all numbers are tried that may
    save more server ranks than they cost.  Raises SloError of the last try if none does.
    """

    def size(num_instances: int) -> ServerSize:
        found = candidates(cluster, capacity_of, num_instances)
        return smallest_server(cluster, found, num_instances)

    num_instances = fewest_instances(cluster)
    failed, most = num_instances - 1, max(num_instances, math.ceil(_load(cluster, num_instances)))
    while True:
        try:
            best = num_instances, size(num_instances)
            break
        except SloError:
            if num_instances >= most:
                raise
        failed, num_instances = num_instances, min(most, num_instances + max(1, num_instances // 8))
    least = capacity_of(_load(cluster, most))
    ranks = (layout.num_ranks for layout in cluster.layouts if cluster.slots(layout) >= least)
    fewest_ranks = next(ranks, 1)
    tried = failed + 1
    while tried * cluster.instance_gpus + fewest_ranks <= _gpus(cluster, *best):
        with suppress(SloError):
            best = min(best, (tried, size(tried)), key=lambda one: (_gpus(cluster, *one), one[0]))
        tried += 1
    return best


def _load(cluster: Cluster, num_instances: int) -> float:
    """The smallest global batch of any layout."""
    return num_instances * min(cluster.batch(layout.ep, num_instances) for layout in cluster.layouts)


def _gpus(cluster: Cluster, num_instances: int, server: ServerSize) -> int:
    return num_instances * cluster.instance_gpus + server.chosen.layout.num_ranks


# A fixed number of GPUs, split between LLM instances and the LoRA Server.


@dataclass(frozen=True, kw_only=True)
class Split:
    """L instances beside a server of `layout`, and the largest load that they hold.

    global_batch: requests at once.  tokens_per_s: output tokens per second of that load.  binding: what a
    larger batch would violate first: a name of CONSTRAINTS, or "instances".
    """

    layout: Layout
    num_instances: int
    global_batch: int
    tokens_per_s: float
    binding: str


def best_split(
    cluster: Cluster,
    probabilities: NDArray[np.float64],
    target_iar: float,
    num_gpus: int,
    admitted: Admitted,
) -> Split:
    """The split of num_gpus that holds the highest rate; L = (num_gpus - m) // GPUs of an instance.

    admitted: IAR(probabilities, global batch, capacity).  Where the load is a given global batch, the split
    that holds the largest one.  Of equals the one with fewer server GPUs wins, then the one with the shorter
    round.  Raises SloError if no split works.
    """
    held: dict[tuple[int, int], int] = {}
    best: tuple[tuple[float, ...], Split] | None = None
    for layout in cluster.layouts:
        most = _fastest(cluster, layout, num_gpus)
        if most is None or (best and _value(cluster, most) < best[0][0]):
            continue
        key = cluster.slots(layout), most.global_batch
        if key not in held:
            held[key] = largest_load(probabilities, target_iar, *key, admitted)
        if not held[key]:
            continue
        split = _split(cluster, layout, most.num_instances, held[key], most.binding)
        if held[key] < most.global_batch:
            split = replace(split, binding=MEMORY)
        round_s = cluster.stages.server(layout.ep, held[key] / split.num_instances).total_s
        order = (_value(cluster, split), -layout.num_ranks, -round_s)
        if best is None or order > best[0]:
            best = (order, split)
    if best is None:
        raise SloError(
            f"--gpus {num_gpus}: no split into instances of {cluster.instance_gpus} GPUs and a LoRA Server "
            f"holds a single request within the SLOs; give more GPUs, {cluster.instance_gpus + 1} at least"
        )
    return best[1]


def _value(cluster: Cluster, split: Split) -> float:
    return split.tokens_per_s if cluster.global_batch is None else split.global_batch


def _fastest(cluster: Cluster, layout: Layout, num_gpus: int) -> Split | None:
    """The largest load within (5), (6) and the first token's time, and what stops it; None: none."""
    num_instances = (num_gpus - layout.num_ranks) // cluster.instance_gpus
    if num_instances < 1 or cluster.slots(layout) < 1:
        return None

    def met(global_batch: int) -> dict[str, bool]:
        found = candidate(cluster, layout, 1, num_instances, global_batch / num_instances).met
        return {name: found[name] for name in (FIRST_TOKEN, LOADS, EQ5, EQ6)}

    if not all(met(1).values()):
        return None
    most = num_instances * cluster.max_batch[0]
    batch = largest(lambda rows: all(met(rows).values()), most)
    if batch == most:
        return _split(cluster, layout, num_instances, batch, "instances")
    slow = next(name for name, holds in met(batch + 1).items() if not holds)
    return _split(cluster, layout, num_instances, batch, slow)


def _split(cluster: Cluster, layout: Layout, num_instances: int, global_batch: int, binding: str) -> Split:
    return Split(
        layout=layout,
        num_instances=num_instances,
        global_batch=global_batch,
        tokens_per_s=cluster.tokens_at(layout, num_instances, global_batch),
        binding=binding,
    )
