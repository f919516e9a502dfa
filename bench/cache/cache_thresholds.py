# SPDX-License-Identifier: Apache-2.0
"""Effect of the device shares at which the cache swaps out and in.

    python -m bench.cache.cache_thresholds --trace TRACE.jsonl --out bench/results/cache_thresholds.jsonl

Llama-7B, 100 adapters, agents and Mooncake's conversations at one rate each, a little below the peaks, under
`fastlibra` (at bench_cache's best time unit) and `cost-aware`; simulated as in bench_cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from bench.harness.records import Recorder

from .bench_cache import cells
from .cache_plan import settings_of
from .cache_simulated import simulated

RATES = {"agents": 9.0, "chatbots (Mooncake)": 6.0}
TIME_UNITS_S = {"agents": "5", "chatbots (Mooncake)": "60"}
THRESHOLDS = ((0.90, 0.70), (0.95, 0.50), (0.95, 0.70), (0.95, 0.90), (0.99, 0.70))
"""(upper, lower); the middle one is the paper's."""


@click.command()
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON lines file."
)
@click.option("--trace", type=click.Path(dir_okay=False), required=True, help="Mooncake's trace, JSON lines.")
def main(out: Path, trace: str) -> None:
    """Run every pair of thresholds, on the same requests."""
    record = Recorder(out, kind="simulated")
    for cell in cells(trace, quick=False):
        application = cell.name["application"]
        if application not in RATES or (cell.name["model"], cell.name["num_adapters"]) != ("7B", 100):
            continue
        for policy, setting in (("fastlibra", TIME_UNITS_S[application]), ("cost-aware", "")):
            for upper, lower in THRESHOLDS:
                chosen = replace(cell, config=replace(cell.config, upper=upper, lower=lower))
                result = simulated(chosen, settings_of(policy)[setting], RATES[application])
                varied = {"policy": policy, "setting": setting, "upper": upper, "lower": lower}
                record({**cell.name, **varied, "rate_per_s": RATES[application]}, result)
                click.echo(
                    f"{application:20} {policy:10} {upper:.2f} {lower:.2f}  TTFT {result['ttft_ms']:.1f} ms, "
                    f"LoRA hits {result['adapter_hit_rate']:.3f}, KV hits {result['kv_device_hit_rate']:.3f}"
                    f" + {result['kv_host_hit_rate']:.3f}, link {result['link_in_busy']:.3f} in, "
                    f"{result['link_out_busy']:.3f} out"
                )


if __name__ == "__main__":
    main()
