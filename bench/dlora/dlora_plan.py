# SPDX-License-Identifier: Apache-2.0
"""Plan of the simulation: the paper's machine and ours, requests by its arrival functions, and the systems.

The paper's traces (Azure functions of 2019 and 2021, ShareGPT) are not available here.  Replacements:
functions invoked by a Zipf law, mapped to adapters as in the paper (section 7.1: most frequent first, round
robin in blocks of `skewness`); bursty arrivals (Gamma gaps); prompts and answers of log-normal lengths with
ShareGPT's means from vLLM's paper (161 and 338 tokens).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.policies.caching.caching import CachingPolicy, make_caching_policy
from moe_lora.policies.merging.merging import MergingPolicy, make_merging_policy
from moe_lora.policies.merging.merging_costs import MergingCosts, Uid
from moe_lora.sim.adapters import SimMerging
from moe_lora.sim.instance import CachedConfig
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.popularity.functions import mapped_popularity
from moe_lora.workload.popularity.popularity import Popularity, from_weights
from moe_lora.workload.replay_plan import TurnRequest, gamma_arrivals_until

SLO_S = 0.5
"""Of the average latency: seconds of all requests over their output tokens (dLoRA section 7.1)."""
LORA_RANK = 8
NUM_FUNCTIONS = 512
FUNCTIONS_ZIPF = 1.2
SKEWNESS = (1, 4, 16, 64)
"""Functions per block of the mapping; 64 gives the first of 8 adapters the 64 most frequent functions."""


# The machine.


@dataclass(frozen=True, kw_only=True)
class Machine:
    """delta_share: deltas of a full batch over a decode step without (paper, section 4.1: 0.389).
    merge_s: to merge or unmerge an adapter.  swap_steps: number of steps of a gradual swap.
    """

    name: str
    delta_share: float
    merge_s: float
    swap_steps: int


STEP_S = 0.05
"""A decode step of the base model: the paper's SLO is ten of them."""
SWITCH_S = STEP_S * 20 / 15
"""The authors' artifact counts 20 ms for a change of mode, 15 ms for a merged step, 27 ms for an unmerged one
(LLMServe/dLoRA-artifact, vllm/core/scheduler.py)."""
PAPER = Machine(name="paper", delta_share=0.389, merge_s=SWITCH_S, swap_steps=1)
"""Deltas as the paper's einsum computes them."""
ARTIFACT = Machine(name="artifact", delta_share=27 / 15 - 1, merge_s=SWITCH_S, swap_steps=1)
"""Deltas lengthen an unmerged step as in the artifact."""
TRUE_RANK = Machine(name="true rank", delta_share=0.05, merge_s=0.09, swap_steps=16)
"""Deltas of true-rank kernels.  Merging reads and writes q, k, v, o of a 7B model (4.3 GB); unmerging copies
the original bytes from the host at 25 GB/s: 0.17 s; their mean.
"""
MACHINES = {machine.name: machine for machine in (PAPER, ARTIFACT, TRUE_RANK)}
MAX_NUM_SEQS = 64
PAGE_TOKENS = 32
ADAPTER_PAGES = 4
"""56 MB (section 4.3), in pages of 16.8 MB."""


def llama_7b(machine: Machine) -> TransformerTime:
    """Llama-2-7B on one A800: 80 % of 2 TB/s, half of 312 TFLOP/s, and the rest of STEP_S as overhead."""
    num_params, bytes_per_s, flops_per_s = 6.74e9, 1.6e12, 1.56e14
    delta_row_s = machine.delta_share * STEP_S / MAX_NUM_SEQS
    return TransformerTime(
        num_params=num_params,
        num_layers=32,
        hidden_size=4096,
        kv_token_bytes=2 * 32 * 4096 * 2,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        fixed_s=STEP_S - num_params * 2 / bytes_per_s,
        delta_row_s=delta_row_s,
        prompt_delta=machine.delta_share * 2 * num_params / flops_per_s / delta_row_s,
    )


def names(num_adapters: int) -> list[str]:
    return [f"a{number}" for number in range(num_adapters)]


def costs(machine: Machine) -> MergingCosts:
    """Costs for the policies: the machine's times, without context terms."""

    def swap_s(before: Uid, after: Uid) -> float:
        return machine.merge_s * sum(uid is not None for uid in (before, after))

    page_bytes = PAGE_TOKENS * llama_7b(machine).kv_token_bytes
    return MergingCosts(
        llama_7b(machine).step_model(LORA_RANK, ADAPTER_PAGES * page_bytes), lambda uid: LORA_RANK, swap_s
    )


def batching(system: str, machine: Machine, settings: DLoraConfig | None = None) -> SimMerging:
    """system: a name of `policies.merging.merging.BATCHINGS`.  settings: of "dlora"; None: the defaults."""

    def policy() -> MergingPolicy:
        return make_merging_policy(system, costs(machine), settings)

    return SimMerging(policy=policy, merge_s=machine.merge_s, swap_steps=machine.swap_steps)


def instance(
    system: str, machine: Machine, num_adapters: int, settings: DLoraConfig | None = None
) -> CachedConfig:
    """One A800 of 80 GB, with 56 GB for KV and adapters."""
    time = llama_7b(machine)
    page_bytes = PAGE_TOKENS * time.kv_token_bytes
    return CachedConfig(
        time=time,
        adapter_pages=dict.fromkeys(names(num_adapters), ADAPTER_PAGES),
        num_device_pages=int(56e9 / page_bytes),
        num_host_pages=int(200e9 / page_bytes),
        link_bytes_per_s=25e9,
        block_size=PAGE_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        merging=batching(system, machine, settings),
    )


def caching(config: CachedConfig) -> Callable[[], CachingPolicy]:
    return lambda: make_caching_policy("fastlibra", config.costs())


# Requests.


@dataclass(frozen=True, kw_only=True)
class Work:
    """skewness: see above; 0: all adapters alike, inf: one adapter alone.  burstiness: shape of the gaps.
    scale: of prompts and answers (figure 11b).  spread: deviation of the lengths' logarithm.
    """

    skewness: float
    rate_per_s: float
    duration_s: float
    seed: int = 0
    num_adapters: int = 8
    burstiness: float = 0.25
    scale: float = 1.0
    mean_prompt: float = 161.0
    mean_answer: float = 338.0
    spread: float = 0.8
    max_tokens: int = 2048


def popularity(work: Work) -> Popularity:
    """Each adapter's share of the requests."""
    adapters = names(work.num_adapters)
    if work.skewness == 0:
        return from_weights(adapters, [1] * len(adapters))
    if work.skewness == math.inf:
        return from_weights(adapters, [1] + [0] * (len(adapters) - 1))
    counts = {f"f{place:04}": round(1e6 * (place + 1) ** -FUNCTIONS_ZIPF) for place in range(NUM_FUNCTIONS)}
    return mapped_popularity(counts, adapters, int(work.skewness))


def largest_share(work: Work) -> float:
    return float(max(popularity(work).probabilities))


def requests(work: Work) -> list[TurnRequest]:
    """By arrival.  Equal work gives equal requests; another rate or scale only other times or lengths."""
    rng = np.random.default_rng(work.seed)
    arrivals = gamma_arrivals_until(work.duration_s, work.rate_per_s, work.burstiness, rng)
    chosen = popularity(work).sample(len(arrivals), rng)
    ids = itertools.count(1)
    found = []
    for index, (arrival_s, adapter) in enumerate(zip(arrivals.tolist(), chosen, strict=True)):
        prompt, answer = (
            _length(mean * work.scale, work.spread, work.max_tokens // 2, rng)
            for mean in (work.mean_prompt, work.mean_answer)
        )
        tokens = tuple(itertools.islice(ids, prompt))
        found.append(TurnRequest(index, arrival_s, adapter, tokens, (0,) * answer))
    return found


def _length(mean: float, spread: float, most: int, rng: np.random.Generator) -> int:
    drawn = rng.lognormal(math.log(mean) - spread**2 / 2, spread)
    return int(min(max(1, round(drawn)), most))


def seeds(work: Work, num_seeds: int) -> Sequence[Work]:
    return [replace(work, seed=work.seed + number) for number in range(num_seeds)]
