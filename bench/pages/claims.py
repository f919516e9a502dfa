# SPDX-License-Identifier: Apache-2.0
"""The main claims as one list, and failures under chaos: docs/results.md and docs/results/serving.md."""

from __future__ import annotations

from statistics import median

from bench.cluster.cluster_plan import PADDED, TRUE_RANK
from bench.cluster.cluster_report import PLACED_NAMES, by_cell

from . import cold, engine, gpu
from .evidence import RecordError, records

CHAOS = "chaos.jsonl"


def claims() -> str:
    """A numbered line a claim."""
    base = ", ".join(
        f"{engine.over('bfloat16', 'engine base', 'transformers base', n, 0):.1f}" for n in (1, 8)
    )
    more = " and ".join(
        f"{engine.over('bfloat16', 'engine base', 'transformers base', n, 0):.1f}" for n in (16, 64)
    )
    grouped = engine.over("bfloat16", "engine", "peft grouped", 16, 8)
    mixed = engine.over("bfloat16", "engine attention", "peft mixed", 16, 8)
    beside = gpu.of_base("zipf of 8", "beside")
    shares = {model: gpu.of_roofline(model) for model in gpu.WHOLE}
    roofline = ", ".join(f"{model} reaches {min(of):.2f} to {max(of):.2f}" for model, of in shares.items())
    peer = gpu.peer_ratios()
    kernels = true_rank_gains()
    lines = (
        f"**Decode with adapters on a CPU**: {grouped:.0f} times PEFT grouped by adapter, {mixed:.1f} times "
        "PEFT's mixed batch. Two cores, 440 M parameters, bf16, 8 adapters, 16 requests "
        "([engine.jsonl](../bench/results/engine.jsonl)).",
        f"**The base model on a CPU**: {base}, {more} times transformers at 1, 8, 16 and 64 requests, same "
        "machine and record.",
        f"**Cost of adapters**: {100 * engine.cost('bfloat16', 16):.0f} % of the base model's step at 16 "
        f"requests on that CPU (goal 25 %). On an H200 {min(beside):.2f} to {max(beside):.2f} of the base "
        f"model's tokens/s, goal {gpu.GOALS['adapters']:.2f} ([gpu.jsonl](../bench/results/gpu.jsonl)).",
        f"**Decode on an H200**: {roofline} of the roofline; the goal was {gpu.GOALS['decode']:.2f} "
        "([gpu](results/gpu.md)).",
        f"**LoRA kernels on an H200**: vLLM's `fused_moe_lora` takes {min(peer):.1f} to {max(peer):.1f} "
        "times as long at experts' sites, untuned launches "
        "([lora_kernels_gpu.jsonl](../bench/results/lora_kernels_gpu.jsonl)).",
        f"**True-rank kernels**: P95 TTFT {min(kernels):.1f} to {max(kernels):.1f} times lower than with "
        "padding kernels (medians of cells). Four instances on two cores "
        "([cluster.jsonl](../bench/results/cluster.jsonl)).",
        f"**Failures**: {failures()} Demo-sized model on two cores "
        "([chaos.jsonl](../bench/results/chaos.jsonl)).",
        f"**Cold adapters with host workers**: TTFT {cold.of_resident(cold.OURS):.2f} of resident adapters, "
        f"beside {cold.of_resident(cold.ON_DEMAND):.2f} with loads that block steps (S-LoRA). Toppings' S3, "
        "emulated ([host_assisted.jsonl](../bench/results/host_assisted.jsonl)).",
    )
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def true_rank_gains() -> list[float]:
    """P95 TTFT with padding kernels over true-rank ones: the median of placed systems, a number a cell."""
    cells = by_cell(records("cluster.jsonl"))
    return [
        median(
            cells[trace, PADDED, load][name]["p95_ttft_ms"] / systems[name]["p95_ttft_ms"]
            for name in PLACED_NAMES
        )
        for (trace, kernel, load), systems in cells.items()
        if kernel == TRUE_RANK
    ]


def failures() -> str:
    """Rounds, faults, requests and complaints of chaos.  Raises RecordError after a wrong answer."""
    found = [one["result"] for one in records(CHAOS)]
    complaints = [text for one in found for text in one["complaints"]]
    if any(" is not [" in text for text in complaints):
        raise RecordError(f"{CHAOS} has wrong answers; say so on the page")
    requests, faults = sum(one["num_requests"] for one in found), sum(len(one["strikes"]) for one in found)
    slowest_s = max(strike["whole_after_s"] or 0.0 for one in found for strike in one["strikes"])
    return (
        f"{requests:,} requests in {len(found)} rounds of chaos with {faults:,} faults, no wrong answer; all "
        f"parts back within {slowest_s:.1f} s (goal 30), {len(complaints)} complaints."
    )
