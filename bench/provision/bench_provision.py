# SPDX-License-Identifier: Apache-2.0
"""Provisioning: speed and accuracy of its solvers, and its models beside simulation.

    python -m bench.provision.bench_provision --out bench/results/provision.jsonl
        [--part solver|estimator] [--quick]

bench/README.md describes the measurements.  One JSON line per measurement; the goals are printed at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.records import environment
from moe_lora.report.results import append_result

from . import estimator_grid, provision_solver

# Its records, and its runner.
PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, provision_solver.Record], list[str]]]] = {
    "solver": ("measured", provision_solver.run),
    "estimator": ("simulated", estimator_grid.run),
}


def main() -> None:
    """Measure the parts asked for, write JSON lines, print the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    args = parser.parse_args()
    env = environment(args.out)

    lines = []
    for part in args.part or PARTS:
        kind, run = PARTS[part]

        def record(
            config: dict[str, Any], result: dict[str, Any], kind: str = kind, part: str = part
        ) -> None:
            config = {"part": part, **config, "quick": args.quick}
            append_result(args.out, config=config, result=result, env=env, kind=kind)
            print(config, result, flush=True)

        lines += run(args, record)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
