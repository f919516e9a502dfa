# SPDX-License-Identifier: Apache-2.0
"""Settings of `bench_host_assisted`: devices, adapters and requests.

Time is counted in prefills of a mean prompt, 35 ms in the paper (Llama2-7B on an A100: 28.7 ms and 0.06 ms
a token, from the 44 and 90 ms of figure 4 for 256 and 1 024 tokens), so rates and loads keep their ratios.
Loading rank 64 takes one such prefill: figure 4's decoding interruptions of 13, 22 and 29 % at 3, 6 and 9
requests/s are 43, 37 and 32 ms an adapter.  S5 and S6: 70B on four GPUs, with 2.7 times the prefill and 3.5
times the bytes of an adapter of one rank.  S4: prompts with a prefill of 1.5 times the mean.
Source: Toppings sections 2.3 and 7.1 to 7.3, table 2.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.harness.random_model import ModelSize
from moe_lora.workload.popularity.popularity import zipf

CACHED, ON_DEMAND, ASYNCHRONOUS, OURS = "cached", "on demand", "asynchronous", "host-assisted"
SYSTEMS = (CACHED, ON_DEMAND, ASYNCHRONOUS, OURS)
NUM_SLOTS = 16
"""Adapters on the device at once, unless all are."""
MEAN_OUTPUT = 16
NUM_WARM = 2
"""Base model requests in permanent decode."""
DECODE_SHARE = 0.7
"""A decode step over a mean prompt's prefill: about 25 ms (figures 4 and 6)."""
_PREFILL_S = 0.035

LLAMA = ModelSize(
    hidden_size=128,
    intermediate_size=344,
    num_layers=8,
    num_experts=0,
    num_experts_per_token=0,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    vocab_size=2048,
)
"""Llama2-7B with a quarter of the layers and 1/32 of the width."""
LLAMA_70B = replace(LLAMA, num_layers=20, num_kv_heads=1)
"""2.5 times the layers of 7B, and a key and value head for eight query heads."""
MIXTRAL = replace(LLAMA, intermediate_size=128, num_experts=4, num_experts_per_token=2, num_kv_heads=2)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting.  utilisation: of the device by prefills alone.  load: an adapter's load time over a mean
    prompt's prefill.  skew: exponent of the adapters' popularity; None: a different adapter per request.
    cores: workers over the number by c.
    """

    name: str
    lora_rank: int
    utilisation: float
    load: float
    size: ModelSize = LLAMA
    mean_prompt: int = 128
    all_sites: bool = False
    num_adapters: int = 2 * NUM_SLOTS
    skew: float | None = None
    cores: float = 1.0
    systems: tuple[str, ...] = SYSTEMS
    num_requests: int = 12


@dataclass(frozen=True)
class Ask:
    """One request: time, adapter (None: the base model), lengths."""

    arrival_s: float
    adapter: int
    num_prompt_tokens: int
    num_output_tokens: int


S3 = Cell(name="S3", lora_rank=64, utilisation=9 * _PREFILL_S, load=1.0)
LOADS = (0.25, 0.5, 2.0, 4.0)
FEW_LOADS = (0.25, 1.0, 4.0)
FEW = 0.25


def settings() -> list[Cell]:
    """Table 2, all sites with experts, and the MAF-like popularity (adapters and slots a quarter)."""
    loads = [(32, 9), (64, 6), (64, 9)]
    cells = [
        replace(S3, name=f"S{n}", lora_rank=rank, utilisation=rate * _PREFILL_S, load=rank / 64)
        for n, (rank, rate) in enumerate(loads, 1)
    ]
    long = 1.5 * _PREFILL_S
    cells.append(
        replace(
            S3,
            name="S4",
            lora_rank=256,
            utilisation=3 * long,
            load=4 / 1.5,
            mean_prompt=2 * S3.mean_prompt,
            num_requests=6,
        )
    )
    large = replace(S3, size=LLAMA_70B, utilisation=3 * 2.7 * _PREFILL_S)
    cells += [
        replace(large, name=n, lora_rank=r, load=r / 64 * 3.5 / 2.7) for n, r in (("S5", 32), ("S6", 64))
    ]
    cells.append(replace(S3, name="S3, all sites, experts", size=MIXTRAL, all_sites=True, lora_rank=32))
    for num_adapters, rate in ((128, 1.5), (256, 3.6), (512, 7.7)):
        cells.append(
            replace(
                S3,
                name=f"MAF {num_adapters}",
                utilisation=rate * _PREFILL_S,
                num_adapters=num_adapters // 4,
                skew=0.9,
                num_requests=6 if rate < 3 else 12,
            )
        )
    cells.append(replace(S3, name="3 requests/s", utilisation=3 * _PREFILL_S, num_requests=6))
    return cells


def sweep() -> list[Cell]:
    """Load times and cores around S3."""
    compared = (CACHED, ASYNCHRONOUS, OURS)
    full = [replace(S3, name=f"S3, load x{load:g}", load=load, systems=compared) for load in LOADS]
    few = [
        replace(S3, name=f"S3, few cores, load x{load:g}", load=load, cores=FEW, systems=compared)
        for load in FEW_LOADS
    ]
    return full + few


def pipelining() -> list[Cell]:
    """Lone cold prompts, with few cores and with the number by c."""
    return [
        replace(
            S3,
            name=f"pipelining, rank {rank}, {cores:g} of the cores",
            lora_rank=rank,
            load=rank / 64,
            cores=cores,
        )
        for rank in (64, 128)
        for cores in (FEW, 1.0)
    ]


def asks(cell: Cell, prefill_s: float, number: int) -> list[Ask]:
    """Poisson arrivals of a round; prompts of 0.25 to 4 times the mean, as skewed as LMSYS's."""
    rng = random.Random(number)
    first = number * cell.num_requests
    chosen: Sequence[int] = [(first + i) % cell.num_adapters for i in range(cell.num_requests)]
    if cell.skew is not None:
        names = [str(i) for i in range(cell.num_adapters)]
        drawn = zipf(names, cell.skew).sample(cell.num_requests, np.random.default_rng(number))
        chosen = [int(name) for name in drawn]
    now_s, found = 0.0, []
    for adapter in chosen:
        now_s += rng.expovariate(cell.utilisation / prefill_s)
        num_prompt_tokens = round(_skewed(rng) * cell.mean_prompt)
        found.append(Ask(now_s, adapter, num_prompt_tokens, round(_skewed(rng) * MEAN_OUTPUT)))
    return found


LONGEST = 4


def _skewed(rng: random.Random) -> float:
    """0.25 to 4 with a mean of about 1."""
    return min(max(rng.lognormvariate(-0.3, 0.8), 0.25), float(LONGEST))
