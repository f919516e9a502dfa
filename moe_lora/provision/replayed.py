"""A plan as the simulator runs it, and its load as requests: what `moe-lora provision --verify` compares.

Two speeds.  "sized": every step takes as long as keeps the plan's global batch running at its rate
(Little's law), so that as many requests run at once as the plan was sized for, however many do at a moment.
"predicted": steps take what the plan predicts of the requests that run, so a crowd slows itself down.

Up to three kinds of arrivals: the trace's, where the plan is for its mean or peak rate; the trace's, scaled
to the plan's rate, where that is another; and a Poisson process of the plan's rate, which is what the models
of admission assume.  Between the last two the difference is the trace's burstiness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_lora.config.plan import WorkloadOptions
from moe_lora.core.step_profile import StageTime, StepProfile
from moe_lora.dist.lora_server.partition import Layout
from moe_lora.sim.config import InstanceConfig, LoraServerConfig, SystemConfig
from moe_lora.sim.replay import CapacityReplay, replay_capacity
from moe_lora.workload.plan import PlannedRequest, make_plan
from moe_lora.workload.popularity import Popularity
from moe_lora.workload.records import Trace
from moe_lora.workload.traces import read_trace

from .cluster import Cluster
from .inputs import PlanInputs
from .memory import kv_requests
from .plan import Plan, cluster_of

NUM_REQUESTS = 20_000
WARM_UP_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A replay.  speed: "sized" or "predicted".  arrivals: "trace", "scaled" or "poisson".

    step_s: what a step takes at the batch of the plan.
    """

    speed: str
    arrivals: str
    step_s: float
    replay: CapacityReplay


def verify(inputs: PlanInputs, plan: Plan, trace: str | Path, format: str | None = None) -> list[Verified]:
    """Replays at M* - 10 %, M* and M* + 10 %, at each speed, of up to NUM_REQUESTS requests.

    Arrivals: see `planned_requests`; the first fifth of the time is not judged.
    """
    read = read_trace(trace, format, limit=NUM_REQUESTS)
    found = []
    for arrivals, requests in planned_requests(inputs, plan, read).items():
        since_s = WARM_UP_SHARE * requests[-1].arrival_s
        for speed, step_s in speeds(inputs, plan).items():
            replays = replay_capacity(
                system_of(inputs, plan, speed), requests, plan.capacity, since_s=since_s
            )
            found += [
                Verified(speed=speed, arrivals=arrivals, step_s=step_s, replay=replay) for replay in replays
            ]
    return found


def speeds(inputs: PlanInputs, plan: Plan) -> dict[str, float]:
    """Seconds of a step by speed: global batch / (rate * output tokens), and the predicted TPOT."""
    sized_s = plan.global_batch / (planned_rate(inputs, plan) * inputs.output_tokens)
    return {"sized": sized_s, "predicted": plan.tpot_s}


def planned_rate(inputs: PlanInputs, plan: Plan) -> float:
    """Requests per second: the given ones, or those that keep a given global batch running as predicted."""
    if inputs.global_batch is not None:
        return plan.global_batch / (inputs.output_tokens * plan.tpot_s)
    assert inputs.rate_per_s is not None  # PlanInputs has one of the two
    return inputs.rate_per_s


def planned_requests(inputs: PlanInputs, plan: Plan, trace: Trace) -> dict[str, Sequence[PlannedRequest]]:
    """The trace's requests, by kind of arrivals, of those that apply; lengths in the trace's order.

    Adapters are the trace's where their popularity is, else drawn from the plan's.
    """
    rate, popularity = planned_rate(inputs, plan), None
    if not inputs.adapters_are_traces:
        names = tuple(str(index) for index in range(len(inputs.probabilities)))
        popularity = Popularity(names, tuple(inputs.probabilities.tolist()))
        trace = replace(trace, requests=tuple(replace(one, adapter=None) for one in trace.requests))
    kinds = {}
    if trace.has_arrival_times and trace.requests[-1].arrival_s > trace.requests[0].arrival_s:
        own = inputs.trace_rate_per_s
        if own is not None:
            kinds["trace"] = WorkloadOptions(request_rate_per_s=own)
        if own is None or not math.isclose(own, rate):
            kinds["scaled"] = WorkloadOptions(request_rate_per_s=rate)
    kinds["poisson"] = WorkloadOptions(arrivals="gamma", request_rate_per_s=rate, num_requests=NUM_REQUESTS)
    return {kind: make_plan(trace, options, popularity) for kind, options in kinds.items()}


def system_of(inputs: PlanInputs, plan: Plan, speed: str) -> SystemConfig:
    """The plan's instances and LoRA Server, its capacity M*."""
    cluster, layout = cluster_of(inputs), Layout.parse(plan.layout)
    if speed == "predicted":
        running = planned_rate(inputs, plan) * inputs.output_tokens * plan.tpot_s
        profile = step_profile(cluster, layout, running / plan.instances)
    else:
        layer_s = speeds(inputs, plan)[speed] / inputs.shape.num_layers
        profile = StepProfile(attention=StageTime(fixed_s=layer_s))
    kv_tokens = kv_requests(cluster.gpu, inputs.shape, inputs.instance_gpus, 1.0)
    return SystemConfig(
        num_instances=plan.instances,
        instance=InstanceConfig(
            profile=profile,
            num_layers=inputs.shape.num_layers,
            max_num_seqs=plan.max_num_seqs,
            kv_tokens=kv_tokens,
        ),
        adapters=LoraServerConfig(
            capacity=plan.capacity,
            num_stages=layout.pp,
            load_bytes_per_s=layout.num_ranks * cluster.gpu.load_bytes_per_s,
        ),
        adapter_bytes=plan.bytes_per_adapter,
    )


def step_profile(cluster: Cluster, layout: Layout, batch: float) -> StepProfile:
    """Stage times as lines through those at this batch, the mean one, and at half of it."""
    stages = cluster.stages

    def transfer_s(rows: float) -> float:
        served = stages.server(layout.ep, rows)
        return served.receive_s + served.send_s

    return StepProfile(
        attention=_line(stages.attention_s, batch),
        experts=_line(stages.experts_s, batch),
        lora=_line(lambda rows: stages.server(layout.ep, rows).compute_s, batch),
        transfer=_line(transfer_s, batch),
    )


def _line(seconds: Callable[[float], float], batch: float) -> StageTime:
    whole_s, half_s = seconds(batch), seconds(batch / 2)
    fixed_s = max(0.0, 2 * half_s - whole_s)
    return StageTime(fixed_s=fixed_s, per_row_s=(whole_s - fixed_s) / batch)
