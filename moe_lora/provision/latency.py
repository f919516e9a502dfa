"""Latencies that a plan predicts."""

from __future__ import annotations

from moe_lora.core.errors import SloError
from moe_lora.dist.lora_server.partition import Layout

from .cluster import MS, Cluster
from .inputs import PlanInputs

TAIL = 0.95


def first_token_s(cluster: Cluster, layout: Layout, tpot_s: float) -> tuple[float, float]:
    """(load, step): decode TTFT of a request that starts at once is their sum.

    load: the first layer of an adapter of the largest rank, each of the x ranks of a stage loading its part;
    later layers come while earlier ones compute (InfiniLoRA section 5.3).  step: one decode step.
    """
    largest = cluster.mix.largest()
    layer_bytes = largest.bytes_on_rank(cluster.shape, Layout(ep=layout.ep)) / cluster.shape.num_layers
    return layer_bytes / cluster.gpu.load_bytes_per_s, tpot_s


def p95_ttft_s(
    cluster: Cluster, inputs: PlanInputs, layout: Layout, tpot_s: float, admitted: float
) -> float | None:
    """Decode TTFT at the 95th percentile: `first_token_s` where 95 % of requests start at once.

    admitted: share of requests that do, by the corrected estimator.  None below 95 %: the
    tail is then queueing, which only a simulation tells.  Raises SloError if even a request that does not
    queue takes longer than the SLO.
    """
    load_s, step_s = first_token_s(cluster, layout, tpot_s)
    over_s = load_s + step_s - inputs.slo_ttft_s
    if over_s > 0:
        raise SloError(
            f"TTFT SLO {inputs.slo_ttft_s:g} s: without any queueing, loading the first layer takes "
            f"{load_s * MS:.3f} ms and one step {step_s * MS:.3f} ms, {over_s * MS:.3f} ms too long in all; "
            f"the {'load' if load_s > step_s else 'step'} is the longer term; raise --slo-ttft-s"
        )
    return load_s + step_s if admitted >= TAIL else None
