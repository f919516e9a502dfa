# SPDX-License-Identifier: Apache-2.0
"""Replays of a cluster and its load, from a steady state."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.config.plan import WorkloadOptions
from moe_lora.core.partition import Layout
from moe_lora.provision.replayed.running import SimRequest
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    PromptInstances,
    SimLoraServerConfig,
    SystemConfig,
)
from moe_lora.workload.popularity.popularity import Popularity
from moe_lora.workload.replay_plan import PlannedRequest, make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import PARTS, runs_of, spread

from .cluster_size import Cluster
from .coupled import Apart, Coupled, sizing_of
from .inputs import PlanInputs, SizedCluster
from .sizing import most_rows
from .stages import SimulatedLayers

NUM_REQUESTS = 12_000
"""Requests of a check per arrival kind."""
WARM_UP_SHARE = 0.2
ARRIVALS = {
    "trace": "the trace's own arrivals",
    "scaled": "the trace's arrivals scaled to the plan's rate",
    "poisson": "Poisson arrivals of the plan's rate",
}
TAIL = 0.05
MOST_NEXT, MOST_ENDS = 4, 32
"""Whole blocks after one of a conversation, and ends of its turns there."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of an arrival kind; None without requests."""

    arrivals: str
    num_requests: int
    admitted_at_once: float | None
    """Share with an immediate slot, the IAR."""
    waited_for_adapter: float | None
    """Share with a wait for a slot."""
    waited_for_room: float | None
    """Share with a wait for KV, batch or step tokens."""
    p95_ttft_s: float | None
    p95_decode_ttft_s: float | None
    """Without the prompt."""
    mean_tpot_s: float | None
    loads_per_s: float
    stopped: bool = False
    """Ended early, with goals out of reach."""
    kind: str = "simulated"


_SUMMARY = (
    *("num_requests", "admitted_at_once", "waited_for_adapter", "waited_for_room"),
    *("p95_ttft_s", "p95_decode_ttft_s", "mean_tpot_s"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedLoad:
    """Requests by arrival kind, and adapters by popularity."""

    rate_per_s: float
    """Of Poisson arrivals."""
    requests: Mapping[str, Sequence[PlannedRequest]]
    popular: Sequence[str]


def planned_load(
    inputs: PlanInputs, rate_per_s: float, trace: Trace, *, num_requests: int | None = None, seed: int = 0
) -> PlannedLoad:
    """Requests of each arrival kind, NUM_REQUESTS by default.

    Adapters come from the trace if the popularity does, else from a draw.
    """
    num_requests = NUM_REQUESTS if num_requests is None else num_requests
    total = len(trace.requests)
    trace = replace(trace, requests=tuple(spread(trace.requests, total, num_requests)))
    if inputs.adapters_are_traces:
        popularity = None
        counts = Counter(one.adapter for one in trace.requests if one.adapter is not None)
        popular = [name for name, _ in counts.most_common()]
    else:
        names = tuple(str(index) for index in range(len(inputs.probabilities)))
        popularity = Popularity(names, tuple(inputs.probabilities.tolist()))
        popular = [names[index] for index in np.argsort(-inputs.probabilities, kind="stable")]
        trace = trace.without_adapters()
    kinds = {}
    if trace.has_arrival_times and trace.requests[-1].arrival_s > trace.requests[0].arrival_s:
        own = inputs.trace_rate_per_s
        if own is not None:
            own *= 1 + inputs.load_margin
            kinds["trace"] = WorkloadOptions(request_rate_per_s=own, seed=seed)
        if own is None or not math.isclose(own, rate_per_s):
            kinds["scaled"] = WorkloadOptions(request_rate_per_s=rate_per_s, seed=seed)
    kinds["poisson"] = WorkloadOptions(
        arrivals="gamma", request_rate_per_s=rate_per_s, num_requests=num_requests, seed=seed
    )
    repeated = replace(trace, requests=tuple(islice(_repeated(trace.requests), num_requests)))
    runs = runs_of(total, num_requests) if total >= num_requests else runs_of(num_requests, num_requests)
    even = _even(repeated, runs) if len(trace.requests) * PARTS > num_requests else repeated
    return PlannedLoad(
        rate_per_s=rate_per_s,
        requests={
            kind: _by_conversation(plan) if popularity else plan
            for kind, options in kinds.items()
            for plan in [make_plan(even if kind == "scaled" else repeated, options, popularity)]
        },
        popular=popular,
    )


def _even(trace: Trace, runs: Sequence[int]) -> Trace:
    """The same rate in each run: a day's curve goes, bursts within a run stay."""
    number = len(trace.requests)
    ends = np.array([0, *np.flatnonzero(np.diff(np.resize(runs, number))), number - 1])
    times = np.array([one.arrival_s for one in trace.requests])
    pairs = zip(trace.requests, np.interp(times, times[ends], ends).tolist(), strict=True)
    return replace(trace, requests=tuple(replace(one, arrival_s=at_s) for one, at_s in pairs))


def _by_conversation(requests: list[PlannedRequest]) -> list[PlannedRequest]:
    """One drawn adapter a conversation: KV depends on the adapter.

    A block before more others (a system prompt) joins none.
    """
    following: defaultdict[int, set[int]] = defaultdict(set)
    ends = Counter(block for one in requests for block in one.hash_ids[-2:])
    for one in requests:
        for block, after in pairwise(one.hash_ids[:-1]):
            following[block].add(after)
    shared = {block for block, number in ends.items() if number > MOST_ENDS}
    shared |= {block for block, after in following.items() if len(after) > MOST_NEXT}
    adapters: dict[int, str | None] = {}
    found = []
    for one in requests:
        path = (*one.hash_ids, ~one.index)
        place = max((number for number, block in enumerate(path, 1) if block in shared), default=0)
        found.append(replace(one, adapter=adapters.setdefault(path[place], one.adapter)))
    return found


def replays(
    cluster: Cluster, place: SizedCluster, load: PlannedLoad, *, to_the_end: bool = True
) -> list[Replay]:
    """A replay per arrival kind, without judging the first fifth.

    to_the_end: False stops at the first with goals out of reach.
    """
    config = system_of(cluster, place, load.popular)
    found = []
    for arrivals, requests in load.requests.items():
        begun = under_way(cluster, place, load, requests, config.instance.max_num_seqs)
        since_s = requests[0].arrival_s + WARM_UP_SHARE * (requests[-1].arrival_s - requests[0].arrival_s)
        watch = None if to_the_end else _Watch(cluster.inputs, requests, since_s)
        result = simulate(config, [*begun, *requests], watch)
        summary = result.summary(since_s)
        loads_per_s = result.num_loads / min(result.end_s, requests[-1].arrival_s)
        values = {name: summary[name] for name in _SUMMARY}
        if cluster.inputs.prompts is not None and values["waited_for_adapter"] is not None:
            values["admitted_at_once"] = 1 - values["waited_for_adapter"]
        found.append(Replay(arrivals=arrivals, loads_per_s=loads_per_s, stopped=result.stopped, **values))
        if result.stopped:
            break
    return found


def under_way(
    cluster: Cluster,
    place: SizedCluster,
    load: PlannedLoad,
    requests: Sequence[PlannedRequest],
    max_num_seqs: int,
) -> list[PlannedRequest]:
    """Running requests at the first arrival, with computed prompts."""
    rows = min(_running(cluster, place), max_num_seqs)
    share = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s) / load.rate_per_s
    begun = _under_way(requests, round(rows * place.num_decoding * share))
    if cluster.inputs.prompts is None:
        return begun
    return [replace(one, prompt_tokens=1, hash_ids=()) for one in begun]


def _running(cluster: Cluster, place: SizedCluster) -> float:
    if place.layout is None:
        return sizing_of(cluster, place).batch(place.num_decoding)
    cluster = Apart(cluster).cluster if place.prefill_instances else cluster
    return cluster.batch(place.layout, place.num_decoding, loads=True)


def system_of(cluster: Cluster, place: SizedCluster, popular: Sequence[str]) -> SystemConfig:
    """Instances, and a LoRA Server, slots on each instance, or both for a division beside a server."""
    if place.layout is None:
        return _coupled_system(cluster, place, popular)
    if place.prefill_instances:
        return _divided_system(cluster, place, popular)
    inputs, layout = cluster.inputs, place.layout
    max_num_seqs = most_rows(cluster, layout, place.num_instances)
    slots = min(cluster.slots(layout), len(inputs.probabilities))
    return SystemConfig(
        num_instances=place.num_instances,
        instance=_instance(cluster, place, max_num_seqs, cluster.kv_requests),
        adapters=SimLoraServerConfig(
            capacity=slots,
            num_stages=layout.pp,
            load_bytes_per_s=inputs.adapter_bytes / cluster.load_s(layout),
            prefetched=popular[:slots],
        ),
        adapter_bytes=inputs.adapter_bytes,
    )


def _coupled_system(cluster: Cluster, place: SizedCluster, popular: Sequence[str]) -> SystemConfig:
    coupled = sizing_of(cluster, place)
    return SystemConfig(
        num_instances=place.num_instances,
        instance=_instance(cluster, place, coupled.most_rows(place), coupled.kv_requests(place.slots)),
        adapters=_local(coupled, place, popular),
        adapter_bytes=cluster.inputs.adapter_bytes,
        prefill=coupled.prefill(place),
    )


def _local(coupled: Coupled, place: SizedCluster, popular: Sequence[str]) -> LocalConfig:
    load_s = coupled.load_s(place.slots)
    return LocalConfig(
        capacity=place.slots,
        load_bytes_per_s=coupled.cluster.inputs.adapter_bytes / load_s if load_s else math.inf,
        blocking=False,
        prefetched=popular[: place.slots],
    )


def _divided_system(cluster: Cluster, place: SizedCluster, popular: Sequence[str]) -> SystemConfig:
    """Answers beside a LoRA Server; prompts with `place.slots` adapters on each of their instances."""
    apart, layout = Apart(cluster), place.layout
    assert layout is not None
    server = system_of(apart.cluster, SizedCluster(layout, place.num_decoding), popular)
    answers = replace(
        server.instance,
        profile=None,
        layers=SimulatedLayers(apart.cluster.stages, layout.ep),
        max_num_batched_tokens=max(place.step_tokens, server.instance.max_num_seqs),
    )
    prompts = replace(
        answers,
        layers=SimulatedLayers(cluster.stages, None),
        kv_tokens=apart.kv_requests(place.slots) * cluster.inputs.context_tokens,
        prefix_hits=apart.prompts.prefix_hits,
    )
    return replace(
        server,
        num_instances=place.num_instances,
        instance=answers,
        prefill=apart.prefill(place),
        prompts=PromptInstances(instance=prompts, adapters=_local(apart, place, popular)),
    )


def _instance(cluster: Cluster, place: SizedCluster, max_num_seqs: int, kv_requests: float) -> InstanceConfig:
    inputs = cluster.inputs
    shared: dict[str, Any] = {
        "num_layers": inputs.shape.num_layers,
        "max_num_seqs": max_num_seqs,
        "kv_tokens": kv_requests * inputs.context_tokens,
    }
    if inputs.prompts is None:
        assert place.layout is not None
        return InstanceConfig(profile=step_profile(cluster, place.layout, max_num_seqs), **shared)
    if place.layout is None:
        ep, tokens = None, sizing_of(cluster, place).step_tokens(place)
    else:
        ep, tokens = place.layout.ep, cluster.step_tokens(place.layout.ep, _running(cluster, place))
    return InstanceConfig(
        layers=SimulatedLayers(cluster.stages, ep),
        max_num_batched_tokens=tokens,
        prefix_hits=inputs.prompts.prefix_hits,
        **shared,
    )


@dataclass(frozen=True)
class SampledStage(StageTime):
    """Exact seconds by number of rows from 0."""

    times_s: Sequence[float]

    def seconds(self, num_rows: float) -> float:
        return self.times_s[int(num_rows)]


def step_profile(cluster: Cluster, layout: Layout, most: int) -> StepProfile:
    """The plan's stage times up to `most` rows."""
    stages, rows = cluster.stages, range(1, most + 1)
    served = [stages.server(layout.ep, number) for number in rows]
    return StepProfile(
        attention=SampledStage([0.0, *map(stages.attention_s, rows)]),
        experts=SampledStage([0.0, *map(stages.experts_s, rows)]),
        lora=SampledStage([0.0, *(one.compute_s for one in served)]),
        transfer=SampledStage([0.0, *(one.receive_s + one.send_s for one in served)]),
    )


class _Watch:
    def __init__(self, inputs: PlanInputs, requests: Sequence[PlannedRequest], since_s: float) -> None:
        judged = sum(request.arrival_s >= since_s for request in requests)
        self._most_late = TAIL * judged + 1
        self._most_waiting = (1 - inputs.target_iar) * judged + 1
        self._since_s, self._slo_s = since_s, inputs.slo_ttft_s
        self._prompts = inputs.prompts is not None
        self._late = self._waiting = 0

    def __call__(self, request: SimRequest) -> bool:
        if request.arrival_s < self._since_s:
            return False
        self._late += request.ttft_s > self._slo_s
        self._waiting += request.waited_for_adapter if self._prompts else not request.at_once
        return self._late > self._most_late or self._waiting > self._most_waiting


def _under_way(requests: Sequence[PlannedRequest], number: int) -> list[PlannedRequest]:
    """`number` requests from before the first arrival.

    Length l has a share proportional to l times its frequency; the remaining part is uniform.
    """
    lengths = np.array([request.output_tokens for request in requests], dtype=float)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(requests), number, p=lengths / lengths.sum())
    left = np.ceil(lengths[chosen] * rng.uniform(size=number)).astype(int).tolist()
    return [
        replace(requests[index], index=len(requests) + row, arrival_s=0.0, output_tokens=max(1, left[row]))
        for row, index in enumerate(chosen.tolist())
    ]


def _repeated(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """The trace repeated, with a mean gap between; a single request once.

    Repetitions share no block.
    """
    if len(requests) < 2:
        return iter(requests)
    period_s = (requests[-1].arrival_s - requests[0].arrival_s) * len(requests) / (len(requests) - 1)
    blocks = 1 + max((max(one.hash_ids) for one in requests if one.hash_ids), default=0)
    return (
        replace(
            one,
            arrival_s=one.arrival_s + number * period_s,
            hash_ids=tuple(block + number * blocks for block in one.hash_ids),
        )
        for number in count()
        for one in requests
    )


class Target(NamedTuple):
    """A goal, and the replay's value.

    share: found must be at least the goal; else at most.
    """

    goal: str
    found: str
    name: str
    form: str
    share: bool = False


TARGETS = (
    Target("target_iar", "admitted_at_once", "at once", "{:.2%}", share=True),
    Target("slo_ttft_s", "p95_ttft_s", "P95 TTFT", "{:.3f} s"),
    Target("slo_tpot_s", "mean_tpot_s", "mean TPOT", "{:.4f} s"),
)
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Tolerance of a target: points of a share, part of a time."""

    share: float = 0.0
    time: float = 0.0


STRICT = Tolerance()
OTHER_DRAWS = Tolerance(share=0.02, time=0.1)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target in the replay of an arrival kind; found, held, missed_by: None without judged requests."""

    target: str
    goal: float
    arrivals: str
    found: float | None
    held: bool | None = None
    """Within the tolerance."""
    missed_by: float | None = None
    """0 if kept."""


def verdicts(inputs: PlanInputs, replays: Sequence[Replay], tolerance: Tolerance = STRICT) -> list[Verdict]:
    """A verdict per target and arrival kind."""
    return [_judged(inputs, target, replay, tolerance) for target in TARGETS for replay in replays]


def _judged(inputs: PlanInputs, target: Target, replay: Replay, tolerance: Tolerance) -> Verdict:
    goal: float = getattr(inputs, target.goal)
    found: float | None = getattr(replay, target.found)
    verdict = Verdict(target=target.goal, goal=goal, arrivals=replay.arrivals, found=found)
    if found is None:
        return verdict
    short = goal - found if target.share else found - goal
    missed_by = short if short > ROUNDING * goal else 0.0
    allowed = tolerance.share if target.share else tolerance.time * goal
    return replace(verdict, held=missed_by <= allowed, missed_by=missed_by)


def holds(inputs: PlanInputs, replays: Sequence[Replay], tolerance: Tolerance = STRICT) -> bool:
    """True if every replay ended and kept every target."""
    judged = verdicts(inputs, replays, tolerance)
    return not any(one.stopped for one in replays) and all(one.held is not False for one in judged)


def missed_texts(judged: Iterable[Verdict]) -> list[str]:
    """Missed targets with amount and arrival kind."""
    by_goal = {target.goal: target for target in TARGETS}
    said = []
    for verdict in judged:
        if verdict.held is False:
            target, missed_by = by_goal[verdict.target], verdict.missed_by or 0.0
            short = f"{100 * missed_by:.2f} points" if target.share else target.form.format(missed_by)
            found = target.form.format(verdict.found)
            said.append(f"{target.name} missed by {short} ({found}) with {ARRIVALS[verdict.arrivals]}")
    return said
