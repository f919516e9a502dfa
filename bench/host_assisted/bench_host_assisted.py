# SPDX-License-Identifier: Apache-2.0
"""Cost of a cold adapter for a request: cached, blocking loads, loads beside steps, host-assisted starts.

    python -m bench.host_assisted.bench_host_assisted --out bench/results/host_assisted.jsonl \
        [--plot FILE.png] [--quick]

Settings are Toppings' (`assisted_plan`); all systems get the same requests at the same times, by turns.  The
device is emulated: engine and its sleeps on the first core, one real worker on the last.  A layer's time is
the worker's for the same prompt times `--slack`, so one worker meets section 4.2's c, a mean prompt; longer
prompts are divided.  Refuses a setting with more than 70 % real work of the engine's core.  Also: lone cold
prompts with and without pipelining of layers (section 7.3), and, unpaced, an engine on all cores against one
with a core less and a worker.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness.records import Record, Recorder
from bench.harness.tables import table

from .assisted_device import Device, Files, scaled_device
from .assisted_plan import Cell, pipelining, settings, sweep
from .assisted_report import goals, lines
from .assisted_runs import DoesNotFitError, compare, lone, pin
from .assisted_unpaced import unpaced

NUM_ROUNDS = 7
PARTS = ("settings", "sweep", "pipelining", "unpaced")


def measure(
    cell: Cell,
    files: Files,
    core: int,
    slack: float,
    num_rounds: int,
    run: Callable[..., Coroutine[Any, Any, dict[str, Any]]] = compare,
) -> dict[str, Any]:
    """The record's result.  Raises DoesNotFitError."""
    cores = sorted(os.sched_getaffinity(0))
    adapters = files.adapters(cell)
    pin(cores[:1])
    try:
        device = scaled_device(cell, files.model(cell), adapters[0], core, slack)
        result = asyncio.run(run(cell, device, files.model(cell), adapters, core, num_rounds))
    finally:
        pin(cores)
    return result | described(device, cell)


def described(device: Device, cell: Cell) -> dict[str, Any]:
    """The device in words."""
    prefill = device.profile.prefill
    return {
        "prefill_s": device.prefill_s(cell.mean_prompt),
        "fixed_share": prefill.fixed_s / prefill.seconds(cell.mean_prompt),
        "host_s": device.host_s,
        "requests_per_s": cell.utilisation / device.prefill_s(cell.mean_prompt),
        "load_s": cell.load * device.prefill_s(cell.mean_prompt),
    }


@click.command(help=__doc__)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Figure of this run's records.")
@click.option("--quick", is_flag=True, help="One round of two settings, to see that it runs.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; all by default.")
@click.option("--cell", "names", multiple=True, help="Only the settings of these names; all by default.")
@click.option("--slack", default=1.5, help="A site's time over the worker's.")
def main(
    out: str | None,
    plot: Path | None,
    quick: bool,
    parts: tuple[str, ...],
    names: tuple[str, ...],
    slack: float,
) -> None:
    core = max(os.sched_getaffinity(0))
    torch.set_num_threads(1)  # two threads on the one pinned core would wait for each other
    parts = parts or PARTS
    recorder = Recorder(out, "emulated")
    cells = [*(settings() if "settings" in parts else ()), *(sweep() if "sweep" in parts else ())]
    if unknown := set(names) - {cell.name for cell in cells}:
        raise click.BadParameter(f"no setting is called {', '.join(sorted(unknown))}", param_hint="--cell")
    cells = [cell for cell in cells if not names or cell.name in names]
    if quick:
        cells = [replace(cell, num_requests=4) for cell in (cells if names else cells[2:3] + cells[-1:])]
    records: list[Record] = []
    refused = []
    with tempfile.TemporaryDirectory() as name:
        files = Files(Path(name))
        for cell in cells:
            try:
                result = measure(cell, files, core, slack, 1 if quick else NUM_ROUNDS)
            except DoesNotFitError as error:
                refused.append(str(error))
                click.echo(f"refused: {error}")
                continue
            config = {"bench": "host_assisted", **vars(cell), "size": cell.size.describe(), "slack": slack}
            records.append(recorder(config, result))
            click.echo(table(lines(records[-1]), f"\n{cell.name}: {rows_text(result)}"))
        for cell in (pipelining()[:1] if quick else pipelining()) if "pipelining" in parts else ():
            result = measure(cell, files, core, slack, 1 if quick else NUM_ROUNDS, lone)
            config = {"bench": "host_assisted", **vars(cell), "size": cell.size.describe(), "slack": slack}
            records.append(recorder(config, result))
            click.echo(table(lines(records[-1]), f"\n{cell.name}: {rows_text(result)}"))
        if "unpaced" in parts:
            result = unpaced(files, 1 if quick else NUM_ROUNDS)
            records.append(recorder({"bench": "host_assisted", "name": "unpaced"}, result, "measured"))
            click.echo(table(lines(records[-1]), "\nNot paced, two cores each"))
    click.echo("\n" + "\n".join(goals(records)))
    if plot is not None:
        from .assisted_plot import write_plot

        write_plot(records, plot)
    if refused:
        raise SystemExit(f"{len(refused)} settings refused, see above")


def rows_text(result: dict[str, Any]) -> str:
    """The computing parts and the scaling."""
    rows = result["lora_rows"]
    return (
        f"prefill {1e3 * result['prefill_s']:.1f} ms ({result['fixed_share']:.0%} fixed), "
        f"{result['requests_per_s']:.1f} requests/s, load {1e3 * result['load_s']:.1f} ms; rows x layers: "
        f"host {rows.get('host', 0)}, device {rows.get('local', 0)}, "
        f"engine for a worker {rows.get('fallback', 0)}"
    )


if __name__ == "__main__":
    main()
