# SPDX-License-Identifier: Apache-2.0
"""Clocks of the LoRA benchmark, and the machine's read, copy and GEMM rates."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .lora_kernel_peers import Call

COLD_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}
"""Matrices passed before one is met again: twice the last-level cache of the machines this is written for."""
_RATE_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}
_GEMM_SHAPE = {"cpu": (512, 2048, 2048), "cuda": (8192, 8192, 8192)}
_LEAST_S = {"cpu": 0.004, "cuda": 0.002}
_MAX_PASSES = 50


class Passes:
    """Times passes of a call over all copies: wall time on CPU, CUDA events on a GPU.

    before: untimed call on all copies ahead of each pass (an expand needs its shrink).
    graph: on a GPU, time replays of a captured pass, for launch costs as in a captured decode step.
    Otherwise launches call by call, as stated by `timed_by`.
    """

    def __init__(
        self, call: Call, num_copies: int, device: torch.device, graph: bool, before: Call | None = None
    ) -> None:
        self._device, self.timed_by = device, "wall time" if device.type == "cpu" else "cuda events"
        self._before = None if before is None else _pass_over(before, num_copies)
        self._pass = _pass_over(call, num_copies)
        self._kept = self._before, self._pass  # memory read by a captured pass
        self(1)
        if device.type == "cuda" and graph:
            self._capture()
        self.first_s = self(1)
        self.num_passes = min(_MAX_PASSES, max(1, round(_LEAST_S[device.type] / self.first_s)))

    def _capture(self) -> None:
        # In this order: the captured pass reads the memory of the captured shrink.
        before = None if self._before is None else _captured(self._before)
        captured = None if (before is None) != (self._before is None) else _captured(self._pass)
        if captured is not None:
            self._before, self._pass, self.timed_by = before, captured, "cuda graph"

    def __call__(self, num_steps: int) -> float:
        """Seconds of `num_steps` passes."""
        if self._before is None:
            return self._seconds(num_steps)
        total_s = 0.0
        for _ in range(num_steps):
            self._before()
            total_s += self._seconds(1)
        return total_s

    def _seconds(self, num_passes: int) -> float:
        if self._device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(num_passes):
                self._pass()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        start_s = time.perf_counter()
        for _ in range(num_passes):
            self._pass()
        return time.perf_counter() - start_s


def _pass_over(call: Call, num_copies: int) -> Callable[[], None]:
    def one_pass() -> None:
        for copy in range(num_copies):
            call(copy)

    return one_pass


def _captured(one_pass: Callable[[], None]) -> Callable[[], None] | None:
    """Replay of the pass captured into a CUDA graph; None if not possible, e.g. with waits."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            one_pass()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


class Rates:
    """The machine's rates in the run's own rounds: `contestants` for interleave, amounts by name.

    read (CPU only): sum of a buffer as 64-bit integers, bytes.  copy: bytes read plus bytes written.  gemm:
    flops of a large product in the case's dtype.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        num_bytes = _RATE_BYTES[device.type]
        buffer = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
        target = torch.empty_like(buffer)
        rows, width, columns = _GEMM_SHAPE[device.type]
        left = torch.randn(rows, width, device=device).to(dtype)
        right = torch.randn(columns, width, device=device).to(dtype)
        self.amounts = {"copy": 2 * num_bytes, "gemm": 2 * rows * width * columns}
        calls: dict[str, Call] = {
            "copy": lambda _: target.copy_(buffer),
            "gemm": lambda _: torch.mm(left, right.T),
        }
        if device.type == "cpu":
            self.amounts["read"] = num_bytes
            calls["read"] = lambda _: buffer.sum()
        self.contestants = {name: Passes(call, 1, device, graph=False) for name, call in calls.items()}
