# SPDX-License-Identifier: Apache-2.0
"""Policies of the cache, simulated and measured: docs/results/cache.md."""

from __future__ import annotations

from statistics import geometric_mean, mean
from typing import Any

from bench.cache.cache_plan import OURS
from bench.cache.cache_report import ratio
from bench.harness.records import Record

from .evidence import Config, records
from .markdown import table

FILE, RATES_FILE = "cache.jsonl", "cache_rates.jsonl"
MEASURED_FILE, THRESHOLDS_FILE = "cache_measured.jsonl", "cache_thresholds.jsonl"
ABLATIONS = ("fastlibra-wom", "fastlibra-wos", "fastlibra-wol")
SHOWN = ("static", "slora", "fastlibra", OURS)
"""Policies of the table of larger cells."""
PEAKS = {("fastlibra", "static"): "1.7 (vLLM)", ("fastlibra", "slora"): "1.6"}
"""The paper's."""
PAPER = {("fastlibra", "static"): "0.40, 0.66", ("fastlibra", "slora"): "0.50, 0.71"}
PAIRS = (
    *PAPER,
    ("fastlibra", "lru"),
    ("cost-aware", "static"),
    ("cost-aware", "slora"),
    ("cost-aware", "lru"),
    ("cost-aware", "fastlibra"),
)


def rates() -> str:
    """A policy over another, by application: means of the ten rates' ratios, and the worst rate."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in records(RATES_FILE):
        config = one["config"]
        found.setdefault(config["application"], {})[config["policy"]] = one["result"]["points"]
    found = {
        name: cell for name, cell in found.items() if {one for pair in PAIRS for one in pair} <= set(cell)
    }
    rows = []
    for ours, theirs in PAIRS:
        ttfts = [_ratios(cell[ours], cell[theirs], "ttft_ms") for cell in found.values()]
        tpots = [_ratios(cell[ours], cell[theirs], "tpot_ms") for cell in found.values()]
        cells = [f"{mean(one):.2f} ({max(one):.2f})" for one in ttfts]
        overall = [geometric_mean([mean(one) for one in ratios]) for ratios in (ttfts, tpots)]
        beside = PAPER.get((ours, theirs), "")
        rows.append((f"{ours} by {theirs}", *cells, f"{overall[0]:.2f}", f"{overall[1]:.2f}", beside))
    return table(("policies", *found, "TTFT, all", "TPOT, all", "the paper: TTFT, TPOT"), rows)


def _ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> list[float]:
    return [our[name] / their[name] for our, their in zip(ours, theirs, strict=True)]


def cells() -> str:
    """Llama-7B with 100 adapters: a row an application and policy."""
    head = ("application", "policy", "TTFT", "TPOT", "peak/s", "LoRA hits", "KV hits", "invalid KV")
    rows = []
    for one in _cells(larger=False):
        config, result = one["config"], one["result"]
        setting = f" ({config['setting']})" if config["setting"] else ""
        rows.append(
            (
                config["application"],
                config["policy"] + setting,
                _ttfts(result),
                f"{result['tpot_ms']:.1f}",
                f"{result['peak_per_s']:.1f}",
                f"{result['adapter_hit_rate']:.2f}",
                _kv_hits(result),
                f"{result['invalid_kv_share']:.3f}",
            )
        )
    return table(head, rows)


def larger() -> str:
    """Other numbers of adapters and larger models: a row a cell."""
    found: dict[str, dict[str, Config]] = {}
    for one in _cells(larger=True):
        config = one["config"]
        own = config["popularity"] == "own"
        words = [config["model"], str(config["num_adapters"]), config["application"]]
        name = ", ".join(words if own else [*words, config["popularity"]])
        found.setdefault(name, {})[config["policy"]] = one["result"]
    rows = [
        (
            name,
            *(_ttfts(cell[policy]) for policy in SHOWN),
            " / ".join(f"{cell[policy]['peak_per_s']:.1f}" for policy in SHOWN),
            ", ".join(f"{cell[policy]['adapter_hit_rate']:.2f}" for policy in SHOWN[-2:]),
        )
        for name, cell in found.items()
    ]
    head = ("cell", f"TTFT {SHOWN[0]}", *SHOWN[1:], "peak/s of these")
    return table((*head, f"LoRA hits, {', '.join(SHOWN[-2:])}"), rows)


def means() -> str:
    """A policy over another: geometric means over all cells, beside the paper's."""
    found = [
        {**one, "result": one["result"] | {str(i): each["ttft_ms"] for i, each in enumerate(points)}}
        for one in records(FILE)
        if (points := one["result"]["points"])
    ]
    rows = []
    for pair in PAIRS:
        by_rate = " / ".join(f"{ratio(found, *pair, str(rate)):.2f}" for rate in range(3))
        shown = (
            f"{ratio(found, *pair, key):.{digits}f}"
            for key, digits in (("ttft_ms", 3), ("tpot_ms", 2), ("peak_per_s", 2))
        )
        beside = f"{PAPER[pair]}, {PEAKS[pair]}" if pair in PAPER else ""
        rows.append((*pair, by_rate, *shown, beside))
    head = ("of", "by", "TTFT at 50 / 75 / 100 %", "TTFT, mean", "TPOT, mean", "peak")
    return table((*head, "paper: TTFT, TPOT, peak"), rows)


def measured() -> str:
    """The running engine: a row an application, load and policy."""
    rows = []
    for one in records(MEASURED_FILE, lambda config, result: config["policy"] not in ABLATIONS):
        config, result = one["config"], one["result"]
        rows.append(
            (
                f"{config['application']}, {config['share_of_capacity']:g}",
                config["policy"],
                *(f"{result[key]:.1f}" for key in ("ttft_ms", "tpot_ms")),
                f"{result['adapter_hit_rate']:.2f}",
                _kv_hits(result),
                f"{result['invalid_kv_share']:.2f}",
            )
        )
    head = ("application, load", "policy", "TTFT ms", "TPOT ms", "LoRA hits", "KV hits", "invalid KV")
    return table(head, rows)


def measured_means() -> str:
    """The running engine, a policy over another: geometric means over applications and loads."""
    found = records(MEASURED_FILE)
    rows = [
        (ours, theirs, *(f"{ratio(found, ours, theirs, key):.2f}" for key in ("ttft_ms", "tpot_ms")))
        for ours, theirs in PAIRS
    ]
    return table(("of", "by", "TTFT", "TPOT"), rows)


def thresholds() -> str:
    """TTFT (KV hits) by both thresholds, a column an application and policy."""
    found: dict[str, dict[str, str]] = {}
    for one in records(THRESHOLDS_FILE):
        config, result = one["config"], one["result"]
        name = config["application"].removeprefix("chatbots (").removesuffix(")")
        cell = f"{result['ttft_ms']:.1f} ({_kv_hits(result)})"
        row = found.setdefault(f"{config['upper']:.2f} / {config['lower']:.2f}", {})
        row[f"{name}, {config['policy']}"] = cell
    columns = list(next(iter(found.values())))
    rows = [(name, *(row[column] for column in columns)) for name, row in found.items()]
    return table(("upper / lower", *columns), rows)


def _cells(*, larger: bool) -> list[Record]:
    """The cells of Llama-7B with 100 adapters, or all others."""
    return records(
        FILE, lambda config, result: ((config["model"], config["num_adapters"]) != ("7B", 100)) is larger
    )


def _ttfts(result: Config) -> str:
    return " / ".join(f"{one['ttft_ms']:.0f}" for one in result["points"])


def _kv_hits(result: Config) -> str:
    return f"{result['kv_device_hit_rate']:.2f} + {result['kv_host_hit_rate']:.2f}"
