"""The provisioning solver on what a running system sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_lora.config.plan import ESTIMATORS

from moe_lora.provision.admission.admitted import rates_at, smallest_capacity_of
from .demand import Demand
from moe_lora.provision.admission.iar import expected_active

MARGIN = 0.1
SHRINK_ABOVE = 1.25


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the model says of a demand at a capacity.

    expected_active: adapters that at least one request uses, in the mean.  predicted_iar: share of requests
    that the capacity admits at once, by the corrected model, which is what simulation agrees with;
    predicted_iar_paper: by InfiniLoRA's equation 4, too high while requests wait.  measured_iar: the share
    that was, None if no request ended.  needed_capacity: the smallest one whose predicted_iar reaches
    target_iar.
    """

    num_requests: int
    num_adapters: int
    global_batch: float
    expected_active: float
    capacity: int
    predicted_iar: float
    predicted_iar_paper: float
    measured_iar: float | None
    target_iar: float
    needed_capacity: int

    @property
    def suffices(self) -> bool:
        """Whether the capacity reaches the target."""
        return self.predicted_iar >= self.target_iar


def outlook(demand: Demand, capacity: int, target_iar: float, num_pools: int = 1) -> Outlook:
    """Solve the provisioning model for what was seen.

    Popularity is the share of the window's requests; an adapter that none asked for has none.  With n
    requests in the window and a global batch of B, leaving those out makes the expected number of active
    adapters too small by no more than a share of about B / 2n, little as long as the window is much longer
    than a request.
    num_pools: of `capacity` adapters each, which share the requests evenly and admit each for itself (engine
    instances without a LoRA Server).
    Without requests all are admitted, and one place is enough.
    """
    batch = demand.global_batch / num_pools
    active, needed = 0.0, 1
    predicted = dict.fromkeys(ESTIMATORS, 1.0)
    if demand.num_requests and batch > 0:
        popularity = demand.counts / demand.num_requests
        active = expected_active(popularity, batch)
        predicted = rates_at(popularity, batch, capacity)
        needed = smallest_capacity_of("corrected", popularity, batch, target_iar)
    return Outlook(
        num_requests=demand.num_requests,
        num_adapters=len(demand.counts),
        global_batch=demand.global_batch,
        expected_active=active,
        capacity=capacity,
        predicted_iar=predicted["corrected"],
        predicted_iar_paper=predicted["paper"],
        measured_iar=demand.num_at_once / demand.num_timed if demand.num_timed else None,
        target_iar=target_iar,
        needed_capacity=needed,
    )


def resized(found: Outlook, *, min_capacity: int, max_capacity: int) -> int:
    """The capacity to have from now on, between the bounds.

    It changes when the present one falls short of the needed one, or exceeds it by more than a quarter
    (SHRINK_ABOVE); both lead to a tenth (MARGIN) more than needed, so that a need that moves a little
    changes nothing.  Without requests nothing is known, and nothing changes.
    """
    if not found.num_requests:
        return found.capacity
    wanted = math.ceil((1 + MARGIN) * found.needed_capacity)
    if found.suffices and found.capacity <= max(wanted, SHRINK_ABOVE * found.needed_capacity):
        wanted = found.capacity
    return max(min_capacity, min(wanted, max_capacity))
