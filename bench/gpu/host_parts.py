# SPDX-License-Identifier: Apache-2.0
"""Part of the first run on a GPU: host workers over the device's stream, against waiting in each layer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.harness.interleave import interleave, ratio, repeated
from bench.harness.random_model import ATTENTION, TINY, ModelSize, write_adapter, write_model

from .run_log import Log

HOST_SIZE = ModelSize(
    hidden_size=2048,
    intermediate_size=2048,
    num_layers=12,
    num_experts=0,
    num_experts_per_token=0,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    vocab_size=4096,
)
LENGTHS = (64, 256)
"""Tokens of a prompt, as in Toppings section 7.3 (67 to 61 ms, and 145 to 126 ms)."""


def host(log: Log) -> None:
    """Tokens of cold requests by both ways, experts too, and the time of a cold prompt."""
    same_tokens(log, "cuda", TINY)
    prompt_times(log, "cuda", HOST_SIZE, LENGTHS, 9)


def _engine(model: Path, adapters: dict[str, str], waits: bool, **settings: Any) -> Any:
    """An engine with slow loads, so that hosts compute whole prompts; waits: its
    thread waits in each layer.
    """
    from moe_lora import LLM
    from moe_lora.engine.ranks.rank import Rank

    with ExitStack() as patched:
        if waits:
            patched.enter_context(patch.object(Rank, "host_stream", lambda rank: None))
        return LLM(str(model), adapters=adapters, eager=True, max_num_seqs=8, **settings)


def _adapters(folder: Path, size: ModelSize, model: Path, number: int, **options: Any) -> dict[str, str]:
    paths = [write_adapter(folder / f"a{i}", size, model, seed=i, **options) for i in range(number)]
    return {path.name: str(path) for path in paths}


def same_tokens(log: Log, device: str, size: ModelSize) -> None:
    """Greedy fp32 tokens of cold requests: over the stream, waiting, and once all is on the device."""
    from moe_lora import SamplingParams
    from moe_lora.config.optional_parts import EmulationConfig

    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[7 * i + j for j in range(5 + 2 * i)] for i in range(4)]
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "m", size)
        adapters = _adapters(Path(name), size, model, 4, lora_rank=8, experts=size.num_experts > 0)
        settings = {
            "device": device,
            "dtype": "float32",
            "host_workers": 1,
            "host_tokens_per_worker": 8,
            "emulation": EmulationConfig(load_gb_per_s=2e-4),
        }
        found, rows = {}, {}
        for way in ("stream", "waits"):
            with _engine(model, adapters, way == "waits", **settings) as llm:
                cold, warm = (
                    [one.token_ids for one in llm.generate(prompts, list(adapters), sampling)]
                    for _ in range(2)
                )
                stats = llm.stats()
                found[way], rows[way] = cold == warm, stats.lora_rows_host
                log(
                    "host",
                    what="tokens",
                    way=way,
                    cold_is_warm=found[way],
                    rows_on_host=rows[way],
                    fallback_rows=stats.host_fallback_rows,
                    tokens=cold,
                )


def prompt_times(log: Log, device: str, size: ModelSize, lengths: Sequence[int], num_rounds: int) -> None:
    """Seconds of a cold prompt and its first token, the two ways in turn; every request another adapter."""
    from moe_lora import SamplingParams
    from moe_lora.config.optional_parts import EmulationConfig

    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as held:
        model = write_model(Path(name) / "m", size)
        options = {"lora_rank": 32, "experts": False, "attention": ATTENTION[:3]}
        adapters = _adapters(Path(name), size, model, 4, **options)
        num_bytes = 2 * 32 * 6 * size.hidden_size * size.num_layers
        settings = {
            "device": device,
            "max_loras": 2,
            "host_workers": 1 if device == "cpu" else 8,
            "host_tokens_per_worker": max(lengths) // 8,
            "emulation": EmulationConfig(load_gb_per_s=num_bytes / 0.4 / 1e9),
        }
        engines = {
            way: held.enter_context(_engine(model, adapters, way == "waits", **settings))
            for way in ("stream", "waits")
        }
        numbers = dict.fromkeys(engines, 0)

        def ask(way: str, length: int) -> None:
            adapter = f"a{numbers[way] % len(adapters)}"
            numbers[way] += 1
            engines[way].generate([[i % 100 + 1 for i in range(length)]], adapter, one)

        for length in lengths:
            before = {way: llm.stats().lora_rows_host for way, llm in engines.items()}
            steps = {way: (timed(partial(ask, way, length)), 1, num_rounds) for way in engines}
            for way in engines:  # not counted
                ask(way, length)
                time.sleep(0.6)
            seconds = interleave(steps, num_rounds)
            whole = length * size.num_layers * (num_rounds + 1)
            share = {way: (llm.stats().lora_rows_host - before[way]) / whole for way, llm in engines.items()}
            log(
                "host",
                what="prompt",
                tokens=length,
                seconds=seconds,
                rows_on_host=share,
                waits_over_stream=ratio(seconds["waits"], seconds["stream"]),
            )


def timed(step: Callable[[], object]) -> Callable[[int], float]:
    """As `repeated`, followed by a rest for the end of the load."""

    def seconds(num_steps: int) -> float:
        found = repeated(step)(num_steps)
        time.sleep(0.6)
        return found

    return seconds
