# SPDX-License-Identifier: Apache-2.0
"""Whether a checkout is as fast as an earlier one, beside it and in turn.

    python -m bench.house.house_speed --before DIR --before-python DIR/.venv/bin/python
        [--part coupled] [--quick] [--out bench/results/house_speed.jsonl]

Three processes take turns: the earlier checkout, this one, and this one again, whose ratio to itself is the
noise of the machine (A/A).  A row is no slower if its median ratio is at most 1.03, or at most what the
quartiles of the A/A ratios reach.  Processes are started anew between groups of rounds, so that one that came
out fast or slow by chance counts once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import click

from bench.harness.interleave import Contestant, interleave, ratio, repeated
from bench.harness.records import ROOT, Recorder
from moe_lora.report.results import git_state

TOLERANCE = 0.03
DRIVER = Path(__file__).with_name("house_speed_child.py")


@dataclass(frozen=True)
class Part:
    """starts: of new processes.  rounds: in each group of processes.  steps: by the beginning of a name."""

    starts: int
    rounds: int
    steps: dict[str, int]
    unit: str


PARTS = {
    "coupled": Part(3, 5, {"": 64}, "step"),
    "lora_server": Part(3, 5, {"": 64}, "step"),
    "decisions": Part(3, 9, {"routing": 20_000, "cache": 2000}, "decision"),
    "imports": Part(11, 1, {"": 1}, "import"),
    "demo": Part(1, 1, {"": 1}, "run"),
}
QUICK = {name: Part(1, 2 if part.rounds > 1 else 1, {"": 4}, part.unit) for name, part in PARTS.items()}


@dataclass(frozen=True)
class Checkout:
    tree: Path
    python: str


@contextmanager
def contestants(checkout: Checkout, part: str) -> Iterator[dict[str, Contestant]]:
    """What the part times in one new process of the checkout."""
    if part == "demo":
        make = partial(subprocess.run, ["make", "demo"], cwd=checkout.tree, check=True, stdout=DEVNULL)
        yield {"make demo": repeated(make)}
        return
    command = [checkout.python, str(DRIVER), part]
    environ = {**os.environ, "PYTHONPATH": str(checkout.tree.resolve())}
    with subprocess.Popen(
        command, cwd=checkout.tree, env=environ, text=True, stdin=PIPE, stdout=PIPE
    ) as process:

        def answer() -> Any:
            assert process.stdout is not None
            text = process.stdout.readline()
            if not text:
                raise SystemExit(f"the driver ended: {command}")
            return json.loads(text)

        def timed(what: str, num_steps: int) -> float:
            print(json.dumps({"what": what, "num_steps": num_steps}), file=process.stdin, flush=True)
            return float(answer())

        yield {name: partial(timed, name) for name in answer()}


def measure(part: str, plan: Part, before: Checkout, after: Checkout) -> dict[str, dict[str, list[float]]]:
    """Seconds a step in each round, by what was timed and by checkout."""
    found: dict[str, dict[str, list[float]]] = {}
    sides = {"before": before, "after": after, "again": after}
    if part == "demo":
        del sides["again"]
    for number in range(plan.starts):
        order = list(sides)[:: -1 if number % 2 else 1]
        with ExitStack() as stack:
            calls = {side: stack.enter_context(contestants(sides[side], part)) for side in order}
            for name in calls["before"]:
                steps = next(steps for prefix, steps in plan.steps.items() if name.startswith(prefix))
                if part in ("coupled", "lora_server", "decisions"):
                    for given in calls.values():
                        given[name](steps)
                turns = {side: (given[name], steps, plan.rounds) for side, given in calls.items()}
                for side, seconds in interleave(turns, plan.rounds).items():
                    found.setdefault(name, {}).setdefault(side, []).extend(seconds)
    return found


def judged(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, the ratio after / before, the A/A ratio, the limit that they make, and the verdict."""
    result: dict[str, Any] = {f"{side}_s": statistics.median(found) for side, found in times.items()}
    result["after_over_before"] = ratio(times["after"], times["before"])
    limit = 1 + TOLERANCE
    if "again" in times:
        result["again_over_after"] = noise = ratio(times["again"], times["after"])
        limit = max(limit, noise["p75"], 2 - noise["p25"])
    return {**result, "limit": limit, "no_slower": result["after_over_before"]["median"] <= limit}


def line(name: str, unit: str, result: dict[str, Any]) -> str:
    """One row of the table."""
    found, noise = result["after_over_before"], result.get("again_over_after")
    return (
        f"{name:<36} {_shown(result['before_s'])} {_shown(result['after_s'])} a {unit:<8}  {_spread(found)}  "
        f"A/A {'not run' if noise is None else _spread(noise)}  "
        f"{'no slower' if result['no_slower'] else 'SLOWER'}"
    )


def _shown(seconds: float) -> str:
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s ")
    return f"{seconds * scale:7.2f} {unit}"


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['p25']:.3f} to {found['p75']:.3f})"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--before", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--before-python", required=True, help="interpreter that has the earlier checkout installed")
@click.option("--after", type=click.Path(path_type=Path, exists=True, file_okay=False), default=ROOT)
@click.option("--after-python", default=sys.executable, help="the same of the later one; default: this one")
@click.option(
    "--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="default: all but demo (6 minutes)"
)
@click.option("--quick", is_flag=True, help="does it run?")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="append records to this file")
def main(
    before: Path,
    before_python: str,
    after: Path,
    after_python: str,
    parts: tuple[str, ...],
    quick: bool,
    out: Path | None,
) -> None:
    """Time two checkouts in turn and say where the later one is slower."""
    record = Recorder(out)
    # Not resolved: a virtual environment's python is a link whose own place says which environment it is.
    one, other = (
        Checkout(before.resolve(), _absolute(before_python)),
        Checkout(after.resolve(), _absolute(after_python)),
    )
    print("median time of a step before and after, ratio after / before with quartiles, the same for A/A")
    for part in parts or [name for name in PARTS if name != "demo"]:
        plan = (QUICK if quick else PARTS)[part]
        for name, times in measure(part, plan, one, other).items():
            result = judged(times)
            config = {
                "bench": "house_speed",
                "part": part,
                "what": name,
                "unit": plan.unit,
                "quick": quick,
                "rounds": len(times["before"]),
                "before": git_state(one.tree),
                "after": git_state(other.tree),
            }
            print(line(f"{part}: {name}", plan.unit, result), flush=True)
            record(config, result)


def _absolute(python: str) -> str:
    return str(Path(python).absolute()) if "/" in python else python


if __name__ == "__main__":
    main()
