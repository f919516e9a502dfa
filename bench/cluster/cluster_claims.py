"""What bench_cluster found beside what LoRAServe and Toppings claim, and what true-rank kernels change."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from .cluster_plan import PADDED, TIMEOUT_S, TRUE_RANK
from .cluster_report import PLACED_NAMES, Record, by_cell, disturbed, highest_rates, of_section

Systems = dict[str, dict[str, Any]]


def claims(records: Sequence[Record]) -> str:
    """Lines of markdown."""
    return "\n".join(f"- {line}" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[str]:
    cells = by_cell(records)
    padded = [systems for (_, kernel, _), systems in cells.items() if kernel == PADDED]
    held_up = [of for of in padded if not _is_lost(of)]
    for ours in ("loraserve", "optimal"):
        for other, claim in (
            ("s-lora random", "paper: up to 9"),
            ("s-lora contiguous", "paper: up to 9"),
            ("toppings", "paper: lower"),
        ):
            ratios = _ratios(held_up, other, ours, "p95_ttft_ms")
            if ratios:
                yield f"P95 TTFT of {other} by that of {ours}, padded: {_spread(ratios)} ({claim})"
    for ours in ("loraserve", "optimal"):
        held = [
            of["toppings"]["adapters_held"]["most"] / of[ours]["adapters_held"]["most"]
            for of in padded
            if {"toppings", ours} <= of.keys()
        ]
        if held:
            yield f"most adapters held by an instance, toppings by {ours}: {_spread(held)} (paper: up to 16)"
    for other, points in (("dlora", "+21 or +26"), ("random", "+21 or +26"), ("first fit", "more")):
        yield from _scheduler(padded, other, points)
    for name, of in highest_rates(records).items():
        shown = ", ".join(
            f"{system} {'none' if load is None else f'{load:g}'}" for system, load in of.items()
        )
        yield f"highest load within the TTFT SLO, {name}: {shown} (paper: up to twice S-LoRA's)"
    for kernel, found in of_section(records, "figure 1").items():
        ratio = found["ratio"]
        yield f"figure 1, {kernel}: beside rank 128, rank 8 has {ratio:.2f} times its P95 TTFT (paper: 1.84)"
    yield from _true_rank(records)
    if number := disturbed(records):
        yield f"other programs took more than 5 % of the machine beside {number} runs: measure again alone"


def _is_lost(systems: Systems) -> bool:
    """Whether no placement's P95 was below the time at which requests fail: nothing can be compared there."""
    times = [systems[name]["p95_ttft_ms"] for name in PLACED_NAMES if name in systems]
    return bool(times) and min(times) >= 1e3 * TIMEOUT_S


def _scheduler(padded: Sequence[Systems], other: str, points: str) -> Iterator[str]:
    """Toppings' scheduler against another router, both over full replication."""
    both = [
        of
        for of in padded
        if {"toppings", other} <= of.keys() and of["toppings"]["tpt_attainment"] is not None
    ]
    times = _ratios(both, "toppings", other, "mean_tpt_ms")
    if times:
        gains = [100 * (of["toppings"]["tpt_attainment"] - of[other]["tpt_attainment"]) for of in both]
        yield (
            f"toppings against {other} routing, padded: {_spread(gains, '+.0f')} points of TPT attainment "
            f"(paper: {points}), mean TPT {_spread(times)} times "
            "(paper: 0.78 dLoRA, 0.77 random, 0.43 first fit)"
        )


def _true_rank(records: Sequence[Record]) -> Iterator[str]:
    """Where both kernels had the same requests: does it still matter who serves which rank?"""
    cells = by_cell(records)
    for (trace, kernel, load), padded in cells.items():
        true = cells.get((trace, TRUE_RANK, load))
        if kernel != PADDED or true is None:
            continue
        names = [
            name
            for name in PLACED_NAMES
            if padded.get(name, {}).get("p95_ttft_ms") and true.get(name, {}).get("p95_ttft_ms")
        ]
        if len(names) < 2:
            continue
        met = [name for name in names if true[name]["ttft_slo_met"]]
        gain = [padded[name]["p95_ttft_ms"] / true[name]["p95_ttft_ms"] for name in names]
        within = "all" if len(met) == len(names) else ", ".join(met) or "none"
        yield (
            f"{trace}, load {load:g}: worst by best P95 TTFT of {len(names)} systems "
            f"{_worst(padded, names):.1f} padded and {_worst(true, names):.1f} with true ranks; padded by "
            f"true-rank P95 TTFT {_spread(gain)}; {within} within the SLO with true ranks"
        )


def _worst(systems: Systems, names: Sequence[str]) -> float:
    times = [systems[name]["p95_ttft_ms"] for name in names]
    return max(times) / min(times)


def _ratios(cells: Sequence[Systems], numerator: str, denominator: str, key: str) -> list[float]:
    """Of the cells that have both."""
    pairs = [(of.get(numerator, {}).get(key), of.get(denominator, {}).get(key)) for of in cells]
    return [above / below for above, below in pairs if above and below]


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    if len(values) == 1:
        return format(values[0], form)
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} (median; {least:{form}} to {most:{form}})"
