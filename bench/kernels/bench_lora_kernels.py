# SPDX-License-Identifier: Apache-2.0
"""Speed of the LoRA kernels beside other ways to compute deltas and the machine's own limits; see README.md.

python -m bench.kernels.bench_lora_kernels --out FILE.jsonl [--quick | --tiny]
    [--device cpu|cuda]
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from bench.harness.records import Record, Recorder

from .lora_kernel_cases import Case, memory_bytes
from .lora_kernel_clock import COLD_BYTES, Rates
from .lora_kernel_own import own_kernels
from .lora_kernel_peers import Contestant, load_peer, torch_peers
from .lora_kernel_plan import CaseSpec, Plan, plan
from .lora_kernel_report import line, verdict_table, wrong
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
            f"{len(large)} cases need more than {limit_bytes / 1e9:.1f} GB: {'; '.join(large)}. "
            "Raise --scale, which divides rows and adapters"
        )


def cold_bytes(chosen: Plan, device: torch.device) -> int:
    """Bytes of matrices between two uses of one in a measurement."""
    return COLD_BYTES[device.type] if chosen.cold else 0


def memory_limit(device: torch.device) -> int:
    """Bytes for operands: 3 GiB on CPU, 60 % of free memory on a GPU."""
    if device.type == "cpu":
        return CPU_MEMORY_BYTES
    return int(0.6 * torch.cuda.mem_get_info(device)[0])


def run(
    chosen: Plan, contestants: Sequence[Contestant], device: torch.device, out: Path, budget_s: float
) -> list[Record]:
    """Measure case by case and append each case's records at once.  budget_s: no case starts after it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = Recorder(out, device_name=name)
    started_s = time.monotonic()
    rates = Rates(device, chosen.specs[0].dtype)
    for number, spec in enumerate(chosen.specs):
        if time.monotonic() - started_s > budget_s:
            click.echo(f"time budget of {budget_s:g} s is spent: left out the last")
            click.echo("\n".join(f"  {left.title}" for left in chosen.specs[number:]))
            break
        click.echo(spec.title)
        measured = CaseRun(Case(spec, device, cold_bytes(chosen, device)), contestants)
        for config, result in measured.measure(rates, chosen.rounds):
            click.echo(line(record(config, result)))
        del measured
        gc.collect()
    return record.records


@click.command()
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file."
)
@click.option("--quick", "mode", flag_value="quick", help="Few cases, about a minute.")
@click.option("--tiny", "mode", flag_value="tiny", help="Tiny sizes, seconds: does it run at all?")
@click.option("--full", "mode", flag_value="full", default=True, hidden=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--scale", type=int, help="Divide rows and adapters of large cases; default 16 on CPU, 1 on a GPU."
)
@click.option("--case", "wanted", default="", help="Only cases whose title contains this.")
@click.option(
    "--peer-module",
    "peer_modules",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A Python file with another contestant; repeatable.",
)
@click.option("--budget-s", type=float, help="Start no case after this; default 340 on CPU, 230 on a GPU.")
def main(
    out: Path,
    mode: str,
    device: str,
    dtype: str,
    scale: int | None,
    wanted: str,
    peer_modules: tuple[Path, ...],
    budget_s: float | None,
) -> None:
    """Measure the LoRA kernels; --out is replaced. Exits with 1 if one of our own kernels is wrong."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    try:
        chosen = plan(mode, getattr(torch, dtype), DEFAULT_SCALE[device] if scale is None else scale)
        chosen = replace(chosen, specs=tuple(spec for spec in chosen.specs if wanted in spec.title))
        refuse_too_large(chosen.specs, cold_bytes(chosen, place), memory_limit(place))
        contestants = [*own_kernels(place), *torch_peers(), *map(load_peer, peer_modules)]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not chosen.specs:
        raise click.ClickException(f"--case {wanted!r} is in no title")
    out.unlink(missing_ok=True)
    budget = DEFAULT_BUDGET_S[device] if budget_s is None else budget_s
    records = run(chosen, contestants, place, out, budget)
    click.echo(verdict_table(records))
    if any(one["config"]["role"] not in ("peer", "outside") for one in wrong(records)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
