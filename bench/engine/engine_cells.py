# SPDX-License-Identifier: Apache-2.0
"""Contestants of one dtype, and records of each cell, in `bench_engine`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.interleave import Contestant, interleave, ratio
from bench.harness.random_model import RANKS
from moe_lora.families import shape_of

from .ceiling import ReadBandwidth, StepBytes, step_bytes
from .engine_plan import PROMPT_TOKENS, Plan
from .engine_runs import EngineRun, Prompts, start_engine
from .peers import Decoder, GroupedDecoder, agreement, fastest_experts, load_peft, load_transformers

Adapters = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Files:
    """Content of the temporary folder."""

    model_dir: Path
    adapters: Adapters
    attention_adapters: Adapters


class Contestants:
    """All contestants of one dtype, loaded once."""

    def __init__(self, plan: Plan, files: Files, dtype: str, num_threads: int) -> None:
        self.plan, self.dtype = plan, dtype
        self.itemsize = getattr(torch, dtype).itemsize
        self.core = start_engine(
            files.model_dir,
            files.adapters + files.attention_adapters,
            dtype,
            max_num_seqs=max(plan.num_requests),
            max_model_len=PROMPT_TOKENS + max(plan.steps_per_round + 2, plan.answer_tokens),
            num_threads=num_threads,
            eager=plan.eager,
        )
        self.base = load_transformers(files.model_dir, dtype)
        self.mixed = load_peft(self.base, files.attention_adapters)
        self.grouped = load_peft(self.base, files.adapters[: plan.max_grouped_adapters])
        self.shape = shape_of(self.base.config.to_dict())
        self.experts: dict[int, str] = {}

    def prompts(self, num_requests: int) -> Prompts:
        generator = torch.Generator().manual_seed(num_requests)
        tokens = torch.randint(self.plan.size.vocab_size, (num_requests, PROMPT_TOKENS), generator=generator)
        return [tuple(row) for row in tokens.tolist()]

    def choose_experts(self, num_requests: int) -> None:
        """Set transformers' and peft's fastest experts implementation at this batch size."""
        if num_requests not in self.experts:
            prompts = self.prompts(num_requests)
            self.experts[num_requests] = fastest_experts(self.base, prompts, self.plan.steps_per_round)
        name = self.experts[num_requests]
        for model in (self.base, self.mixed.base_model.model, self.grouped.base_model.model):
            model.set_experts_implementation(name)

    def contestants(self, num_requests: int, num_adapters: int) -> dict[str, tuple[Contestant, int, int]]:
        """Name -> (contestant, steps per round, rounds)."""
        plan, prompts = self.plan, self.prompts(num_requests)
        usual = (plan.steps_per_round, plan.num_rounds)
        base = EngineRun(self.core, prompts, [None] * num_requests)
        if not num_adapters:
            return {"engine base": (base, *usual), "transformers base": (Decoder(self.base, prompts), *usual)}
        names = [f"all-{i % num_adapters}" for i in range(num_requests)]
        attention = [f"attention-{i % num_adapters}" for i in range(num_requests)]
        found: dict[str, tuple[Contestant, int, int]] = {
            "engine base": (base, *usual),
            "engine": (EngineRun(self.core, prompts, names), *usual),
            "engine attention": (EngineRun(self.core, prompts, attention), *usual),
            "peft mixed": (Decoder(self.mixed, prompts, adapter_names=attention), *usual),
        }
        if num_adapters <= plan.max_grouped_adapters:
            headline = (num_requests, num_adapters) == plan.headline
            rounds = plan.grouped_rounds if headline else 1
            found["peft grouped"] = (GroupedDecoder.prefill(self.grouped, prompts, names), 1, rounds)
        return found

    def measure(
        self, num_requests: int, num_adapters: int, bandwidth: ReadBandwidth
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(config, result) of each contestant of one cell."""
        self.choose_experts(num_requests)
        contestants = self.contestants(num_requests, num_adapters)
        for name, (contestant, _, _) in contestants.items():
            if name != "peft grouped":  # its prefill was a warm-up, and a step takes seconds
                contestant(1)
        read = {
            name: step_bytes(contestant, self.shape, self.itemsize)
            for name, (contestant, _, _) in contestants.items()
            if isinstance(contestant, EngineRun)
        }
        gc.collect()
        contestants["read"] = (lambda num_bytes: num_bytes / bandwidth.measure(), 1, self.plan.num_rounds)
        times = interleave(contestants, self.plan.num_rounds)
        for name in times:
            if name != "read":
                config = self.config(name, num_requests, num_adapters, contestants[name][1])
                yield config, _result(name, times, num_requests, read.get(name))

    def config(self, system: str, num_requests: int, num_adapters: int, num_steps: int) -> dict[str, Any]:
        peer = not system.startswith("engine")
        return {
            "system": system,
            "dtype": self.dtype,
            "num_requests": num_requests,
            "num_adapters": 0 if system.endswith("base") else num_adapters,
            "cell_num_adapters": num_adapters,
            "lora_ranks": [RANKS[i % len(RANKS)] for i in range(num_adapters)],
            "prompt_tokens": PROMPT_TOKENS,
            "steps_per_round": num_steps,
            "experts_implementation": self.experts[num_requests] if peer else None,
            "eager": self.plan.eager,
            "num_threads": torch.get_num_threads(),
            "model": self.plan.size.describe(),
        }

    def check(self) -> dict[str, dict[str, float]]:
        """Our greedy answers against the peers' choices: base, attention adapters mixed, full adapters."""
        prompts, plan = self.prompts(4), self.plan
        num_grouped = min(plan.max_grouped_adapters, max(plan.num_adapters), len(RANKS))
        names: list[str | None] = [f"attention-{i % max(plan.num_adapters)}" for i in range(len(prompts))]
        answers = EngineRun(self.core, prompts, [None] * len(prompts)).tokens(plan.answer_tokens)
        found = {"base": agreement(self.base, prompts, answers)}
        answers = EngineRun(self.core, prompts, names).tokens(plan.answer_tokens)
        found["attention adapters"] = agreement(self.mixed, prompts, answers, adapter_names=names)
        names = [f"all-{i % num_grouped}" for i in range(len(prompts))]
        answers = EngineRun(self.core, prompts, names).tokens(plan.answer_tokens)
        parts = []
        for i in range(num_grouped):
            self.grouped.set_adapter(f"all-{i}")
            parts.append(agreement(self.grouped, prompts[i::num_grouped], answers[i::num_grouped]))
        found["all adapters"] = {
            "num_tokens": sum(part["num_tokens"] for part in parts),
            "token_agreement": statistics.mean(part["token_agreement"] for part in parts),
            "worst_logit_gap": max(part["worst_logit_gap"] for part in parts),
        }
        return found


def _result(
    name: str, times: Mapping[str, list[float]], num_requests: int, read: StepBytes | None
) -> dict[str, Any]:
    own = times[name]
    result: dict[str, Any] = {
        "tokens_per_s": num_requests / statistics.median(own),
        "step_ms": statistics.median(own) * 1e3,
        "step_ms_rounds": [seconds * 1e3 for seconds in own],
        "num_pairs": len(own),
        # Ratio of each other contestant's step, round by round.
        "speedup_over": {
            other: ratio(theirs, own) for other, theirs in times.items() if other not in (name, "read")
        },
    }
    if read is not None:
        ceiling = [seconds_per_byte * read.total for seconds_per_byte in times["read"]]
        result |= {
            "read_bytes": {"weights": read.weights, "kv": read.kv, "adapters": read.adapters},
            "adapter_share": read.adapter_share,
            "read_bytes_per_s": 1 / statistics.median(times["read"]),
            "ceiling_tokens_per_s": num_requests / statistics.median(ceiling),
            "share_of_ceiling": ratio(ceiling, own),
        }
    return result
