"""Why no layout will do: which term exceeds which budget, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .candidate import Candidate
from .cluster_size import EQ5, EQ6, FIRST_TOKEN, LOADS, MS, Cluster
from .loading import STEPS_TO_FIRST_TOKEN
from .memory import bytes_text


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
