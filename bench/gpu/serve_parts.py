# SPDX-License-Identifier: Apache-2.0
"""Part of the first run on a GPU: `moe-lora serve` under load over HTTP.

Layers of Qwen3-30B-A3B with random weights, adapters on attention and experts, Poisson arrivals of prompts of
mixed lengths.  A further tree in .cache/before answers equal requests first, for a comparison.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.random_model import ModelSize, write_adapter
from bench.harness.records import ROOT
from bench.harness.released_models import QWEN3_30B_A3B, tiny
from bench.serve.served_tree import ServedTree, event_times, posted

from .run_log import Log

BEFORE = ROOT / ".cache" / "before"
RATES = (12.0, 24.0)
SECONDS = 12.0
_MAX_LEN = 1024
PROMPT_TOKENS = (64, 256, 512, 900)
ANSWER_TOKENS = (32, 64, 96)
NUM_ADAPTERS, LORA_RANK = 4, 8


@dataclass(frozen=True)
class Request:
    """at_s: from the start of the load."""

    at_s: float
    model: str
    prompt: list[int]
    max_tokens: int


def serve(log: Log) -> None:
    """Times to the first token and between tokens, by rate of requests, of each tree."""
    config, layers = (tiny(QWEN3_30B_A3B), 2) if log.quick else (QWEN3_30B_A3B, log.max_layers or 12)
    rates, seconds = ((4.0,), 2.0) if log.quick else (RATES, SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config))
        write = partial(
            write_adapter, size=_size_of(config, layers), model_dir=folder / "model", experts=True
        )
        adapters = [write(folder / f"a{i}", lora_rank=LORA_RANK, seed=i) for i in range(NUM_ADAPTERS + 1)]
        words = [str(folder / "model"), "--load-format", "dummy", "--set", f"engine.num_layers={layers}"]
        words += ["--max-model-len", str(_MAX_LEN), "--max-num-seqs", "64", "--served-model-name", "base"]
        words += ["--lora-modules", *(f"{path.name}={path}" for path in adapters[:-1])]
        for tree in (BEFORE, ROOT):
            if not tree.is_dir():
                continue
            begin = time.perf_counter()
            with ServedTree(tree, sys.executable, *words) as server:
                about = {"tree": "before" if tree == BEFORE else "now", "layers": layers}
                log("serve", **about, start_s=round(time.perf_counter() - begin, 1))
                _warm(server, config["vocab_size"])
                for rate in rates:
                    _load(log, server, config["vocab_size"], rate, seconds, adapters[-1], about)


def _size_of(config: dict[str, Any], layers: int) -> ModelSize:
    """Sizes for `write_adapter`."""
    return ModelSize(
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
        num_layers=layers,
        num_experts=config["num_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
    )


def _requests(rate: float, seconds: float, vocab_size: int) -> list[Request]:
    """Of each rate always the same."""
    draw = np.random.default_rng(int(rate))
    names = [f"a{i}" for i in range(NUM_ADAPTERS)] + ["base"]
    weights = np.arange(1, len(names) + 1) ** -1.2
    at_s = np.cumsum(draw.exponential(1 / rate, int(rate * seconds)))
    return [
        Request(
            at_s=float(at),
            model=str(draw.choice(names, p=weights / weights.sum())),
            prompt=draw.integers(vocab_size, size=int(draw.choice(PROMPT_TOKENS))).tolist(),
            max_tokens=int(draw.choice(ANSWER_TOKENS)),
        )
        for at in at_s
    ]


def _warm(server: ServedTree, vocab_size: int) -> None:
    """Adapters arrive on the device, and the first sampling compiles."""
    asyncio.run(_all_answered(server.port, _requests(8.0, 4.0, vocab_size)))


def _load(
    log: Log,
    server: ServedTree,
    vocab_size: int,
    rate: float,
    seconds: float,
    late: Path,
    about: dict[str, Any],
) -> None:
    """One rate; at the highest rate an adapter is loaded meanwhile."""
    begin = time.perf_counter()
    answered = asyncio.run(_all_answered(server.port, _requests(rate, seconds, vocab_size), late))
    lasted_s = time.perf_counter() - begin
    ttft_ms = np.array([1e3 * (times[0] - start) for start, times in answered])
    tpot_ms = np.array([1e3 * (times[-1] - times[0]) / (len(times) - 1) for _, times in answered])
    gaps_ms = np.concatenate([1e3 * np.diff(times) for _, times in answered])
    found = {"requests": len(answered), "tokens_per_s": sum(len(t) for _, t in answered) / lasted_s}
    for name, values in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms), ("gap_ms", gaps_ms)):
        found |= {f"{name}_p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}
    log("serve", **about, rate=rate, **({} if log.quick else found))


async def _all_answered(
    port: int, requests: list[Request], late: Path | None = None
) -> list[tuple[float, list[float]]]:
    """Start and times of tokens of each request."""
    begin = time.perf_counter()
    tasks = [asyncio.create_task(_answered(port, request, begin)) for request in requests]
    if late is not None:
        await asyncio.sleep(requests[-1].at_s / 2)
        name = f"{late.name}-{os.urandom(4).hex()}"
        reader, writer = await posted(
            port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(late)}
        )
        answer = await reader.read()
        writer.close()
        assert b" 200 " in answer, answer
    return list(await asyncio.gather(*tasks))


async def _answered(port: int, request: Request, begin: float) -> tuple[float, list[float]]:
    await asyncio.sleep(max(0.0, begin + request.at_s - time.perf_counter()))
    asked = {"model": request.model, "prompt": request.prompt, "max_tokens": request.max_tokens}
    asked |= {"temperature": 0, "ignore_eos": True, "stream": True}
    start = time.perf_counter()
    times_s, last = await event_times(port, "/v1/completions", asked)
    assert len(times_s) >= request.max_tokens, (len(times_s), last)
    return start, times_s[: request.max_tokens]
