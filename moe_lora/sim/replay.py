"""A plan checked by simulation: the same requests at the capacity it names, at a little less and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_lora.workload.plan import PlannedRequest

from .config import SystemConfig
from .system import simulate


@dataclass(frozen=True, kw_only=True)
class CapacityReplay:
    """A replay at one capacity.

    admitted_at_once: share of the requests that started with the first step after they came, the IAR that
    was found.  waited_for_adapter, waited_for_room: shares that waited for an adapter's slot, and for KV or
    a place in the batch.  p95_ttft_s: queue, adapter load and first decode step.  Values are None of no
    requests.
    """

    capacity: int
    num_requests: int
    admitted_at_once: float | None
    waited_for_adapter: float | None
    waited_for_room: float | None
    p95_ttft_s: float | None
    mean_tpot_s: float | None
    kind: str = "simulated"


def replay_capacity(
    config: SystemConfig,
    requests: Sequence[PlannedRequest],
    capacity: int,
    *,
    spread: float = 0.1,
    since_s: float = 0.0,
) -> list[CapacityReplay]:
    """Replays at capacity - spread, capacity and capacity + spread (a share of it, at least one slot).

    config: its own capacity is replaced; slots of each instance, or of the LoRA Server.  requests: by
    arrival, judged from since_s on, so that a system that begins empty is not.  A capacity of 1 is not
    lowered: two replays then.
    """
    step = max(1, round(spread * capacity))
    capacities = sorted({max(1, capacity - step), capacity, capacity + step})
    return [_replay(config, requests, number, since_s) for number in capacities]


def _replay(
    config: SystemConfig, requests: Sequence[PlannedRequest], capacity: int, since_s: float
) -> CapacityReplay:
    config = replace(config, adapters=replace(config.adapters, capacity=capacity))
    summary = simulate(config, requests).summary(since_s)
    return CapacityReplay(
        capacity=capacity,
        num_requests=summary["num_requests"],
        admitted_at_once=summary["admitted_at_once"],
        waited_for_adapter=summary["waited_for_adapter"],
        waited_for_room=summary["waited_for_room"],
        p95_ttft_s=summary["p95_ttft_s"],
        mean_tpot_s=summary["mean_tpot_s"],
    )
