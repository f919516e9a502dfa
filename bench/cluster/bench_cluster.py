# SPDX-License-Identifier: Apache-2.0
"""Placements, routers and kernels of a cluster on LoRAServe's traces; see README.md.

python -m bench.cluster.bench_cluster --part measured --out FILE.jsonl [--plot FILE.png] [--quick]
python -m bench.cluster.bench_cluster --part simulated --out FILE.jsonl [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from bench.harness.records import Record, Recorder
from moe_lora.report.results import check_targets, read_results

LEAST_AGREEMENT = 0.99
"""Required share of equal answers.  In fp32 a tie of two logits may fall either way if steps' sizes, and with
them the library's dense GEMM, differ.
"""


def measure(out: Path | None, *, quick: bool, only: str | None) -> list[Record]:
    """Run the full or the small plan; returns its records."""
    from .cluster_measured import run_measured  # torch, for this part only
    from .cluster_plan import FULL_PLAN, QUICK_PLAN
    from .cluster_report import line

    record = Recorder(out)
    with TemporaryDirectory(prefix="moe_lora_bench_") as folder:
        for config, result in run_measured(QUICK_PLAN if quick else FULL_PLAN, Path(folder), only):
            record({"part": "measured", "size": "quick" if quick else "full", **config}, result)
            click.echo(line(config, result))
    return record.records


def conclude(records: list[Record], *, plot: Path | None) -> None:
    """Results beside the papers'; exit status 1 for different answers of systems."""
    from .cluster_report import claims, least_agreement, markdown

    click.echo(f"{markdown(records)}\n\n{claims(records)}")
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
@click.option("--quick", is_flag=True, help="Does it run?")
@click.option("--only", help="Cells whose name (trace, kernel, load, or figure 1) has this in it.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Figure of this run's records.")
@click.option(
    "--from", "source", type=click.Path(exists=True, dir_okay=False), help="Run nothing; read this."
)
def main(
    part: str,
    out: Path | None,
    quick: bool,
    only: str | None,
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
            simulate(out, quick=quick, only=only)
        else:
            print_markdown([one for one in read_results(source) if one["config"].get("part") == "simulated"])
        return
    if source is None:
        records = measure(out, quick=quick, only=only)
    else:
        records = [one for one in read_results(source) if one["config"].get("part") == "measured"]
    conclude(records, plot=plot)


if __name__ == "__main__":
    main()
