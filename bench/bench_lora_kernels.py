"""Speed of the LoRA kernels beside other ways to compute the deltas and the machine's own limits; see README.md.

python -m bench.bench_lora_kernels --out FILE.jsonl [--plot FILE.png] [--quick | --tiny] [--device cpu|cuda]
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from moe_lora.report.environment import environment
from moe_lora.report.results import append_result, read_results

from .lora_kernel_cases import Case, memory_bytes, routing
from .lora_kernel_clock import COLD_BYTES, Rates
from .lora_kernel_own import own_kernels
from .lora_kernel_peers import Contestant, load_peer, torch_peers
from .lora_kernel_plan import CaseSpec, Plan, plan
from .lora_kernel_report import line, verdict_table, verdicts, wrong
from .lora_kernel_runs import CaseRun

DEFAULT_SCALE = {"cpu": 16, "cuda": 1}
DEFAULT_BUDGET_S = {"cpu": 340.0, "cuda": 230.0}
CPU_MEMORY_BYTES = 3 << 30


def refuse_too_large(specs: Sequence[CaseSpec], cold_bytes: int, limit_bytes: int) -> None:
    """Raise ValueError naming the cases whose operands do not fit, before any memory is taken."""
    sizes = ((spec, memory_bytes(spec, cold_bytes)) for spec in specs)
    large = [f"{spec.title}: {size / 1e9:.1f} GB" for spec, size in sizes if size > limit_bytes]
    if large:
        raise ValueError(
            f"{len(large)} cases need more than --memory-gb {limit_bytes / 1e9:.1f}: {'; '.join(large)}. "
            "Raise --scale, which divides rows and adapters, or --memory-gb"
        )


def memory_limit(device: torch.device) -> int:
    """Bytes that operands may take: 3 GiB on CPU, 60 % of what is free on a GPU."""
    if device.type == "cpu":
        return CPU_MEMORY_BYTES
    return int(0.6 * torch.cuda.mem_get_info(device)[0])


def run(
    chosen: Plan, contestants: Sequence[Contestant], device: torch.device, out: Path, options: RunOptions
) -> None:
    """Measure case by case and append each case's records at once."""
    env = {**environment(), "device_name": device_name(device)}
    started_s = time.monotonic()
    rates = Rates(device, chosen.specs[0].dtype)
    for number, spec in enumerate(chosen.specs):
        if time.monotonic() - started_s > options.budget_s:
            click.echo(f"time budget of {options.budget_s:g} s is spent: left out the last")
            click.echo("\n".join(f"  {left.title}" for left in chosen.specs[number:]))
            break
        click.echo(spec.title)
        measured = CaseRun(Case(spec, device, COLD_BYTES[device.type]), contestants, options.use_graphs)
        for record in measured.measure(rates, chosen.rounds):
            append_result(out, **record, env=env, kind="measured")
            click.echo(line(record))
        del measured
        gc.collect()
