# SPDX-License-Identifier: Apache-2.0
"""Unpaced: an engine on all cores against one with a core less and a host worker on that core.

The base model and the deltas share cores, so a worker's gain may be the engine's loss.  The engine on all
cores uses its better setting: a thread per core, or one less for clients and loads.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_lora import AsyncLLM
from moe_lora.config.optional_parts import EmulationConfig

from .assisted_device import Files
from .assisted_plan import NUM_SLOTS, S3, Ask, asks
from .assisted_runs import Run, engine_settings, run

ALL_CORES, ONE_LESS = "a thread on each core", "a thread less than cores"
WITH_WORKER = "a core for a worker"


def unpaced(files: Files, num_rounds: int) -> dict[str, Any]:
    """By turns on the requests of S3, loads as long as a prompt's prefill on all cores; figures by round."""
    context = multiprocessing.get_context("spawn")
    model_dir, adapters = files.model(S3), files.adapters(S3)
    ends: dict[str, Connection] = {}
    prefill_s = 0.0
    for name in (ALL_CORES, ONE_LESS, WITH_WORKER):
        mine, theirs = context.Pipe()
        arguments = (theirs, name, model_dir, adapters, prefill_s)
        context.Process(target=_serve, args=arguments, daemon=True).start()
        theirs.close()
        ends[name] = mine
        prefill_s = mine.recv()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ends}
    for number in range(-1, num_rounds):
        wanted = asks(S3, prefill_s, number % 1000)
        runs: dict[str, Run] = {}
        for name in ends if number % 2 == 0 else reversed(ends):
            ends[name].send(wanted)
            runs[name] = ends[name].recv()
        for name, one in runs.items() if number >= 0 else ():
            rounds[name].append(one.figures(runs[ALL_CORES]))
    rows = {}
    for name, end in ends.items():
        end.send(None)
        rows[name] = end.recv()
    return {"rounds": rounds, "lora_rows": rows, "prefill_s": prefill_s}


def _serve(end: Connection, name: str, model_dir: Path, adapters: Sequence[Path], prefill_s: float) -> None:
    """Send a mean prompt's prefill time, then answer rounds of requests with their times."""
    cores = sorted(os.sched_getaffinity(0))
    settings = engine_settings(NUM_SLOTS)
    if name == WITH_WORKER:
        os.sched_setaffinity(0, cores[:-1])
        settings |= {"host_workers": 1, "host_cores": cores[-1:], "host_tokens_per_worker": S3.mean_prompt}
    settings["num_threads"] = len(cores) if name == ALL_CORES else max(1, len(cores) - 1)
    named = {f"a{number}": str(path) for number, path in enumerate(adapters)}

    def build(rate: float | None) -> AsyncLLM:
        return AsyncLLM(str(model_dir), named, emulation=EmulationConfig(load_gb_per_s=rate), **settings)

    llm = build(None)
    alone = [asyncio.run(_answered(llm, [Ask(0.0, 0, S3.mean_prompt, 1)])) for _ in range(8)]
    prefill_s = prefill_s or min(one.ttft_s[0] for one in alone)
    num_bytes = llm.client.core.known_adapter("a0")[1].nbytes
    llm.close()
    llm = build(num_bytes / prefill_s / 1e9)
    end.send(prefill_s)
    while (wanted := end.recv()) is not None:
        end.send(asyncio.run(_answered(llm, wanted)))
    stats = llm.stats()
    end.send({"host": stats.lora_rows_host, "fallback": stats.host_fallback_rows})
    llm.close()


async def _answered(llm: AsyncLLM, wanted: Sequence[Ask]) -> Run:
    return await run(llm, wanted, S3.size.vocab_size)
