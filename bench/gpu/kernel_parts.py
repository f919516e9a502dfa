"""Parts of the first run on a GPU: the device itself, the LoRA kernels, base GEMMs."""

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .run_log import Log, copied_per_s, cuda_us, untimed

if TYPE_CHECKING:
    import torch

TOOLS = ("gcc", "nvcc", "nsys", "ncu", "compute-sanitizer", "nvidia-cuda-mps-control", "git")
SMI = (
    "nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,compute_mode --format=csv,noheader"
)
CARRIED = ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "websockets")
"""What `moe_lora.LLM` imports and a machine that has torch may lack; a tree brings it in .cache/wheels."""
SHRINK, EXPAND = "wgmma_shrink", "wgmma_expand"
_TMA = {"tma": True, "programs_per_sm": 2}
TRIALS: tuple[tuple[str, dict[str, Any]], ...] = (
    (SHRINK, {}),
    *(
        (SHRINK, {"block_k": 64, "num_stages": stages, "programs_per_sm": per_sm})
        for stages in (3, 4, 6)
        for per_sm in (3, 4, 6)
    ),
    (SHRINK, {"programs_per_sm": 4, "num_stages": 3}),
    (SHRINK, {"block_k": 256, "num_stages": 3, "programs_per_sm": 2}),
    (EXPAND, {}),
    *(
        (EXPAND, {"blocks_per_item": 8, "num_stages": stages, "programs_per_sm": per_sm})
        for stages in (2, 3, 4)
        for per_sm in (3, 4, 6)
    ),
    (EXPAND, {"blocks_per_item": 8, "block_c": 64, "programs_per_sm": 6}),
    (EXPAND, {"blocks_per_item": 16, "block_c": 64, "programs_per_sm": 4}),
    (EXPAND, {"blocks_per_item": 16}),
)
"""Changes to the default configuration, to see what each parameter is worth."""
SITE_TRIALS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = tuple(
    ({"block_k": 64, "num_stages": stages, "programs_per_sm": per_sm}, {"programs_per_sm": per_sm, **expand})
    for stages, per_sm in ((3, 4), (4, 4), (4, 6), (6, 3))
    for expand in ({"blocks_per_item": 4}, {"blocks_per_item": 8}, {"blocks_per_item": 8, "num_stages": 2})
)
"""The same of both halves of a site in one launch."""


VLLM_CASES = {"32 adapters, rank": 25, "1 row, 1 adapter": 12}
"""Parts of cases' titles, and seconds after which no case begins."""


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


def facts(log: Log) -> None:
    """Versions, tools, what can't be imported; bandwidths, GEMM rate, what a node of a graph, a launch and a
    wait cost; whether compiled kernels are found."""
    import torch
    import triton

    from bench.harness.records import environment

    tools = {
        name: bool(subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True).stdout)
        for name in TOOLS
    }
    smi = subprocess.run(["sh", "-c", SMI], capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    log("facts", smi=smi, **versions, **tools, commit=environment(None)["git_commit"])
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
        _delta_of(case(shapes()["o"], 32), one_launch=False)
    log("facts", what="triton_cache", folder=os.environ.get("TRITON_CACHE_DIR"), **found)


def _log_imports(log: Log) -> None:
    """What of `CARRIED` is missing, and whether an engine can be imported."""
    missing = [name for name in CARRIED if importlib.util.find_spec(name) is None]
    try:
        from moe_lora import LLM
    except ImportError as error:
        log("facts", what="imports", missing=missing, engine=str(error))
    else:
        log("facts", what="imports", missing=missing, engine=LLM.__name__)


@contextmanager
def triton_cache_counted() -> Iterator[Counter[str]]:
    """hits and misses of what is compiled within the context."""
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
    """Compile ahead, a process a core, what `tma` to `experts` launch: they find it in Triton's cache."""
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
    from moe_lora.kernels.triton.aot_check import leave_in_cache

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
    """What parts launch, by their own calls, of which nothing runs; without launches that begin early.

    unread: takes their records, which hold no times.
    """
    from moe_lora.kernels.triton.aot import launches_recorded

    with launches_recorded() as builds, untimed():
        run(unread)
    return [build for build in builds if not build.meta.get("DEPENDENT")]


def kernels_timed(log: Log) -> None:
    """What `tma` to `experts` launch."""
    from .expert_parts import time_all

    for name, shape in shapes().items():
        site = _Site(name, shape, 32)
        for one_launch in (False, True):
            site.time_whole(log, "lora", one_launch=one_launch)
        for kernel in (SHRINK, EXPAND):
            site.time_half(log, "lora", kernel)
        for by_tma in (False, True):
            with weights_come(by_tma):
                _delta_of(case(shape, 32), one_launch=False)
    time_all(log)


def whole_delta(by_tma: bool, one_launch: bool = False) -> dict[str, tuple[float, Any]]:
    """Largest relative error of shrink + expand against fp32, and the result, by site."""
    import torch

    results = {}
    for name, shape in shapes().items():
        c = case(shape, 32)
        with weights_come(by_tma):
            out = _delta_of(c, one_launch)
        torch.cuda.synchronize()
        results[name] = (float((out.float() - c.exact).abs().max() / c.exact.abs().max()), out)
    return results


def _delta_of(c: Any, one_launch: bool) -> torch.Tensor:
    import torch

    from moe_lora.kernels.triton.segments import Zeros
    from moe_lora.kernels.triton.triton_lora import lora_delta

    out = torch.empty_like(c.y[0])
    zeros = Zeros() if one_launch else None
    lora_delta(c.operands(0), out, decode=True, segments=segments_of(c.operands(0)), zeros=zeros)
    return out


def weights_come(by_tma: bool) -> AbstractContextManager[None]:
    """Within the context shrink and expand take weights by TMA, or by pointer."""
    return _launched(dict.fromkeys((SHRINK, EXPAND), _TMA if by_tma else {}))


def tma(log: Log) -> None:
    """Errors by pointer, by TMA and in one launch, and whether the bits are the same."""
    import torch

    by_pointer = whole_delta(False)
    log("tma", by_tma=False, error={name: error for name, (error, _) in by_pointer.items()})
    for way in ({"by_tma": True}, {"by_tma": False, "one_launch": True}):
        found = whole_delta(**way)
        same = {name: bool(torch.equal(found[name][1], out)) for name, (_, out) in by_pointer.items()}
        log("tma", **way, error={name: error for name, (error, _) in found.items()}, same_bits=same)


def race(log: Log) -> None:
    """Programs write tensor maps anew for each matrix, when all loads have ended: look for other bits."""
    import torch

    from moe_lora.kernels.triton.triton_lora import lora_expand, lora_shrink

    c = case(shapes()["gate_up"], 16)
    segments = segments_of(c.operands(0))
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    other = torch.cuda.Stream()

    def run(by_tma: bool) -> torch.Tensor:
        with weights_come(by_tma):
            out = torch.zeros_like(c.y[0])
            lora_expand(lora_shrink(c.operands(0), decode=True, segments=segments, max_lora_rank=16), out)
            return out

    right, rounds, wrong = run(False), 0, 0
    end = time.time() + 15
    while time.time() < end:
        with torch.cuda.stream(other):
            noise.add_(1)
        wrong += int(not torch.equal(run(True), right))
        rounds += 1
    log("race", rounds=rounds, wrong=wrong)


def lora(log: Log) -> None:
    """GB/s of shrink, of expand and of whole sites, launches included as in a captured step."""
    import torch

    for lora_rank in (32, 16, 64):
        for name, shape in shapes().items():
            site = _Site(name, shape, lora_rank)
            us, _ = cuda_us(lambda: segments_of(site.case.operands(0)).tiles(16))  # noqa: B023
            log("lora", **site.about, kernel="segments", us=us)
            for one_launch in (False, True):
                site.time_whole(log, "lora", one_launch=one_launch)
            for kernel in (SHRINK, EXPAND):
                site.time_half(log, "lora", kernel)
            torch.cuda.empty_cache()


def lora_tiles(log: Log) -> None:
    """What each change to a launch of LoRA is worth."""
    import torch

    for lora_rank in (32, 64):
        for name, shape in shapes().items():
            site = _Site(name, shape, lora_rank)
            for shrink, expand in SITE_TRIALS:
                with _launched({SHRINK: shrink, EXPAND: expand}):
                    site.time_whole(log, "lora_tiles", one_launch=True, change=(shrink, expand))
            for kernel, change in TRIALS:
                try:
                    with _launched({kernel: change}):
                        site.time_half(log, "lora_tiles", kernel, change=change)
                except Exception as error:  # a trial that can't be compiled is a result
                    log("lora_tiles", **site.about, kernel=kernel, change=change, error=str(error)[:200])
            torch.cuda.empty_cache()


@contextmanager
def _launched(changes: Mapping[str, dict[str, Any]]) -> Iterator[None]:
    """Within the context kernels are launched with these changes to the default."""
    from moe_lora.kernels.triton import configs

    with ExitStack() as stack:
        for kernel, change in changes.items():
            stack.enter_context(configs.override(kernel, {**default(kernel), **change}))
        yield


class _Site:
    """A decode step's rows at a site, in as many copies as no cache holds."""

    def __init__(self, name: str, shape: Any, lora_rank: int) -> None:
        self.case = case(shape, lora_rank)
        self.about: dict[str, Any] = {"site": name, "rank": lora_rank}
        segments = segments_of(self.case.operands(0))
        self._given = {"decode": True, "segments": segments, "max_lora_rank": lora_rank}

    def time_whole(self, log: Log, part: str, *, one_launch: bool, **about: Any) -> None:
        """Both halves, as one launch or two."""
        from moe_lora.kernels.triton.segments import Zeros
        from moe_lora.kernels.triton.triton_lora import lora_expand

        def run() -> None:
            zeros = Zeros() if one_launch else None
            for i in range(self.case.num_copies):
                lora_expand(self._shrink(i, zeros), self.case.y[i])

        self._log(log, part, "delta", run, kernel="site", one_launch=one_launch, **about)

    def time_half(self, log: Log, part: str, kernel: str, **about: Any) -> None:
        """Shrink or expand alone."""
        from moe_lora.kernels.triton.triton_lora import lora_expand

        def shrink() -> list[Any]:
            return [self._shrink(i, None) for i in range(self.case.num_copies)]

        shrunk = shrink()

        def expand() -> None:
            for i, one in enumerate(shrunk):
                lora_expand(one, self.case.y[i])

        phase, run = ("expand", expand) if kernel == EXPAND else ("shrink", shrink)
        self._log(log, part, phase, run, kernel=kernel, **about)

    def _shrink(self, copy: int, zeros: Any) -> Any:
        from moe_lora.kernels.triton.triton_lora import lora_shrink

        return lora_shrink(self.case.operands(copy), **self._given, zeros=zeros)

    def _log(self, log: Log, part: str, phase: str, run: Callable[[], Any], **about: Any) -> None:
        from bench.kernels.lora_kernel_cases import work

        us, how = cuda_us(run, 7)
        copies = self.case.num_copies
        gb_per_s = work(self.case.spec).bytes[phase] * copies / us / 1e3
        log(part, **self.about, **about, us=us / copies, how=how, GB_s=gb_per_s)


def vllm(log: Log) -> None:
    """`bench_lora_kernels` of decode steps beside vLLM's kernel, where the tree brings that."""
    from bench.kernels import vllm_peer

    if not vllm_peer.SOURCE.exists():
        log("vllm", source=None)
        return
    for number, (cases, budget_s) in enumerate(VLLM_CASES.items()):
        words = ["--device", "cuda", "--budget-s", str(budget_s), "--case", cases]
        words += ["--peer-module", vllm_peer.__file__, "--out", str(log.folder / f"lora_vllm_{number}.jsonl")]
        subprocess.run([sys.executable, "-m", "bench.kernels.bench_lora_kernels", *words], check=True)


def sampling(log: Log) -> None:
    """Tokens drawn on the device against the host's, then the time of a draw beside that of a sort."""
    import torch

    from moe_lora.core.request import GenerateRequest, SamplingParams
    from moe_lora.engine import sampler
    from moe_lora.engine.sequence import Sequence
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
