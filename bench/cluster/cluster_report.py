# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_cluster's measured records, and the papers' claims beside them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.harness.records import Record
from bench.harness.tables import table

from .cluster_plan import PADDED, PLACED, SYSTEM_NAMES, TIMEOUT_S, TRUE_RANK

CellKey = tuple[str, str, float]
Systems = dict[str, dict[str, Any]]
PLACED_NAMES = tuple(one.name for one in PLACED)
KERNEL_NAMES = {PADDED: "padded", TRUE_RANK: "true rank"}


def by_cell(records: Sequence[Record]) -> dict[CellKey, dict[str, dict[str, Any]]]:
    """(trace, kernel, load) -> system -> result, systems in the plan's order."""
    found: dict[CellKey, dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        config = record["config"]
        if config["section"] == "cells":
            found[config["trace"], config["kernel"], config["load"]][config["system"]] = record["result"]
    return {key: {name: of[name] for name in SYSTEM_NAMES if name in of} for key, of in found.items()}


def of_section(records: Sequence[Record], section: str) -> dict[str, dict[str, Any]]:
    """Kernel -> result, of "machine" or "figure 1"."""
    return {
        record["config"]["kernel"]: record["result"]
        for record in records
        if record["config"]["section"] == section
    }


def line(config: dict[str, Any], result: dict[str, Any]) -> str:
    """One record, on arrival."""
    if config["section"] == "machine":
        points = ", ".join(f"rank {rank} {point:.0f}" for rank, point in result["operating_points"].items())
        return f"{config['kernel']}: tokens/s of one core {points}; SLO of TTFT {result['slo_ttft_s']:.3f} s"
    if config["section"] == "figure 1":
        return (
            f"{config['kernel']}: P95 TTFT of rank 8 alone {result['p95_ttft_ms_alone']:.1f} ms, beside 128 "
            f"{result['p95_ttft_ms_beside']:.1f} ms: {result['ratio']:.2f} (paper {result['paper_ratio']})"
        )
    name = f"{config['trace']}, {config['kernel']}, {config['rate_per_s']:.1f}/s, {config['system']}"
    return f"{name}: P95 TTFT {_text(result['p95_ttft_ms'], '.0f')} ms, {result['failed']} failed"


def markdown(records: Sequence[Record]) -> str:
    """Compact tables: a line per cell, a column per system."""
    parts: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("P95 TBT in ms", lambda result: _text(result["p95_itl_ms"], ".0f")),
        ("Mean TPOT in ms", lambda result: _text(result["mean_tpot_ms"], ".1f")),
        ("Requests/s within the TTFT SLO", lambda result: _text(result["requests_per_s_within_slo"], ".1f")),
        (
            "Requests within 1.5 times the time per token without LoRA",
            lambda result: _text(result["tpt_attainment"], ".0%"),
        ),
        ("Adapters of an instance: held, used (mean / most); adapters loaded", _adapters),
    ]
    if not (cells := by_cell(records)):
        return ""
    others = (_by_system(cells, title, shown) for title, shown in parts)
    return "\n".join((first_tokens(records), *others))


def first_tokens(records: Sequence[Record]) -> str:
    """P95 TTFT of each system."""
    return _by_system(by_cell(records), "P95 TTFT in ms (bold: within the SLO)", _ttft)


def _by_system(cells: dict[CellKey, Systems], title: str, shown: Callable[[dict[str, Any]], str]) -> str:
    rows = [
        {"": f"{trace}, {KERNEL_NAMES[kernel]}, load {load:g}"}
        | {name: shown(result) for name, result in systems.items()}
        for (trace, kernel, load), systems in cells.items()
    ]
    return table(rows, title, markdown=True)


def _ttft(result: dict[str, Any]) -> str:
    text = _text(result["p95_ttft_ms"], ".0f")
    if result["failed"]:
        text += f", {result['failed']} failed"
    return f"**{text}**" if result["ttft_slo_met"] else text


def _adapters(result: dict[str, Any]) -> str:
    held, counts = result["adapters_held"], result["adapters_used"]
    used = f"{sum(counts) / len(counts):.1f} / {max(counts)}"
    return f"{held['mean']:.1f} / {held['most']:.0f}, {used}; {sum(result['adapter_loads'])}"


def _text(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def least_agreement(records: Sequence[Record]) -> float:
    """Least share of equal answers over all systems; 1 without comparisons."""
    found = (record["result"].get("same_answers") for record in records)
    return min((share for share in found if share is not None), default=1.0)


def disturbed(records: Sequence[Record], share: float = 0.05) -> int:
    """Runs with more than that share of the machine for other programs."""
    return sum(record["result"].get("others_busy", 0.0) > share for record in records)


def highest_rates(records: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """ "trace, kernel" -> system -> the highest load of a ladder up to which all met the SLO, or None.

    Only for ladders of several loads.
    """
    loads: dict[tuple[str, str], dict[float, dict[str, dict[str, Any]]]] = defaultdict(dict)
    for (trace, kernel, load), systems in by_cell(records).items():
        loads[trace, kernel][load] = systems
    found: dict[str, dict[str, float | None]] = {}
    for (trace, kernel), ladder in loads.items():
        if len(ladder) > 1:
            common = [name for name in SYSTEM_NAMES if all(name in of for of in ladder.values())]
            found[f"{trace}, {KERNEL_NAMES[kernel]}"] = {name: _highest(ladder, name) for name in common}
    return found


def _highest(ladder: dict[float, dict[str, dict[str, Any]]], name: str) -> float | None:
    highest = None
    for load in sorted(ladder):
        if not ladder[load][name]["ttft_slo_met"]:
            break
        highest = load
    return highest


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
    """True if every placement's P95 reached the failure limit: no comparison possible."""
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
    """Effect of placing ranks under true-rank kernels, for cells with the same requests."""
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
    """Of common cells."""
    pairs = [(of.get(numerator, {}).get(key), of.get(denominator, {}).get(key)) for of in cells]
    return [above / below for above, below in pairs if above and below]


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    if len(values) == 1:
        return format(values[0], form)
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} (median; {least:{form}} to {most:{form}})"
