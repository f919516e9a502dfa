"""Tables of the measured records of bench_cluster, on a terminal and as markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.lora_server.disagg_report import table

from .cluster_plan import PADDED, PLACED, SYSTEM_NAMES, TRUE_RANK

Record = dict[str, Any]
CellKey = tuple[str, str, float]
KERNEL_NAMES = {PADDED: "padded", TRUE_RANK: "true rank"}
_SHOWN: tuple[tuple[str, str, str], ...] = (
    ("p95_ttft_ms", "P95 TTFT ms", ".0f"),
    ("p95_itl_ms", "P95 TBT ms", ".0f"),
    ("mean_tpot_ms", "TPOT ms", ".1f"),
    ("requests_per_s", "req/s", ".1f"),
    ("requests_per_s_within_slo", "in SLO/s", ".1f"),
    ("ttft_attainment", "TTFT SLO", ".1%"),
    ("tpt_attainment", "TPT SLO", ".1%"),
    ("failed", "failed", "d"),
    ("machine_busy", "busy", ".0%"),
    ("others_busy", "others", ".0%"),
    ("front_end_busy", "front end", ".0%"),
    ("same_answers", "same", ".3f"),
)


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
    """One record, as it comes."""
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


def cell_tables(records: Sequence[Record]) -> Iterator[str]:
    """A line per system of each cell."""
    for (trace, kernel, load), systems in by_cell(records).items():
        rows = [
            {"system": name}
            | {title: _text(result[key], form) for key, title, form in _SHOWN}
            | {"held": _held(result), "used": _used(result), "loads": str(sum(result["adapter_loads"]))}
            for name, result in systems.items()
        ]
        yield table(rows, f"\n{trace}, {KERNEL_NAMES[kernel]} kernel, load {load:g}")


def markdown(records: Sequence[Record]) -> str:
    """Compact tables: a line per cell, a column per system."""
    cells = by_cell(records)
    if not cells:
        return ""
    parts = [
        ("P95 TTFT in ms (bold: within the SLO)", _ttft),
        ("P95 TBT in ms", lambda result: _text(result["p95_itl_ms"], ".0f")),
        ("Mean TPOT in ms", lambda result: _text(result["mean_tpot_ms"], ".1f")),
        ("Requests/s within the TTFT SLO", lambda result: _text(result["requests_per_s_within_slo"], ".1f")),
        ("Requests within 1.5 times the time per token without LoRA", _tpt),
        ("Adapters of an instance: held, used (mean / most); adapters loaded", _adapters),
    ]
    return "\n\n".join(_markdown_table(cells, title, shown) for title, shown in parts)


def _markdown_table(
    cells: dict[CellKey, dict[str, dict[str, Any]]], title: str, shown: Callable[[dict[str, Any]], str]
) -> str:
    names = [name for name in SYSTEM_NAMES if any(name in systems for systems in cells.values())]
    lines = [f"| {title} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for (trace, kernel, load), systems in cells.items():
        texts = [shown(systems[name]) if name in systems else "" for name in names]
        lines.append(f"| {trace}, {KERNEL_NAMES[kernel]}, load {load:g} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _ttft(result: dict[str, Any]) -> str:
    text = _text(result["p95_ttft_ms"], ".0f")
    if result["failed"]:
        text += f", {result['failed']} failed"
    return f"**{text}**" if result["ttft_slo_met"] else text


def _tpt(result: dict[str, Any]) -> str:
    return _text(result["tpt_attainment"], ".0%")


def _adapters(result: dict[str, Any]) -> str:
    return f"{_held(result)}, {_used(result)}; {sum(result['adapter_loads'])}"


def _held(result: dict[str, Any]) -> str:
    return f"{result['adapters_held']['mean']:.1f} / {result['adapters_held']['most']:.0f}"


def _used(result: dict[str, Any]) -> str:
    counts = result["adapters_used"]
    return f"{sum(counts) / len(counts):.1f} / {max(counts)}"


def _text(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def least_agreement(records: Sequence[Record]) -> float:
    """The least share of equal answers of all systems; 1 where none was compared."""
    found = (record["result"].get("same_answers") for record in records)
    return min((share for share in found if share is not None), default=1.0)


def disturbed(records: Sequence[Record], share: float = 0.05) -> int:
    """Runs beside which other programs took more than that share of the machine."""
    return sum(record["result"].get("others_busy", 0.0) > share for record in records)


def highest_rates(records: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """ "trace, kernel" -> system -> the highest load of a ladder at which it, and at all below, met the SLO.

    None: none was.  Only where several loads were run.
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


PLACED_NAMES = tuple(one.name for one in PLACED)
