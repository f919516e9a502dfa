# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: the device, ahead-of-time compilation, sampling, base GEMMs."""

from __future__ import annotations

import gc
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from .lora_parts import case, delta_of, lora_tiles, shapes, sites_launched, whole_delta
from .run_log import Log, copied_per_s, cuda_us, untimed

TOOLS = ("gcc", "nvcc", "nsys", "ncu", "compute-sanitizer", "nvidia-cuda-mps-control", "git")
SMI = (
    "nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,compute_mode --format=csv,noheader"
)
CARRIED = ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "websockets")
"""Imports of `moe_lora.LLM` that a machine with torch may lack; a tree brings them in .cache/wheels."""


def facts(log: Log) -> None:
    """Versions, tools, failed imports; bandwidths, GEMM rate, costs of a graph node, a launch and a wait;
    hits of compiled kernels.
    """
    import torch
    import triton

    from bench.harness.records import environment

    tools = {
        name: bool(subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True).stdout)
        for name in TOOLS
    }
    smi = subprocess.run(["sh", "-c", SMI], capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    state = {name: value for name, value in environment(None).items() if name.startswith("git_")}
    log("facts", smi=smi, **versions, **tools, **state)
    _log_imports(log)
    log("facts", what="copy_TB_s", value={way: rate / 1e12 for way, rate in copied_per_s().items()})
    z = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    log("facts", what="read_TB_s", value=z.nbytes / cuda_us(lambda: z.amax())[0] / 1e6)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    log("facts", what="gemm_TFLOP_s", value=2 * 8192**3 / cuda_us(lambda: a @ a)[0] / 1e6)
    t = torch.zeros(8, device="cuda")

    def chain() -> None:
        for _ in range(200):
            t.add_(1)

    log("facts", what="graph_node_us", value=cuda_us(chain)[0] / 200)
    log("facts", what="eager_op_us", value=cuda_us(chain, graph=False)[0] / 200)
    begin = time.perf_counter()
    for _ in range(200):
        t.sum().item()
    log("facts", what="sync_us", value=(time.perf_counter() - begin) / 200 * 1e6)
    with triton_cache_counted() as found:
        delta_of(case(shapes()["o"], 32))
    log("facts", what="triton_cache", folder=os.environ.get("TRITON_CACHE_DIR"), **found)


def _log_imports(log: Log) -> None:
    """Missing packages of `CARRIED`, and whether an engine can be imported."""
    missing = [name for name in CARRIED if importlib.util.find_spec(name) is None]
    try:
        from moe_lora import LLM
    except ImportError as error:
        log("facts", what="imports", missing=missing, engine=str(error))
    else:
        log("facts", what="imports", missing=missing, engine=LLM.__name__)


@contextmanager
def triton_cache_counted() -> Iterator[Counter[str]]:
    """Hits and misses of compilations in the context."""
    from triton import knobs

    found = Counter(hits=0, misses=0)

    def note(*, cache_hit: bool, **rest: Any) -> None:
        found["hits" if cache_hit else "misses"] += 1

    before, knobs.compilation.listener = knobs.compilation.listener, note
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def compiled(log: Log) -> None:
    """Compile the launches of `tma` to `experts` ahead, a process per core, into Triton's cache."""
    _compile(log, "compiled", kernels_timed)
    with triton_cache_counted() as found:
        whole_delta(by_tma=False)
    log("compiled", what="triton_cache", **found)


def compiled_tiles(log: Log) -> None:
    """The same for the other parts of `tiles`."""
    from .engine_parts import attention_tiles
    from .expert_parts import expert_tiles

    def run(unread: Log) -> None:
        lora_tiles(unread)
        expert_tiles(unread)
        attention_tiles(unread)

    _compile(log, "compiled_tiles", run)


def _compile(log: Log, part: str, run: Callable[[Log], Any]) -> None:
    from bench.gpu.aot.aot_check import leave_in_cache

    begin = time.time()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        builds = builds_ahead(Log(Path(folder)), run)
    failed: Counter[str] = Counter()
    gc.collect()  # workers are forks, see `aot_check.check`
    with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
        for done in as_completed([pool.submit(leave_in_cache, build) for build in builds]):
            if done.exception() is not None:
                failed[f"{type(done.exception()).__name__}: {str(done.exception())[:200]}"] += 1
    seconds = round(time.time() - begin, 1)
    log(part, builds=len(builds), seconds=seconds, failed=failed.most_common(5))


def builds_ahead(unread: Log, run: Callable[[Log], Any]) -> list[Any]:
    """Launches of parts by their own calls, without runs and early starts.

    unread: takes their records, without times.
    """
    from bench.gpu.aot.aot import launches_recorded

    with launches_recorded() as builds, untimed():
        run(unread)
    return [build for build in builds if not build.meta.get("DEPENDENT")]


def kernels_timed(log: Log) -> None:
    """The launches of `tma` to `experts`."""
    from .expert_parts import time_all

    sites_launched(log)
    time_all(log)


def sampling(log: Log) -> None:
    """Tokens drawn on the device against the host's, then times of a draw and of a sort."""
    import torch

    from moe_lora.core.request import GenerateRequest, SamplingParams
    from moe_lora.engine.sequence import Sequence
    from moe_lora.engine.step import sampler
    from moe_lora.kernels.triton.sampling import draw

    kinds: dict[str, dict[str, Any]] = {"plain": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}}
    logits = torch.randn(64, 151936) * 3
    on_device = logits.cuda()
    for name, kind in kinds.items():
        one = SamplingParams(**kind)
        rows = [
            Sequence(GenerateRequest(request_id="", prompt_token_ids=(1,), sampling=one), None, 0.0, 99, seed)
            for seed in range(64)
        ]
        host = sampler.sample(logits.clone(), rows, ()).read()[0]
        device = sampler.sample(on_device.clone(), rows, ()).read()[0]
        log("sampling", kind=name, same_tokens=sum(a == b for a, b in zip(host, device, strict=True)), of=64)
        settings = torch.tensor([[1.0, one.top_p, 0.0]] * 64, device="cuda")
        numbers = torch.tensor([[one.top_k, seed, 0] for seed in range(64)], device="cuda")
        for num in (1, 64):
            fresh, given = on_device[:num].clone(), (settings[:num], numbers[:num])
            us, how = cuda_us(lambda fresh=fresh, given=given: draw(fresh, *given))  # type: ignore[misc]
            log("sampling", kind=name, rows=num, us=us, how=how)
    for num in (1, 64):
        us, how = cuda_us(lambda num=num: on_device[:num].sort(dim=-1, descending=True, stable=True))  # type: ignore[misc]
        log("sampling", kind="a sort alone", rows=num, us=us, how=how)


def gemm(log: Log) -> None:
    """Dense layers of few rows: against the weights' bytes."""
    for n, k in ((5120, 2048), (2048, 4096), (151936, 2048)):
        _time_dense(log, n, k)


def _time_dense(log: Log, n: int, k: int) -> None:
    import torch
    from torch.nn import functional

    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 16, 64):
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        us, _ = cuda_us(lambda x=x: functional.linear(x, w))  # type: ignore[misc]
        log("gemm", dense=(n, k), rows=rows, us=us, TB_s=w.nbytes / us / 1e6)
