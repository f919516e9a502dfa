# SPDX-License-Identifier: Apache-2.0
"""The systems of `bench_host_assisted` on an emulated device, by turns on the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moe_lora import AsyncLLM, SamplingParams
from moe_lora.config.optional_parts import EmulationConfig
from moe_lora.core.request import GenerateRequest

from .assisted_device import Device
from .assisted_plan import CACHED, LONGEST, NUM_SLOTS, NUM_WARM, ON_DEMAND, OURS, Ask, Cell, asks

MAX_ENGINE_SHARE = 0.7
"""Limit of the engine's real work on its core, to keep emulated times."""


class DoesNotFitError(Exception):
    """The engine's real work does not fit into the emulated times."""


@dataclass
class Run:
    """One system's answers to the requests of a round, in order; seconds.

    decode_s: from the first token to the last.  warm_gaps_s: between tokens of the warm requests.
    engine_s, host_s: CPU time of the engine's process and of its host worker.
    """

    ttft_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    warm_gaps_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    engine_s: float = 0.0
    host_s: float = 0.0

    def figures(self, cached: Run) -> dict[str, float]:
        """A record's figures.  interrupted: excess of a request's decoding over `cached`, as a share of
        its time.
        """
        e2e_s = [a + b for a, b in zip(self.ttft_s, self.decode_s, strict=True)]
        longer = zip(self.decode_s, cached.decode_s, e2e_s, strict=True)
        return {
            "ttft_s": statistics.mean(self.ttft_s),
            "ttft_p95_s": float(np.quantile(self.ttft_s, 0.95)),
            "tpt_s": statistics.mean(t / n for t, n in zip(e2e_s, self.num_tokens, strict=True)),
            "e2e_s": statistics.mean(e2e_s),
            "warm_tpot_s": statistics.mean(self.warm_gaps_s),
            "warm_gap_p95_s": float(np.quantile(self.warm_gaps_s, 0.95)),
            "interrupted": statistics.mean((mine - other) / all_s for mine, other, all_s in longer),
            "engine_share": self.engine_s / self.wall_s,
            "host_share": self.host_s / self.wall_s,
            "host_s_a_request": self.host_s / len(self.ttft_s),
        }


class System:
    """One engine.  whole_loads: no layer of an adapter serves before all are loaded (no pipelining)."""

    def __init__(
        self,
        name: str,
        cell: Cell,
        device: Device,
        model_dir: Path,
        adapters: Sequence[Path],
        core: int,
        *,
        whole_loads: bool = False,
    ) -> None:
        workers: dict[str, Any] = {}
        if name == OURS:
            workers = {
                "host_workers": 1,
                "host_cores": (core,),
                "host_tokens_per_worker": cell.mean_prompt,
                "host_tokens_per_step": LONGEST * cell.mean_prompt,
                "performance_model": str(device.performance_model),
            }
        rate = device.adapter_bytes / (cell.load * device.prefill_s(cell.mean_prompt)) / 1e9
        emulation = EmulationConfig(
            step_profile=device.profile,
            load_gb_per_s=None if name == CACHED else rate,
            blocking_loads=name == ON_DEMAND,
            host_slowdown=1 / cell.cores,
        )
        before = set(psutil.Process().children())
        self.llm = AsyncLLM(
            str(model_dir),
            adapters={f"a{number}": str(path) for number, path in enumerate(adapters)},
            emulation=emulation,
            **engine_settings(len(adapters) if name == CACHED else NUM_SLOTS),
            **workers,
        )
        self._workers = set(psutil.Process().children()) - before
        self.vocab_size = cell.size.vocab_size
        if whole_loads:
            self.llm.client.core.transfers._host_loads = None
        if name == CACHED:
            for number in range(len(adapters)):
                self.llm.pin_adapter(f"a{number}")

    def host_s(self) -> float:
        """CPU time of its host workers so far."""
        return sum(sum(worker.cpu_times()[:2]) for worker in self._workers)


def engine_settings(max_loras: int) -> dict[str, Any]:
    """Of every system alike."""
    return {
        "eager": True,
        "num_threads": 1,
        "max_loras": max_loras,
        "cache_policy": "lru",
        "prefix_caching": False,
        "host_arena_mb": 0,
        "kv_cache_gb": 0.1,
    }


async def run(llm: AsyncLLM, wanted: Sequence[Ask], vocab_size: int, num_warm: int = NUM_WARM) -> Run:
    """Send the requests at their times, beside permanent decodes."""
    found = Run([0.0] * len(wanted), [0.0] * len(wanted), [ask.num_output_tokens for ask in wanted])
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(ask.num_prompt_tokens)) for ask in wanted]
    begin_s = time.monotonic()

    async def one(number: int, ask: Ask) -> None:
        await asyncio.sleep(begin_s + ask.arrival_s - time.monotonic())
        sent_s = time.monotonic()
        first_s = last_s = 0.0
        async for _ in llm.client.generate(
            request(prompts[number], f"a{ask.adapter}", ask.num_output_tokens)
        ):
            last_s = time.monotonic()
            first_s = first_s or last_s
        found.ttft_s[number], found.decode_s[number] = first_s - sent_s, last_s - first_s

    async def warm() -> None:
        last_s = 0.0
        async for _ in llm.client.generate(request((1, 2, 3), None, 2000)):
            now_s = time.monotonic()
            if last_s:
                found.warm_gaps_s.append(now_s - last_s)
            last_s = now_s

    background = [asyncio.create_task(warm()) for _ in range(num_warm)]
    engine_s = time.process_time()
    await asyncio.gather(*(one(*numbered) for numbered in enumerate(wanted)))
    found.wall_s, found.engine_s = time.monotonic() - begin_s, time.process_time() - engine_s
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    return found


def request(prompt: tuple[int, ...], adapter: str | None, num_tokens: int) -> GenerateRequest:
    """Greedy, of exactly so many tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(
        request_id=uuid.uuid4().hex, prompt_token_ids=prompt, sampling=sampling, adapter=adapter
    )


async def check_fit(system: System, cell: Cell, device: Device) -> dict[int, float]:
    """{prompt tokens: CPU time of the engine over the emulated time of the prompt}.

    Raises DoesNotFitError for a mean prompt above MAX_ENGINE_SHARE.
    """
    shares = {}
    for num_tokens in (cell.mean_prompt // LONGEST, cell.mean_prompt, LONGEST * cell.mean_prompt):
        times = []
        for _ in range(4):
            begin_s = time.process_time()
            await run(system.llm, [Ask(0.0, 0, num_tokens, 1)], system.vocab_size, num_warm=0)
            times.append(time.process_time() - begin_s)
        shares[num_tokens] = statistics.median(times[1:]) / device.prefill_s(num_tokens)
    if shares[cell.mean_prompt] > MAX_ENGINE_SHARE:
        raise DoesNotFitError(
            f"{cell.name}: the engine needs {shares[cell.mean_prompt]:.0%} of a core for the prompts of this "
            f"device, and {MAX_ENGINE_SHARE:.0%} may be; give a larger --slack, which makes it slower"
        )
    return shares


async def compare(
    cell: Cell, device: Device, model_dir: Path, adapters: Sequence[Path], core: int, num_rounds: int
) -> dict[str, Any]:
    """All systems by turns on the same requests; per system the figures of each round.

    Raises DoesNotFitError.
    """
    systems: dict[str, System] = {}
    try:
        for name in cell.systems:
            systems[name] = System(name, cell, device, model_dir, adapters, core)
        fit = await check_fit(systems[CACHED], cell, device)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for number in range(-1, num_rounds):
            runs = await _round(
                systems, asks(cell, device.prefill_s(cell.mean_prompt), number % 1000), number
            )
            if number >= 0:
                for name, one in runs.items():
                    rounds[name].append(one.figures(runs[CACHED]))
        stats = systems[OURS].llm.stats() if OURS in systems else None
    finally:
        for system in systems.values():
            system.llm.close()
    for name, of_rounds in rounds.items():
        share = statistics.median(one["engine_share"] for one in of_rounds)
        if share > MAX_ENGINE_SHARE:
            raise DoesNotFitError(
                f"{cell.name}, {name}: the engine took {share:.0%} of its core; see --slack"
            )
    rows = (
        {}
        if stats is None
        else {
            "host": stats.lora_rows_host,
            "local": stats.lora_rows_local,
            "fallback": stats.host_fallback_rows,
        }
    )
    return {"rounds": rounds, "lora_rows": rows, "engine_share_of_prompts": fit}


BY_LAYER, WHOLE = "layer by layer", "whole adapters"


async def lone(
    cell: Cell, device: Device, model_dir: Path, adapters: Sequence[Path], core: int, num_rounds: int
) -> dict[str, Any]:
    """Cold prompts of mean length in sequence, with and without pipelining of
    layers; figures of each round.
    """
    systems: dict[str, System] = {}
    rounds: dict[str, list[dict[str, float]]] = {BY_LAYER: [], WHOLE: []}
    try:
        for name in rounds:
            systems[name] = System(OURS, cell, device, model_dir, adapters, core, whole_loads=name == WHOLE)
        for number in range(-1, num_rounds):
            order = list(systems) if number % 2 == 0 else list(systems)[::-1]
            for name in order:
                ttft_s = []
                for turn in range(cell.num_requests):
                    adapter = ((number + 1) * cell.num_requests + turn) % len(adapters)
                    wanted = [Ask(0.0, adapter, cell.mean_prompt, 1)]
                    one = await run(systems[name].llm, wanted, systems[name].vocab_size, num_warm=0)
                    ttft_s += one.ttft_s
                if number >= 0:
                    rounds[name].append({"ttft_s": statistics.mean(ttft_s)})
        stats = {name: system.llm.stats() for name, system in systems.items()}
    finally:
        for system in systems.values():
            system.llm.close()
    rows = {"host": stats[BY_LAYER].lora_rows_host, "local": stats[BY_LAYER].lora_rows_local}
    fallback = sum(one.host_fallback_rows for one in stats.values())
    whole = {"host_whole": stats[WHOLE].lora_rows_host, "local_whole": stats[WHOLE].lora_rows_local}
    return {"rounds": rounds, "lora_rows": rows | {"fallback": fallback} | whole}


async def _round(systems: Mapping[str, System], wanted: Sequence[Ask], number: int) -> dict[str, Run]:
    names = list(systems)
    order = names if number % 2 == 0 else names[::-1]
    found = {}
    for name in order:
        system = systems[name]
        host_s = system.host_s()
        found[name] = await run(system.llm, wanted, system.vocab_size)
        found[name].host_s = system.host_s() - host_s
    return found


def pin(cores: Sequence[int]) -> None:
    """Pin every thread of this process, and later threads."""
    for task in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(task.id, cores)
