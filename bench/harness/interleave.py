# SPDX-License-Identifier: Apache-2.0
"""Contestants in turn, so that other load of the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import click

PROGRESS_EVERY_S = 10.0
"""Between two lines of a long bench on stderr."""
Contestant = Callable[[int], float]
"""Runs a number of steps; returns their seconds."""


def repeated(step: Callable[[], object]) -> Contestant:
    """A step again and again, by the clock on the wall."""

    def seconds(num_steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        return time.perf_counter() - begin

    return seconds


def interleave(
    contestants: Mapping[str, tuple[Contestant, int, int]], num_rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of each contestant in each of its rounds.

    contestants: name -> (contestant, steps per round, rounds).  Order is reversed in every second round.
    Stderr gets a line at most every PROGRESS_EVERY_S seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    told = time.monotonic()
    for number in range(num_rounds):
        order = list(contestants.items())
        for name, (contestant, num_steps, rounds) in order if number % 2 == 0 else reversed(order):
            if time.monotonic() - told >= PROGRESS_EVERY_S:
                click.echo(f"round {number + 1} of {num_rounds}: {title(name)}", err=True)
                told = time.monotonic()
            if number < rounds:
                times[name].append(contestant(num_steps) / num_steps)
    return times


def title(name: object) -> str:
    """A contestant's name, or the parts of it."""
    return ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median and spread (quartiles, extremes) of the ratio in common rounds."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=False))
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "median": quartiles[1],
        "p25": quartiles[0],
        "p75": quartiles[2],
        "min": ratios[0],
        "max": ratios[-1],
        "num_pairs": len(ratios),
    }
