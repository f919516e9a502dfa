"""Provisioning: how fast, how large and how exact its solvers are.

    python -m bench.bench_provision --out bench/results/provision.jsonl [--part solver] [--quick]

See bench/README.md for what is measured.  One JSON line per measurement; the goals are printed at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lora.report.environment import environment
from moe_lora.report.results import append_result

from . import provision_solver

PARTS: dict[str, Callable[[argparse.Namespace, provision_solver.Record], list[str]]] = {
    "solver": provision_solver.run,
}


def main() -> None:
    """Measure the parts asked for, write JSON lines, print the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    args = parser.parse_args()
    env = environment()

    def record(config: dict[str, Any], result: dict[str, Any]) -> None:
        config = {**config, "quick": args.quick}
        append_result(args.out, config=config, result=result, env=env, kind="measured")
        print(config, result, flush=True)

    lines = []
    for part in args.part or PARTS:
        lines += PARTS[part](args, record)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
