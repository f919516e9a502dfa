# SPDX-License-Identifier: Apache-2.0
"""Is every request answered rightly or with 503 while instances, the controller and front ends are killed?

    python -m bench.cluster.check_chaos --out FILE.jsonl [--requests 500] [--rounds 3]
        [--parts none pool-1 pool-2 EP2-PP1] [--quick]

bench/README.md describes the rounds.  One JSON line per round, a summary at the end.  Exit status 1 for a
wrong, lost or hanging request, for a part missing 30 s after a fault, or for anything left behind.
"""

from __future__ import annotations

import argparse
import random
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
from tests.dist.chaos import (
    FAULTS,
    HOLDER_FAULTS,
    HOST_FAULTS,
    OPERATOR_FAULTS,
    PAUSED_FAULTS,
    SERVER_FAULTS,
    TOLD_FAULTS,
    ChaosPlan,
    ChaosReport,
    run_chaos,
)
from tests.dist.chaos_host import has_namespaces, in_own_namespace
from tests.dist.chaos_model import ask_undisturbed, make_chaos_model

PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "none": ({}, ()),
    "pool-1": ({"pool_replicas": 1}, HOLDER_FAULTS),
    "pool-2": ({"pool_replicas": 2}, HOLDER_FAULTS),
    "EP2-PP1": ({"lora_server": "EP2-PP1"}, SERVER_FAULTS),
}
"""Parts of a plan beside the instances, and their faults."""
RECOVERY_S = 30.0
"""Limit for the return of all parts after a fault."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested rounds; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--requests", type=int, default=500, help="of each round, at least")
    parser.add_argument("--rounds", type=int, default=3, help="for each of --parts")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        choices=list(PARTS),
        help="where adapters are: at each instance, in a pool with one holder or two, on a LoRA Server",
    )
    parser.add_argument("--faults", nargs="+", help="these, in this order  [default: all, at random]")
    parser.add_argument("--quick", action="store_true", help="one round of four faults: does it run?")
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="what the processes wrote")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.in_namespace and has_namespaces():
        words = sys.argv[1:] if arguments is None else list(arguments)
        return in_own_namespace("bench.cluster.check_chaos", [*words, "--in-namespace"])
    if not options.in_namespace:
        print("without mount namespaces (unshare --user --mount): what a host lacks is left out")
    plans = [
        plan_of(options.requests, options.seed + number, part, of_host=options.in_namespace)
        for number in range(options.rounds)
        for part in options.parts
    ]
    if options.faults:
        plans = [replace(plan, faults=tuple(options.faults)) for plan in plans]
    if options.quick:
        plans = [replace(plans[0], num_requests=100, faults=plans[0].faults[:4])]
    reports = run_all(plans, options.out, options.keep_logs)
    summarise(plans, reports)
    return 1 if any(report.complaints for report in reports) else 0


def plan_of(num_requests: int, seed: int, part: str, *, of_host: bool) -> ChaosPlan:
    """All faults of this part, in an order drawn from the seed."""
    found, more = PARTS[part]
    faults = [*FAULTS, *TOLD_FAULTS, *PAUSED_FAULTS, *OPERATOR_FAULTS, *more]
    faults += HOST_FAULTS if of_host else ()
    random.Random(seed).shuffle(faults)
    plan = ChaosPlan(num_requests=num_requests, faults=tuple(faults), seed=seed, recovery_s=RECOVERY_S)
    return replace(plan, **found)


def run_all(plans: Sequence[ChaosPlan], out: Path, logs: Path | None) -> list[ChaosReport]:
    """The report of each plan, written to `out` and printed on arrival."""
    record, console = Recorder(out), Console()
    reports = []
    with tempfile.TemporaryDirectory(prefix="moe_lora-") as name:
        folder = Path(name)
        with redirect_stderr(StringIO()):  # progress bars of transformers
            model = make_chaos_model(folder)
        questions = ask_undisturbed(model, plans[0].seed)
        for number, plan in enumerate(plans):
            report = run_chaos(model, questions, (logs or folder) / f"round-{number}", plan)
            config = {"requests": plan.num_requests, "seed": plan.seed, "part": part_of(plan)}
            record(config, as_result(report))
            tell(console, plan, report)
            reports.append(report)
    return reports


def part_of(plan: ChaosPlan) -> str:
    return plan.lora_server or (f"pool-{plan.pool_replicas}" if plan.pool_replicas else "none")


def as_result(report: ChaosReport) -> dict[str, Any]:
    """Fields of a round's `result`."""
    return {
        "strikes": [
            {
                "fault": one.fault,
                "victims": list(one.victims),
                "after_s": round(one.at_s - report.began_s, 1),
                "after_requests": one.after,
                "lasted_s": round(one.over_s - one.at_s, 1),
                "whole_after_s": round(one.whole_s - one.over_s, 1),
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
        "moved_by_order": dict(report.ordered),
        "fetches": report.fetches,
        "complaints": report.complaints,
    }


def tell(console: Console, plan: ChaosPlan, report: ChaosReport) -> None:
    """Print actions with their times, and faults."""
    console.print(f"seed {plan.seed}, {part_of(plan)}", highlight=False)
    for strike in as_result(report)["strikes"]:
        console.print(
            f"  {strike['after_s']:7.1f} s, after {strike['after_requests']:5} requests: {strike['fault']} "
            f"({', '.join(strike['victims'])}), whole again after {strike['whole_after_s']} s",
            highlight=False,
        )
    for complaint in report.complaints:
        console.print(f"  WRONG: {complaint}", highlight=False, markup=False)
    if report.complaints:
        console.print(report.log_end, highlight=False, markup=False)


def summarise(plans: Sequence[ChaosPlan], reports: Sequence[ChaosReport]) -> None:
    """Print a line for each round."""
    names = ("answered", "refused", "cut", "resent", "published", "tables", "moves", "migrations")
    table = Table("seed", "part", *names, "moved by order", "from peers", "from disk", "complaints")
    for plan, report in zip(plans, reports, strict=True):
        result = as_result(report)
        table.add_row(
            str(plan.seed),
            part_of(plan),
            *(str(result[name]) for name in names),
            str(report.ordered.total()),
            *(str(report.fetches.get(source, 0)) for source in ("peer", "disk")),
            str(len(report.complaints)),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
