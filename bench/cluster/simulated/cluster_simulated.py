# SPDX-License-Identifier: Apache-2.0
"""The simulated part of bench_cluster: LoRAServe's clusters at weak scaling, Toppings' 60 servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.harness.records import Recorder

from .cluster_sim_loraserve import loraserve_cells
from .cluster_sim_report import summary_tables
from .cluster_sim_toppings import toppings_cells


def simulate(out: Path | None, *, quick: bool, only: str | None) -> None:
    """Simulate all cells (those with `only` in their label), append to `out`, print tables.

    A label is the values of the cell's name, e.g. "weak_scaling padded production 4".
    """
    cells = [*loraserve_cells(quick=quick), *toppings_cells(quick=quick)]
    labelled = [(" ".join(map(str, name.values())), name, run) for name, run in cells]
    chosen = [one for one in labelled if only is None or only in one[0]]
    if not chosen:
        known = "\n".join(label for label, *_ in labelled)
        raise click.UsageError(f"--only {only!r} is in no cell's label; these are there:\n{known}")
    record = Recorder(out, kind="simulated")
    for label, name, run in chosen:
        click.echo(label)
        for config, result in run():
            record({"part": "simulated", **name, **config}, result)
    click.echo(summary_tables(record.records))


def print_markdown(records: list[dict[str, Any]]) -> None:
    """The tables of existing records."""
    click.echo(summary_tables(records, markdown=True))
