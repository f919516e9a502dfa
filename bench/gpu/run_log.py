# SPDX-License-Identifier: Apache-2.0
"""Log and device times for every part of the first run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any


class Log:
    """Records of a run: lines of truth.jsonl in a folder, also printed.

    quick: supporting parts run on tiny models, on any machine.  max_layers: of the parts' models.
    """

    def __init__(self, folder: Path, *, quick: bool = False, max_layers: int | None = None) -> None:
        self.folder = folder
        self.quick = quick
        self.max_layers = max_layers

    def __call__(self, part: str, **record: Any) -> None:
        line = json.dumps({"part": part, **record}, default=str)
        print(line[:600], flush=True)
        with (self.folder / "truth.jsonl").open("a") as file:
            file.write(line + "\n")


@contextmanager
def tried(log: Log, part: str, **about: Any) -> Iterator[None]:
    """A launch that may fail to compile or to fit: a failure is logged as the result."""
    try:
        yield
    except Exception as error:
        log(part, **about, error=str(error)[:200])


_TIMED = ContextVar("_TIMED", default=True)


@contextmanager
def untimed() -> Iterator[None]:
    """Within the context `cuda_us` calls once and times nothing."""
    before = _TIMED.set(False)
    try:
        yield
    finally:
        _TIMED.reset(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the context new memory holds NaN, or the largest integer."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def cuda_us(call: Callable[[], Any], repeat: int = 20, graph: bool = True) -> tuple[float, str]:
    """Median microseconds of call(), in a CUDA graph if possible; and whether it was."""
    import torch

    if not _TIMED.get():
        call()
        return float("nan"), "untimed"
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run, how = call, "eager"
    if graph:
        try:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                call()
            run, how = captured.replay, "graph"
        except RuntimeError as error:
            torch.cuda.synchronize()
            how = f"eager: {str(error)[:80]}"
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2], how


def copied_per_s() -> dict[str, float]:
    """Bytes per second, read and written in the device's memory, by each way to copy, and the best.

    A captured copy is slower than a launched copy; a kernel may be faster than both.
    """
    import torch

    x = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    seconds = {
        "graph": cuda_us(lambda: y.copy_(x))[0] / 1e6,
        "launched": cuda_us(lambda: y.copy_(x), graph=False)[0] / 1e6,
        "kernel": cuda_us(lambda: torch.add(x, 1, out=y))[0] / 1e6,
    }
    found = {way: 2 * x.nbytes / one for way, one in seconds.items()}
    return {**found, "best": max(found.values())}
