# SPDX-License-Identifier: Apache-2.0
"""Expectation for `bench_disagg` from capacity alone, by arithmetic, before any run.

Requests of adapter a arrive at rate_a and stay T = answer tokens x step time; with unlimited room, the number
of a's running requests would be Poisson with mean rate_a T (M/G/inf: for any spread of lengths).  So a is in
use with probability q_a = 1 - exp(-rate_a T), and a newcomer starts at once if its adapter is in use or fewer
than M others are:
    P(at once) = sum_a p_a (q_a + (1 - q_a) P(sum of the others' Bernoulli(q) <= M - 1)).
The serviceable rate is about the highest with 0.95 (P95 of the wait is then 0; InfiniLoRA section 4.2 argues
alike), within step time and KV.  T depends on the batch: found by iteration.  The rule is stricter than the
SLO with its wait of 0.25 s: slots of a full cache free often enough for short waits, so small caches should
measure above it.

Expected on 12 GPUs, 256 adapters, Zipf 1.2, Azure's answers up to 128 tokens: coupled 50/50 (3 x 12 slots)
48 requests/s, coupled 40/60 (3 x 10) 35, disaggregated (2 instances, 90 slots) 348: a ratio of 7 and 10, less
the coupled side's gain by short waits.  DBRX is table 3's model with few slots.  The same rule for
Mixtral-8x7B on 8 GPUs (25 slots an instance, 104 on 2 server GPUs) gives 300 against 593: a ratio of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_lora.provision.admission.iar import immediate_admissibility_rate

TPOT_S = 0.1
AT_ONCE = 0.95
_STEP = 1.03


@dataclass(frozen=True)
class Expected:
    """At the highest rate that holds.  binds: its limit."""

    rate_per_s: float
    rows_per_instance: float
    tpot_s: float
    binds: str


def serviceable_rate(
    popularity: Sequence[np.ndarray],
    num_slots: int,
    num_instances: int,
    kv_requests: float,
    answer_tokens: float,
    step_s: Callable[[float], float],
) -> Expected:
    """popularity: per cache, shares of all requests by adapter.  kv_requests: per instance."""
    rate, found = 1.0, Expected(0.0, 0.0, step_s(1), "slots")
    while True:
        rows = 1.0
        for _ in range(60):
            stay_s = answer_tokens * step_s(rows)
            rows = 0.5 * rows + 0.5 * rate * stay_s / num_instances
        tpot_s = step_s(rows)
        binds = "TPOT" if tpot_s > TPOT_S else "KV" if rows > kv_requests else ""
        if not binds:
            at_once = sum(
                p.sum() * immediate_admissibility_rate(p / p.sum(), rate * stay_s * p.sum(), num_slots)
                for p in popularity
            )
            binds = "slots" if at_once < AT_ONCE else ""
        if binds:
            return Expected(found.rate_per_s, found.rows_per_instance, found.tpot_s, binds)
        found = Expected(rate, rows, tpot_s, "")
        rate *= _STEP
