"""What one Hopper GPU can tell in 9 minutes.

    python -m bench.gpu.first_run FOLDER            # in the repository root

Each part is a process of its own under a hard limit (a kernel that hangs costs its limit, no more), and
appends JSON lines to truth.jsonl as it goes; after each part all files so far are in FOLDER/results.tar.gz
(one file to copy).  Parts are ordered by what they decide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMITS_S = {
    "facts": 40,
    "ws_shrink": 30,
    "ws_expand": 30,
    "race": 40,
    "lora": 110,
    "gemm": 50,
    "engine": 120,
    "h2d": 25,
    "attention": 40,
    "shmem1": 20,
    "shmem2": 20,
}
"""Parts in their order, and seconds for each; 525 s in all."""
TOOLS = ("gcc", "nvcc", "nsys", "ncu", "compute-sanitizer", "nvidia-cuda-mps-control", "git")
SMI = (
    "nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,compute_mode --format=csv,noheader"
)
PROMPT = [1, 2, 3, 4]
SHRINK, EXPAND = "wgmma_shrink", "wgmma_expand"
_PLAIN = {"warp_specialize": False, "num_stages": 3}
TRIALS: tuple[tuple[str, dict[str, Any]], ...] = (
    (SHRINK, {}),
    (EXPAND, {}),
    (SHRINK, {"split_k": 1}),
    (SHRINK, {**_PLAIN, "programs_per_sm": 2}),
    (SHRINK, {**_PLAIN, "split_k": 1, "programs_per_sm": 2}),
    (SHRINK, {"block_k": 64, "num_stages": 6}),
    (EXPAND, {"programs_per_sm": 4}),
    (EXPAND, {"programs_per_sm": 6, "blocks_per_item": 1}),
    (EXPAND, {"programs_per_sm": 6, "blocks_per_item": 8}),
)
"""Changes to the default configuration, to see what each parameter is worth."""


class Log:
    """Records of a run: lines of truth.jsonl in a folder, shown as they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, part: str, **record: Any) -> None:
        line = json.dumps({"part": part, **record}, default=str)
        print(line[:600], flush=True)
        with (self.folder / "truth.jsonl").open("a") as file:
            file.write(line + "\n")


def run_all(final: Path) -> None:
    """Run each part within its limit; all results so far are packed after each."""
    folder = Path(tempfile.mkdtemp())
    final.mkdir(parents=True, exist_ok=True)
    log = Log(folder)
    for part, limit_s in LIMITS_S.items():
        begin = time.time()
        command = [sys.executable, "-m", "bench.gpu.first_run", str(folder), part]
        status: int | str
        try:
            done = subprocess.run(
                command, timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            status, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            status, text = "timeout", (error.stdout or b"").decode(errors="replace")
        (folder / f"{part}.txt").write_text(text)
        tail = text[-300:] if status else ""
        log("end", name=part, status=status, seconds=round(time.time() - begin, 1), tail=tail)
        with tarfile.open(final / "part.tar.gz", "w:gz") as tar:
            tar.add(folder, "results")
        os.replace(final / "part.tar.gz", final / "results.tar.gz")


# ---- helpers (CUDA from here on)


def cuda_us(call: Callable[[], Any], repeat: int = 20, graph: bool = True) -> tuple[float, str]:
    """Median microseconds of call(), captured into a CUDA graph if that works, and which it was."""
    import torch

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


def case(shape: Any, lora_rank: int, rows: int = 64, adapters: int = 64) -> Any:
    """Rows of a decode step over adapters of one rank at a site of that shape."""
    import torch

    from bench.kernels.lora_kernel_cases import Case
    from bench.kernels.lora_kernel_plan import CaseSpec

    spec = CaseSpec(
        group="decode",
        shape=shape,
        num_rows=rows,
        num_adapters=adapters,
        popularity="uniform",
        lora_ranks=(lora_rank,),
        dtype=torch.bfloat16,
        phases=("shrink", "expand"),
    )
    return Case(spec, torch.device("cuda"), 128 << 20)


def segments_of(one: Any) -> Any:
    from moe_lora.kernels.triton.segments import build_segments

    return build_segments(one.token_slots, one.ids, one.slots.num_slots, one.site.num_experts)


def shapes() -> dict[str, Any]:
    from bench.kernels.lora_kernel_plan import DENSE, QWEN3

    return {"gate_up": QWEN3[0], "down": QWEN3[1], "o": DENSE}


def default(kernel: str) -> dict[str, Any]:
    from moe_lora.kernels.triton.configs import FALLBACK, load_table

    return dict(load_table(FALLBACK).config(kernel, "bf16", "decode", 2048, 1536))


# ---- parts


def facts(log: Log) -> None:
    """Versions and tools; bandwidths, GEMM rate, what a node of a graph, a launch and a wait cost."""
    import torch
    import triton

    tools = {
        name: bool(subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True).stdout)
        for name in TOOLS
    }
    smi = subprocess.run(["sh", "-c", SMI], capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    log("facts", smi=smi, **versions, **tools)
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    log("facts", what="copy_TB_s", value=2 * x.numel() / cuda_us(lambda: y.copy_(x))[0] / 1e6)
    z = x.view(torch.int32)
    log("facts", what="read_TB_s", value=x.numel() / cuda_us(lambda: z.amax())[0] / 1e6)
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


def whole_delta(kernel: str, specialize: bool) -> dict[str, tuple[float, Any]]:
    """Largest relative error of shrink + expand against fp32, and the result, by site."""
    import torch

    from moe_lora.kernels.triton import configs
    from moe_lora.kernels.triton.triton_lora import lora_delta

    results = {}
    for name, shape in shapes().items():
        c = case(shape, 32)
        with configs.override(kernel, {**default(kernel), "warp_specialize": specialize, "num_stages": 3}):
            out = torch.empty_like(c.y[0])
            lora_delta(c.operands(0), out, decode=True, segments=segments_of(c.operands(0)))
        torch.cuda.synchronize()
        results[name] = (float((out.float() - c.exact).abs().max() / c.exact.abs().max()), out)
    return results


def compare_specialized(log: Log, kernel: str) -> None:
    """Errors without and with warp specialization, and whether the bits are the same."""
    import torch

    plain = whole_delta(kernel, False)
    log("ws", kernel=kernel, specialized=False, error={name: error for name, (error, _) in plain.items()})
    special = whole_delta(kernel, True)  # may hang: its process is killed
    same = {name: bool(torch.equal(special[name][1], out)) for name, (_, out) in plain.items()}
    errors = {name: error for name, (error, _) in special.items()}
    log("ws", kernel=kernel, specialized=True, error=errors, same_bits=same)


def ws_shrink(log: Log) -> None:
    compare_specialized(log, SHRINK)


def ws_expand(log: Log) -> None:
    compare_specialized(log, EXPAND)


def race(log: Log) -> None:
    """Shrink rewrites its tensor map while loads that use the old may be under way: look for other bits."""
    import torch

    from moe_lora.kernels.triton import configs
    from moe_lora.kernels.triton.triton_lora import lora_expand, lora_shrink

    c = case(shapes()["gate_up"], 16)
    segments = segments_of(c.operands(0))
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    other = torch.cuda.Stream()

    def run(specialize: bool) -> torch.Tensor:
        with configs.override(SHRINK, {**default(SHRINK), "warp_specialize": specialize}):
            out = torch.zeros_like(c.y[0])
            lora_expand(lora_shrink(c.operands(0), decode=True, segments=segments, max_lora_rank=16), out)
            return out

    right, rounds, wrong = run(False), 0, 0
    end = time.time() + 25
    while time.time() < end:
        with torch.cuda.stream(other):
            noise.add_(1)
        wrong += int(not torch.equal(run(True), right))
        rounds += 1
    log("race", rounds=rounds, wrong=wrong)


def lora(log: Log) -> None:
    """GB/s of shrink and of expand, launches included as in a captured step, for each trial."""
    import torch

    for lora_rank in (32, 16, 64):
        for name, shape in shapes().items():
            _time_site(log, name, shape, lora_rank)
            torch.cuda.empty_cache()


def _time_site(log: Log, name: str, shape: Any, lora_rank: int) -> None:
    from bench.kernels.lora_kernel_cases import work
    from moe_lora.kernels.triton import configs
    from moe_lora.kernels.triton.triton_lora import lora_expand, lora_shrink

    c = case(shape, lora_rank)
    segments = segments_of(c.operands(0))
    copies = range(c.num_copies)
    about: dict[str, Any] = {"site": name, "rank": lora_rank}

    def shrink_all() -> list[Any]:
        given: dict[str, Any] = {"decode": True, "segments": segments, "max_lora_rank": lora_rank}
        return [lora_shrink(c.operands(i), **given) for i in copies]

    log("lora", **about, kernel="segments", us=cuda_us(lambda: segments_of(c.operands(0)).tiles(16))[0])
    for kernel, change in TRIALS:
        trial = {**about, "kernel": kernel, "change": change}
        try:
            with configs.override(kernel, {**default(kernel), **change}):
                us, how = (
                    _time_expand(shrink_all(), c.y, lora_expand)
                    if kernel == EXPAND
                    else cuda_us(shrink_all, 7)
                )
            phase = "expand" if kernel == EXPAND else "shrink"
            gb_per_s = work(c.spec).bytes[phase] * len(copies) / us / 1e3
            log("lora", **trial, us=us / len(copies), how=how, GB_s=gb_per_s)
        except Exception as error:  # a trial that can't be compiled is a result
            log("lora", **trial, error=str(error)[:200])


def _time_expand(shrunk: list[Any], outs: Any, expand: Callable[[Any, Any], None]) -> tuple[float, str]:
    def expand_all() -> None:
        for i, one in enumerate(shrunk):
            expand(one, outs[i])

    return cuda_us(expand_all, 7)


def gemm(log: Log) -> None:
    """Base expert GEMMs: grouped_mm against the weights' bytes; dense rows."""
    for experts, n, k, top in (
        (128, 1536, 2048, 8),
        (128, 2048, 768, 8),
        (8, 28672, 4096, 2),
        (32, 5760, 2880, 4),
    ):
        _time_experts(log, experts, n, k, top)
    for n, k in ((5120, 2048), (2048, 4096), (151936, 2048)):
        _time_dense(log, n, k)


def _time_experts(log: Log, experts: int, n: int, k: int, top: int) -> None:
    import torch
    from torch.nn import functional

    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) / 50
    for rows in (1, 8, 64, 2048):
        ids = torch.rand(rows, experts, device="cuda").topk(top).indices.flatten().sort().values
        offs = torch.searchsorted(ids, torch.arange(1, experts + 1, device="cuda")).int()
        x = torch.randn(rows * top, k, device="cuda", dtype=torch.bfloat16)
        used = int(ids.unique().numel())
        about = {"experts": experts, "n": n, "k": k, "rows": rows}
        try:
            us, how = cuda_us(lambda x=x, offs=offs: functional.grouped_mm(x, w.mT, offs=offs))  # type: ignore[misc]
            rates = {"TB_s": used * n * k * 2 / us / 1e6, "TFLOP_s": 2 * rows * top * n * k / us / 1e6}
            log("gemm", **about, us=us, how=how, **rates)
        except Exception as error:  # what this torch can't do is a result
            log("gemm", **about, error=str(error)[:200])


def _time_dense(log: Log, n: int, k: int) -> None:
    import torch
    from torch.nn import functional

    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 16, 64):
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        us, _ = cuda_us(lambda x=x: functional.linear(x, w))  # type: ignore[misc]
        log("gemm", dense=(n, k), rows=rows, us=us, TB_s=w.nbytes / us / 1e6)


def engine(log: Log) -> None:
    """Synchronisations of a decode step with their places, launches, share of time that the GPU works."""
    from bench.harness import random_model

    folder = Path(tempfile.mkdtemp())
    size = random_model.FULL
    model = random_model.write_model(folder / "m", size)
    adapters = {
        f"a{i}": str(
            random_model.write_adapter(folder / f"a{i}", size, model, (8, 32)[i % 2], experts=True, seed=i)
        )
        for i in range(8)
    }
    for eager in (True, False):
        _watch_engine(log, str(model), adapters, eager)


def _watch_engine(log: Log, model: str, adapters: dict[str, str], eager: bool) -> None:
    from moe_lora import LLM

    begin = time.time()
    settings: dict[str, Any] = {"device": "cuda", "eager": eager, "decode_buckets": (16,), "max_num_seqs": 16}
    with LLM(model, adapters=adapters, **settings) as llm:
        log("engine", eager=eager, start_s=round(time.time() - begin, 1))
        names: list[str | None] = [f"a{i % 8}" for i in range(16)]
        _profile_steps(log, llm, [None] * 16, {"eager": eager, "what": "base"})
        _profile_steps(log, llm, names, {"eager": eager, "what": "lora"})
        _find_synchronisations(log, llm, names, eager)


def _profile_steps(log: Log, llm: Any, who: list[str | None], about: dict[str, Any]) -> None:
    import torch

    from moe_lora import SamplingParams

    def generate(num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate([PROMPT] * 16, who, sampling)

    generate(24)
    torch.cuda.synchronize()
    begin = time.time()
    generate(24)
    step_ms = (time.time() - begin) / 24 * 1e3
    with torch.profiler.profile() as trace:
        generate(4)
    events = trace.key_averages()

    def per_step(word: str) -> float:
        return sum(one.count for one in events if word in one.key) / 4

    log(
        "engine",
        **about,
        step_ms=step_ms,
        gpu_busy_ms_per_step=sum(one.self_device_time_total for one in events) / 4e3,
        launches_per_step=per_step("LaunchKernel"),
        syncs_per_step=per_step("Synchronize"),
        copies_per_step=per_step("MemcpyAsync"),
    )
    if not about["eager"]:
        trace.export_chrome_trace(str(log.folder / f"step_{about['what']}.json"))


def _find_synchronisations(log: Log, llm: Any, who: list[str | None], eager: bool) -> None:
    import collections
    import traceback
    import warnings

    import torch

    from moe_lora import SamplingParams

    found: collections.Counter[str] = collections.Counter()

    def note(message: Any, *rest: Any, **more: Any) -> None:
        if "synchroniz" in str(message):
            frames = [one for one in traceback.extract_stack() if "moe_lora" in one.filename]
            place = f"{frames[-1].filename.rpartition('moe_lora/')[2]}:{frames[-1].lineno}" if frames else "?"
            found[place] += 1

    warnings.showwarning = note
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    llm.generate([PROMPT] * 16, who, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    torch.cuda.set_sync_debug_mode("default")
    log("engine", eager=eager, syncs_by_place=found.most_common(20))


def h2d(log: Log) -> None:
    """Adapter loads: pageable against pinned; what a slot write costs the next step."""
    import torch

    from bench.kernels.lora_kernel_plan import QWEN3
    from moe_lora.kernels.operands import SlotTable

    target = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    for pinned in (False, True):
        source = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=pinned).zero_()
        us, _ = cuda_us(lambda source=source: target.copy_(source, non_blocking=True), 5, False)  # type: ignore[misc]
        log("h2d", pinned=pinned, GB_s=source.numel() / us / 1e3)
    slots = SlotTable(64, 48, 256, torch.device("cuda"))
    table, scale = torch.zeros(256, 3, dtype=torch.int64), torch.zeros(256)
    begin = time.perf_counter()
    for layer in range(48):
        slots.write_layer(1, layer, table, scale, 2, 0)
    torch.cuda.synchronize()
    log("h2d", what="point 48 layers of a slot, ms", value=(time.perf_counter() - begin) * 1e3)
    begin = time.perf_counter()
    slots.checked_rank(QWEN3[0].site, 2, 1 << 40)
    log("h2d", what="check of one expert site after a write, ms", value=(time.perf_counter() - begin) * 1e3)


def attention(log: Log) -> None:
    """Bandwidth of torch's attention over sequences of varying lengths, one query row each."""
    import inspect

    import torch
    from torch.nn.attention.varlen import varlen_attn

    log("attention", parameters=list(inspect.signature(varlen_attn).parameters))
    rows, context = 64, 1024
    cu_q = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    cu_k = cu_q * context
    q = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
    for heads in (4, 32):
        k = torch.randn(rows * context, heads, 128, device="cuda", dtype=torch.bfloat16)
        given = (q, k, k, cu_q, cu_k, 1, context)
        try:
            us, how = cuda_us(lambda given=given: varlen_attn(*given, window_size=(-1, 0)))  # type: ignore[misc]
            log("attention", kv_heads=heads, us=us, how=how, TB_s=2 * k.nbytes / us / 1e6)
        except Exception as error:  # what this torch can't do is a result
            log("attention", kv_heads=heads, error=str(error)[:200])


def shmem1(log: Log) -> None:
    _shmem(log, 1)


def shmem2(log: Log) -> None:
    _shmem(log, 2)


def _shmem(log: Log, size: int) -> None:
    """Puts with signals around a ring of that many processes on one GPU, through NVSHMEM."""
    settings = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + size),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.first_run", str(log.folder), "shmem_rank"],
            env={**settings, "RANK": str(dist_rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for dist_rank in range(size)
    ]
    texts = []
    for rank in ranks:
        try:
            texts.append(rank.communicate(timeout=15)[0][-500:])
        except subprocess.TimeoutExpired:
            rank.kill()
            texts.append("timeout " + rank.communicate()[0][-500:])
    log("shmem", processes_on_one_gpu=size, said=texts)


def shmem_rank(log: Log) -> None:
    """One process of `_shmem`."""
    import torch
    import torch.distributed as dist

    from moe_lora.dist.transport import nvshmem

    torch.cuda.set_device(0)
    nvshmem.register()
    dist.init_process_group("ibgda")
    assert dist.group.WORLD is not None
    group: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    window = group.alloc(1 << 20, 4, 10.0)
    x = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    for value in range(2, 60):
        group.put_signal(window, 0, x, 1, value, peer)
        group.signal_wait_until(window, 1, value)
    torch.cuda.synchronize()
    print("ARRIVED", int(window.bytes.sum()), flush=True)


PARTS: dict[str, Callable[[Log], None]] = {
    one.__name__: one
    for one in (
        facts,
        ws_shrink,
        ws_expand,
        race,
        lora,
        gemm,
        engine,
        h2d,
        attention,
        shmem1,
        shmem2,
        shmem_rank,
    )
}

if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_all(Path(sys.argv[1]))
    else:
        PARTS[sys.argv[2]](Log(Path(sys.argv[1])))
