# SPDX-License-Identifier: Apache-2.0
"""Cold adapters beside resident ones, from host_assisted.jsonl: docs/results.md."""

from __future__ import annotations

from bench.harness.records import Record
from bench.host_assisted.assisted_plan import ASYNCHRONOUS, CACHED, ON_DEMAND, OURS
from bench.host_assisted.assisted_report import over

from .evidence import records
from .markdown import table

FILE = "host_assisted.jsonl"
WORDS = {
    "S1": "S1: rank 32",
    "S2": "S2: rank 64, fewer requests",
    "S3": "S3: rank 64",
    "S3, all sites, experts": "S3 on all sites, with experts",
    "3 requests/s": "half as many requests as S2",
    "S4": "S4: rank 256, prompts twice as long",
    "S5": "S5: 70B, rank 32",
    "S6": "S6: 70B, rank 64",
    "MAF 128": "MAF-like, 128 adapters",
    "MAF 256": "MAF-like, 256 adapters",
    "MAF 512": "MAF-like, 512 adapters",
}


def settings() -> str:
    """Over resident adapters, median (quartiles): mean TTFT, whole requests, warm requests' time a token.

    A setting's last record counts.
    """
    found = {one["config"]["name"]: one for one in records(FILE, lambda config, _: config["name"] in WORDS)}
    rows = []
    for name, words in WORDS.items():
        if (one := found.get(name)) is None:
            continue
        ttft = (_spread(one, system) for system in (ON_DEMAND, ASYNCHRONOUS, OURS))
        whole = (_median(one, "e2e_s", system) for system in (ON_DEMAND, ASYNCHRONOUS, OURS))
        warm = (_median(one, "warm_tpot_s", system) for system in (ON_DEMAND, OURS))
        rows.append((words, *ttft, " / ".join(whole), " / ".join(warm)))
    head = ("mean TTFT: loads block steps (S-LoRA)", "loads beside steps", "host-assisted", "whole requests")
    return table(("", *head, "warm requests"), rows)


def of_resident(system: str) -> float:
    """Mean TTFT in S3 over resident adapters, median."""
    one = records(FILE, lambda config, _: config["name"] == "S3")[-1]
    return over(one, "ttft_s", system, CACHED)["median"]


def _spread(one: Record, system: str) -> str:
    ratio = over(one, "ttft_s", system, CACHED)
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})"


def _median(one: Record, figure: str, system: str) -> str:
    return f"{over(one, figure, system, CACHED)['median']:.2f}"
