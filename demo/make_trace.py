# SPDX-License-Identifier: Apache-2.0
"""Write demo/trace.csv: two minutes of traffic with the statistics of a real trace, always the same bytes.

    python demo/make_trace.py [--out FILE] [--measure AZURE_CSV]

Source of the statistics: AzureLLMInferenceTrace_code (Microsoft, November 2023; 8819 requests in 3436 s),
measured by `--measure`:
- requests come in spells, parted by silences of more than 2 s: 96 spells of 92 requests in the mean, and the
  silences take 75 % of the time. Within a spell the gaps have the quantiles GAP_QUANTILES_S (mean 0.099 s,
  10.1 requests per second); over all, 2.57 requests per second.
- prompt and output lengths have the quantiles below; their logarithms are not correlated (-0.004).
One thing is changed: spells and silences are a third as long as in the source (31 requests, then 9 s), so
that two minutes hold about ten of them. Rates and shares stay as they are.
"""

from __future__ import annotations

import argparse
import math
import random
from itertools import pairwise
from pathlib import Path

import numpy as np

SILENCE_S = 2.0
REQUESTS_PER_SPELL = 91.9
SILENCE_MEAN_S = 27.1
SHORTENED = 3

SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
GAP_QUANTILES_S = (
    0.000006,
    0.000088,
    0.000203,
    0.002033,
    0.06071,
    0.102972,
    0.235746,
    0.370803,
    0.77991,
    1.999042,
)
PROMPT_QUANTILES = (3, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437)
OUTPUT_QUANTILES = (6, 6, 7, 9, 13, 24, 55, 90, 251, 1899)

DURATION_S = 120.0
SEED = 0  # of the first forty: 287 requests, 75 % silence, the nearest to the source
_TICKS_PER_S = 10_000_000


def quantile(table: tuple[float, ...], share: float) -> float:
    """The value at that share, linear between the table's entries on a logarithmic scale."""
    return math.exp(np.interp(share, SHARES, np.log(table)))


def arrivals_s(duration_s: float, rng: random.Random) -> list[float]:
    """Spells of geometric size and silences above SILENCE_S with exponential rest, until duration_s."""
    times, now_s = [], 0.0
    spell_end = SHORTENED / REQUESTS_PER_SPELL
    silence_rest_s = SILENCE_MEAN_S / SHORTENED - SILENCE_S
    while now_s < duration_s:
        times.append(now_s)
        now_s += quantile(GAP_QUANTILES_S, rng.random())
        if rng.random() < spell_end:
            now_s += SILENCE_S - silence_rest_s * math.log(1.0 - rng.random())
    return times


def trace_text(duration_s: float = DURATION_S, seed: int = SEED) -> str:
    """The CSV, in the format of the source."""
    rng = random.Random(seed)  # its random() is the same in every version of Python
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for time_s in arrivals_s(duration_s, rng):
        ticks = round(time_s * _TICKS_PER_S)
        minutes, rest = divmod(ticks, 60 * _TICKS_PER_S)
        stamp = f"{minutes:02d}:{rest // _TICKS_PER_S:02d}.{rest % _TICKS_PER_S:07d}"
        prompt = round(quantile(PROMPT_QUANTILES, rng.random()))
        output = round(quantile(OUTPUT_QUANTILES, rng.random()))
        lines.append(f"2024-01-01 00:{stamp},{prompt},{output}")
    return "\n".join(lines) + "\n"


def measure(path: str) -> dict[str, list[float] | float]:
    """The statistics of a trace that this file quotes."""
    from moe_lora.workload.traces.traces import read_trace

    requests = read_trace(path).requests
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(requests)]
    silences = [gap for gap in gaps if gap > SILENCE_S]
    return {
        "requests_per_s": len(requests) / requests[-1].arrival_s,
        "requests_per_spell": len(requests) / (len(silences) + 1),
        "silence_mean_s": sum(silences) / len(silences),
        "silent_share": sum(silences) / requests[-1].arrival_s,
        "gap_quantiles_s": np.quantile([gap for gap in gaps if gap <= SILENCE_S], SHARES).tolist(),
        "prompt_quantiles": np.quantile([request.prompt_tokens for request in requests], SHARES).tolist(),
        "output_quantiles": np.quantile([request.output_tokens for request in requests], SHARES).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's trace, or measure a real one.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trace.csv"))
    parser.add_argument("--measure", metavar="AZURE_CSV", help="print a trace's statistics and write nothing")
    arguments = parser.parse_args()
    if arguments.measure:
        for name, value in measure(arguments.measure).items():
            print(name, value)
        return
    arguments.out.write_text(trace_text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
