# SPDX-License-Identifier: Apache-2.0
"""Our engine as a contestant: requests of one length in lockstep, decode steps timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore

Prompts = Sequence[tuple[int, ...]]
_run_numbers = itertools.count()


def start_engine(
    model_dir: Path,
    adapters: tuple[tuple[str, str], ...],
    dtype: str,
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_threads: int,
    eager: bool,
    quantize: str = "none",
    quantize_head: bool = False,
) -> EngineCore:
    """An engine with every adapter on the device."""
    files = (Path(path) / "adapter_model.safetensors" for _, path in adapters)
    file_bytes = sum(file.stat().st_size for file in files)
    itemsize_ratio = 2 if dtype == "float32" else 1  # the files hold bf16
    # Each adapter's last page per layer is filled in part only.
    lora_memory_gb = (1.1 * itemsize_ratio * file_bytes + len(adapters) * 16e6) / 1e9
    core = build_engine(
        EngineConfig(
            model_dir=str(model_dir),
            adapters=adapters,
            dtype=dtype,
            quantize=quantize,
            quantize_head=quantize_head,
            device="cpu",
            max_loras=max(1, len(adapters)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs * max_model_len,
            max_model_len=max_model_len,
            lora_memory_gb=lora_memory_gb,
            num_threads=num_threads,
            eager=eager,
        )
    )
    return with_all_resident(core, adapters)


def with_all_resident(core: EngineCore, adapters: tuple[tuple[str, str], ...]) -> EngineCore:
    """The engine with all its adapters resident."""
    for name, _ in adapters:
        core.adapters.pin(core.adapters.current(name))
    while len(core.stats().resident_adapters) < len(adapters):
        core.tend()
        time.sleep(1e-3)
    return core


@dataclass(frozen=True)
class EngineRun:
    """Requests (prompt, adapter or None) on one engine.

    Every call starts them anew; the prefix cache holds the prompts (whole blocks and one token), for a short
    untimed first step.
    """

    core: EngineCore
    prompts: Prompts
    adapters: Sequence[str | None]

    def __call__(self, num_steps: int) -> float:
        """Seconds of `num_steps` steps with a token per request."""
        self.start(num_steps + 1)
        start_s = time.perf_counter()
        for _ in range(num_steps):
            outputs = self.core.step()
            assert len(outputs) == len(self.prompts), "a request stayed out of a decode step"
        seconds = time.perf_counter() - start_s
        assert not self.core.has_work, "requests outlived their last step"
        return seconds

    def start(self, max_tokens: int) -> list[int]:
        """Add the requests and run their prefill step; returns the first tokens."""
        run = next(_run_numbers)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for i, (prompt, adapter) in enumerate(zip(self.prompts, self.adapters, strict=True)):
            self.core.add_request(
                GenerateRequest(
                    request_id=f"{run}-{i}", prompt_token_ids=prompt, adapter=adapter, sampling=sampling
                )
            )
        outputs = self.core.step()
        assert len(outputs) == len(self.prompts), "the prompts did not fit one step"
        return [output.token_ids[0] for output in outputs]

    def tokens(self, num_tokens: int) -> list[list[int]]:
        """Greedy continuation of every prompt."""
        found = [[token] for token in self.start(num_tokens)]
        while self.core.has_work:
            for answer, output in zip(found, self.core.step(), strict=True):
                answer += output.token_ids
        return found
