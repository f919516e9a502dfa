# SPDX-License-Identifier: Apache-2.0
"""Figures of a bench_cluster run: latencies, SLOs, adapters, answers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lora_server.disagg_runs import cpu_s
from moe_lora.report.latency import RequestRecord, SloTargets
from moe_lora.report.run_file import summarize

from .cluster_models import TPT_RATIO
from .cluster_plan import TIMEOUT_S, Plan
from .cluster_systems import Outcome

_NO_TPOT_LIMIT_S = 1e6


def figures(plan: Plan, ttft_slo_s: float, outcome: Outcome, bare: Outcome | None) -> dict[str, Any]:
    """Of requests after the warm-up; adapters used and loaded by all.  bare: no LoRA."""
    judged = _judged(plan, outcome.records)
    last_s = max((one.timing.end_s for one in judged if one.timing is not None), default=0.0)
    slo = SloTargets(ttft_s=ttft_slo_s, tpot_s=_NO_TPOT_LIMIT_S)
    result = summarize(judged, max(last_s, plan.duration_s) - plan.warm_up_s, slo)
    # Failed requests count with the longest allowed wait.
    waited_ms = [1e3 * TIMEOUT_S if one.timing is None else one.timing.ttft_ms for one in judged]
    p95_ttft_ms = float(np.percentile(waited_ms, 95))
    return {
        key: result[key] for key in ("completed", "failed", "mean_ttft_ms", "p95_itl_ms", "mean_tpot_ms")
    } | {
        "p95_ttft_ms": p95_ttft_ms,
        "mean_tpt_ms": result["mean_tpt_ms"],
        "p99_send_delay_ms": result["p99_send_delay_ms"],
        "requests_per_s": result["request_throughput"],
        "requests_per_s_within_slo": result["request_goodput"],
        "ttft_attainment": result["slo_attainment"],
        "tpt_attainment": None if bare is None else tpt_attainment(plan, outcome, bare),
        "ttft_slo_met": p95_ttft_ms <= 1e3 * ttft_slo_s,
        "adapters_held": _held(plan, outcome),
        "adapters_used": [len(outcome.used[index]) for index in range(plan.num_instances)],
        "adapter_loads": outcome.loads,
    }


def _held(plan: Plan, outcome: Outcome) -> dict[str, float]:
    """Adapters per instance by the tables, in the mean of all instances and steps, and the most of any."""
    if not outcome.placements:
        return {"mean": float(plan.num_adapters), "most": float(plan.num_adapters)}
    return {
        "mean": float(np.mean([one.mean_held for one in outcome.placements])),
        "most": float(max(one.most_held for one in outcome.placements)),
    }


def _judged(plan: Plan, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [one for one in records if one.arrival_s >= plan.warm_up_s]


def tpt_ms(records: Sequence[RequestRecord]) -> list[float]:
    return [one.timing.tpt_ms for one in records if one.timing is not None]


def tpt_attainment(plan: Plan, outcome: Outcome, bare: Outcome) -> float:
    """Share of requests with a time per token of at most TPT_RATIO times the mean without LoRA."""
    limit_ms = TPT_RATIO * float(np.mean(tpt_ms(_judged(plan, bare.records))))
    judged = _judged(plan, outcome.records)
    return sum(tpt <= limit_ms for tpt in tpt_ms(judged)) / len(judged)


def same_answers(first: Outcome, other: Outcome) -> float | None:
    """Share of requests with equal tokens, among those answered by both."""
    both = first.answers.keys() & other.answers.keys()
    return float(np.mean([first.answers[key] == other.answers[key] for key in both])) if both else None


class Busy:
    """Load of the machine from now on, and its causes."""

    def __init__(self) -> None:
        self._before_s = self._now_s()

    def shares(self) -> dict[str, float]:
        """machine, others: of all cores; others: processes outside this one's tree.  front end: this
        process, of one core.
        """
        pairs = zip(self._now_s(), self._before_s, strict=True)
        elapsed_s, all_s, own_s, front_end_s = (now_s - before_s for now_s, before_s in pairs)
        cores_s = elapsed_s * (os.cpu_count() or 1)
        return {
            "machine_busy": all_s / cores_s,
            "others_busy": max(0.0, all_s - own_s) / cores_s,
            "front_end_busy": front_end_s / elapsed_s,
        }

    @staticmethod
    def _now_s() -> tuple[float, float, float, float]:
        fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s, cpu_s(), time.process_time()
