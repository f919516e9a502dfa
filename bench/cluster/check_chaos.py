"""Is every request answered rightly or with 503 while instances, the controller and front ends are killed?

    python -m bench.cluster.check_chaos --out FILE.jsonl [--requests 500] [--rounds 3]
        [--pool-replicas none 1 2]

See bench/README.md for what is done.  One JSON line per round, a summary at the end; the exit status is 1 if
any request was answered wrongly, was lost, or hung, or if anything was left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.records import Recorder
from tests.dist.chaos import FAULTS, HOLDER_FAULTS, ChaosPlan, ChaosReport, run_chaos
from tests.dist.chaos_model import ask_undisturbed, make_chaos_model

NO_POOL = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--requests", type=int, default=500, help="of each round, at least")
    parser.add_argument("--rounds", type=int, default=3, help="for each of --pool-replicas")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument(
        "--pool-replicas",
        nargs="+",
        default=[NO_POOL, "1", "2"],
        choices=[NO_POOL, "1", "2"],
        help="how many instances hold an adapter",
    )
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="what the processes wrote")
    options = parser.parse_args(arguments)
    plans = [
        plan_of(options.requests, options.seed + number, pool)
        for number in range(options.rounds)
        for pool in options.pool_replicas
    ]
    reports = run_all(plans, options.out, options.keep_logs)
    summarise(plans, reports)
    return 1 if any(report.complaints for report in reports) else 0


def plan_of(num_requests: int, seed: int, pool: str) -> ChaosPlan:
    """All faults; with a pool those of its holders too."""
    plan = ChaosPlan(num_requests=num_requests, faults=FAULTS, seed=seed)
    if pool == NO_POOL:
        return plan
    return replace(plan, faults=HOLDER_FAULTS + FAULTS, pool_replicas=int(pool))


def run_all(plans: Sequence[ChaosPlan], out: Path, logs: Path | None) -> list[ChaosReport]:
    """The report of each plan, written to `out` and told as they come."""
    record, console = Recorder(out), Console()
    reports = []
    with tempfile.TemporaryDirectory(prefix="moe_lora-") as name:
        folder = Path(name)
        with redirect_stderr(StringIO()):  # progress bars of transformers
            model = make_chaos_model(folder)
        questions = ask_undisturbed(model, plans[0].seed)
        for number, plan in enumerate(plans):
            report = run_chaos(model, questions, (logs or folder) / f"round-{number}", plan)
            config = {"requests": plan.num_requests, "seed": plan.seed, "pool_replicas": plan.pool_replicas}
            record(config, as_result(report))
            tell(console, plan, report)
            reports.append(report)
    return reports


def as_result(report: ChaosReport) -> dict[str, Any]:
    """Fields of a round's `result`."""
    return {
        "strikes": [
            {
                "fault": one.fault,
                "victims": list(one.victims),
                "after_s": round(one.at_s - report.began_s, 1),
                "after_requests": one.after,
            }
            for one in report.strikes
        ],
        "num_requests": report.num_asked,
        **{name: report.counts[name] for name in ("answered", "refused", "cut")},
        "resent": report.num_resent,
        "published": report.num_published,
        "publications_refused": report.num_refused,
        "tables": report.num_tables,
        "moves": report.num_moves,
        "migrations": report.num_migrations,
        "fetches": report.fetches,
        "complaints": report.complaints,
    }


def tell(console: Console, plan: ChaosPlan, report: ChaosReport) -> None:
    """Print what was done when, and what is wrong."""
    console.print(f"seed {plan.seed}, pool replicas {plan.pool_replicas or NO_POOL}", highlight=False)
    for strike in as_result(report)["strikes"]:
        console.print(
            f"  {strike['after_s']:7.1f} s, after {strike['after_requests']:5} requests: {strike['fault']} "
            f"({', '.join(strike['victims'])})",
            highlight=False,
        )
    for complaint in report.complaints:
        console.print(f"  WRONG: {complaint}", highlight=False, markup=False)
    if report.complaints:
        console.print(report.log_end, highlight=False, markup=False)


def summarise(plans: Sequence[ChaosPlan], reports: Sequence[ChaosReport]) -> None:
    """Print a line for each round."""
    names = ("answered", "refused", "cut", "resent", "published", "tables", "moves")
    table = Table("seed", "pool", *names, "from peers", "from disk", "complaints")
    for plan, report in zip(plans, reports, strict=True):
        result = as_result(report)
        table.add_row(
            str(plan.seed),
            str(plan.pool_replicas or NO_POOL),
            *(str(result[name]) for name in names),
            *(str(report.fetches.get(source, 0)) for source in ("peer", "disk")),
            str(len(report.complaints)),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
