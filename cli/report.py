# SPDX-License-Identifier: Apache-2.0
"""`moe-lora report`."""

from __future__ import annotations

import click

from .errors import user_errors


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="HTML file to write.")
@click.option("--title", default="Load test")
@user_errors
def report(runs: tuple[str, ...], out: str, title: str) -> None:
    """Compare RUNS, files of `moe-lora replay --save-result`, in one HTML page and a table."""
    from rich.console import Console

    from moe_lora.report.html import write_report
    from moe_lora.report.results import check_targets
    from moe_lora.report.run_file import read_run, summary_table

    check_targets(runs, out=out)
    found = [read_run(path) for path in runs]
    write_report(out, found, title)
    Console().print(summary_table(found))
    click.echo(f"report: {out}")
