"""Placements, routers and kernels of a cluster on LoRAServe's traces; see README.md.

python -m bench.cluster.bench_cluster --part measured --out FILE.jsonl [--plot FILE.png] [--quick | --tiny]
python -m bench.cluster.bench_cluster --part simulated --out FILE.jsonl [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.harness.records import environment
from moe_lora.report.results import append_result, check_targets, read_results

LEAST_AGREEMENT = 0.99
"""Share of answers that must be equal.  In fp32 a tie of two logits may fall either way where the sizes of
steps, and with them the library's dense GEMM, differ."""


def measure(out: Path | None, *, size: str, only: str | None) -> list[dict[str, Any]]:
    """Run the plan of that size; its records."""
    from .cluster_measured import run_measured  # torch, for this part only
    from .cluster_plan import FULL_PLAN, QUICK_PLAN, TINY_PLAN
    from .cluster_report import cell_tables, line

    plan = {"full": FULL_PLAN, "quick": QUICK_PLAN, "tiny": TINY_PLAN}[size]
    records: list[dict[str, Any]] = []
    env = environment(out)
    with TemporaryDirectory(prefix="moe_lora_bench_") as folder, _progress(plan.num_runs(only)) as on_run:
        for config, result in run_measured(plan, Path(folder), only, on_run):
            config = {"part": "measured", "size": size, **config}
            records.append({"kind": "measured", "config": config, "result": result, "env": env})
            if out is not None:
                append_result(out, config=config, result=result, env=env, kind="measured")
            click.echo(line(config, result))
    for text in cell_tables(records):
        click.echo(text)
    return records


@contextmanager
def _progress(num_runs: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, drawn where that is a terminal and between two runs only; else nothing but records."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    bar = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=num_runs + 2, completed=-1)
        yield lambda name: bar.update(task, advance=1, description=name, refresh=True)


def conclude(records: list[dict[str, Any]], *, as_markdown: bool, plot: Path | None) -> None:
    """What came out beside the papers; exit status 1 where systems answered differently."""
    from .cluster_claims import claims
    from .cluster_report import least_agreement, markdown

    if as_markdown:
        click.echo("\n" + markdown(records))
    click.echo("\n" + claims(records))
    if plot is not None:
        from .cluster_plot import write_plot

        write_plot(records, plot)
    agreement = least_agreement(records)
    if agreement < LEAST_AGREEMENT:
        click.echo(f"systems answered differently: only {agreement:.1%} of the answers are equal", err=True)
        sys.exit(1)


@click.command()
@click.option("--part", type=click.Choice(("measured", "simulated")), default="measured", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--quick", "size", flag_value="quick", help="A trace of each kind of result, under a minute.")
@click.option("--tiny", "size", flag_value="tiny", help="Does it run at all?")
@click.option("--full", "size", flag_value="full", default=True, hidden=True)
@click.option("--only", help="Cells whose name (trace, kernel, load, or figure 1) has this in it.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Also print the tables as markdown.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Figure of this run's records.")
@click.option(
    "--from", "source", type=click.Path(exists=True, dir_okay=False), help="Run nothing; read this."
)
def main(
    part: str,
    out: Path | None,
    size: str,
    only: str | None,
    as_markdown: bool,
    plot: Path | None,
    source: str | None,
) -> None:
    """Four instances under several placements, routers and kernels, in one run."""
    try:
        check_targets(out=out, plot=plot)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if part == "simulated":
        from bench.cluster.simulated.cluster_simulated import print_markdown, simulate

        if source is None:
            simulate(out, quick=size != "full", only=only)
        else:
            print_markdown([one for one in read_results(source) if one["config"].get("part") == "simulated"])
        return
    if source is None:
        records = measure(out, size=size, only=only)
    else:
        records = [one for one in read_results(source) if one["config"].get("part") == "measured"]
    conclude(records, as_markdown=as_markdown, plot=plot)


if __name__ == "__main__":
    main()
