# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: steps with prompts, poisoned memory, and LoRA's launches in turn.

On a CPU they run with tiny models, as a trial.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bench.harness.released_models import QWEN3_30B_A3B, tiny

from .roofline_engine import (
    QUICK,
    REAL,
    Prompts,
    Work,
    answers,
    ask,
    decode,
    drawn,
    graphs_of,
    kernels_noted,
    logits_of,
    random_prompts,
    started,
)
from .run_log import Log, poisoned

if TYPE_CHECKING:
    from moe_lora.engine.core import EngineCore

PROMPT_ROWS: tuple[int, ...] = (16, 128, 512, 2048)
DECODING = (0, 32)
NUM_STEPS = 8


def prompt_steps(log: Log) -> None:
    """Wall time and busy time of the GPU in steps with a new prompt, beside decoding requests and alone."""
    layers = log.max_layers or 12
    work = replace(REAL, batches=(1, 34), num_prompts=2, num_adapters=8, num_steps=400, max_layers=layers)
    rows = PROMPT_ROWS
    if log.quick:
        work, rows = replace(QUICK, num_adapters=8, num_steps=60), (4, 16)
    config = tiny(QWEN3_30B_A3B) if log.quick else QWEN3_30B_A3B
    names = [f"a{i}" for i in range(work.num_adapters)]
    with started(config, work, names) as core:
        about = {"layers": core.shape_and_dtype[0].num_layers, "device": work.device}
        for who in (None, names):
            for decoding in (0, 2) if log.quick else DECODING:
                for number in rows:
                    for way in ("graphs", "launched"):
                        with _steps_go_by(core, way):
                            _time_joins(log, core, work, who, decoding, number, {**about, "way": way})
        if not log.quick:
            with _steps_go_by(core, "launched"):
                _profile_host(log, core, names, 512)


@contextmanager
def _steps_go_by(core: EngineCore, way: str) -> Iterator[None]:
    """Within the context steps with prompts are replayed, or launched one by one."""
    graphs = core._runner._graphs
    if graphs is None or way == "graphs":
        yield
    else:
        with patch.object(graphs, "prompt_rows", []):
            yield


def _named(names: Sequence[str] | None, number: int) -> Sequence[str | None]:
    return [None] * number if names is None else drawn(names, number)


def _time_joins(
    log: Log,
    core: EngineCore,
    work: Work,
    names: Sequence[str] | None,
    decoding: int,
    prompt_rows: int,
    about: dict[str, Any],
) -> None:
    """Steps in each of which one prompt of prompt_rows tokens joins."""
    running = []
    if decoding:
        prompts = random_prompts(core, decoding, work.context)
        running = ask(core, prompts, _named(names, decoding), work.num_steps)
        while len(core.step()) < decoding:
            pass
    joining = random_prompts(core, 1, prompt_rows)
    _join(core, joining, names, 3)
    times = _join(core, joining, names, NUM_STEPS)
    with kernels_noted(work.device) as kernels:
        _join(core, joining, names, 2)
    number = max(1, sum(count for _, count in kernels.values()))
    busy_ms = sum(us for us, _ in kernels.values()) / 2e3
    arm = "base" if names is None else "zipf"
    claims: dict[str, Any] = {}
    if work.device == "cuda":
        claims = {"step_ms": sorted(times)[len(times) // 2] * 1e3, "busy_ms": busy_ms, "kernels": number / 2}
        claims["step_ms_all"] = [round(one * 1e3, 2) for one in times]
    log("prompt_steps", **about, arm=arm, decoding=decoding, prompt_rows=prompt_rows, **claims)
    for request_id in running:
        core.abort(request_id)
    while core.has_work:
        core.step()


def _join(core: EngineCore, joining: Prompts, names: Sequence[str] | None, number: int) -> list[float]:
    """Seconds of steps, each with a new request of one token.  Ends with the GPU idle."""
    import torch

    times = []
    for _ in range(number):
        ask(core, joining, _named(names, 1), 1)
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    core.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return times


def _profile_host(log: Log, core: EngineCore, names: Sequence[str], prompt_rows: int) -> None:
    """Functions that take the host's time in prompt steps, in prompt_steps_host.txt."""
    joining = random_prompts(core, 1, prompt_rows)
    profile = cProfile.Profile()
    profile.enable()
    _join(core, joining, names, NUM_STEPS)
    profile.disable()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumulative").print_stats(45)
    (log.folder / "prompt_steps_host.txt").write_text(text.getvalue())


def uninitialised(log: Log) -> None:
    """Logits of prompts and decode steps with poisoned memory against those without, bit for bit."""
    import torch

    work = replace(QUICK if log.quick else REAL, num_adapters=8, max_layers=log.max_layers or 3)
    work = replace(work, batches=work.batches[-2:])
    config = tiny(QWEN3_30B_A3B) if log.quick else QWEN3_30B_A3B
    names = [f"a{i}" for i in range(work.num_adapters)]
    with started(config, work, names) as core:
        prompts = random_prompts(core, work.batches[0], work.context)
        for arm in ("base", "zipf"):
            who = _named(names if arm == "zipf" else None, len(prompts))
            with graphs_of(core, {}):
                plain = logits_of(core, prompts, who, work.same_steps)
            with graphs_of(core, {}), poisoned():
                found = logits_of(core, prompts, who, work.same_steps)
            same = [torch.equal(a, b) for a, b in zip(plain, found, strict=True)]
            finite = all(bool(torch.isfinite(one).all()) for one in found)
            log("uninitialised", arm=arm, device=work.device, steps=len(same), same=sum(same), finite=finite)


@contextmanager
def _lora_goes_by(way: str) -> Iterator[None]:
    """Within the context sites run after their base layer, or shrink beside the layer on a second stream."""
    from moe_lora.lora.local import SideStream

    if way == "beside":
        yield
    else:
        with patch.object(SideStream, "is_open", False):
            yield


WAYS = ("after", "beside")


def lora_launches(log: Log) -> None:
    """Decode steps with adapters, with sites after their base layers and beside them, in turn."""
    work = replace(QUICK if log.quick else REAL, num_adapters=64, max_layers=log.max_layers or 12)
    if not log.quick:
        work = replace(work, num_prompts=2, prompt_tokens=1024)  # fewer sizes to capture
    config = tiny(QWEN3_30B_A3B) if log.quick else QWEN3_30B_A3B
    names = [f"a{i}" for i in range(work.num_adapters)]
    arms: list[tuple[int, str, Sequence[str | None]]] = []
    for batch in work.batches:
        arms += [(batch, "base", [None] * batch), (batch, "zipf of 8", drawn(names[:8], batch))]
    arms += [(batch, "zipf of 64", drawn(names, batch))]
    begin = time.perf_counter()
    with started(config, work, names) as core:
        prompts = random_prompts(core, max(work.batches), work.context)
        about = {"device": work.device, "layers": core.shape_and_dtype[0].num_layers}
        log("lora_launches", **about, start_s=round(time.perf_counter() - begin, 1))
        answers(core, prompts[:1], names[:1], 2)  # the ranks' bound is known
        graphs: dict[str, Any] = {}
        tokens: dict[str, Any] = {}
        found: dict[tuple[int, str, str], list[float]] = {}
        for _ in range(3):
            for way in WAYS:
                with _lora_goes_by(way), graphs_of(core, graphs.setdefault(way, {})):
                    if way not in tokens:
                        few = prompts[: work.batches[-2]]
                        tokens[way] = answers(core, few, drawn(names[:8], len(few)), work.same_steps)
                    for batch, arm, who in arms:
                        if arm == "base" and way != WAYS[0]:
                            continue
                        seconds, _, _ = decode(core, prompts[:batch], who, work.num_steps)
                        found.setdefault((batch, arm, way), []).append(sorted(seconds)[len(seconds) // 2])
        log("lora_launches", **about, same_tokens=[one == tokens[WAYS[0]] for one in tokens.values()])
        for (batch, arm, way), seconds in found.items():
            claims = {"step_ms": [round(one * 1e3, 4) for one in seconds]} if work.device == "cuda" else {}
            log("lora_launches", **about, batch=batch, arm=arm, way=way, **claims)
