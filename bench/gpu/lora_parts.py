# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: the LoRA kernels, right, alike in bits and fast."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .run_log import Log, cuda_us, poisoned, tried

if TYPE_CHECKING:
    import torch

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
"""Changes to the default configuration, for each parameter's effect."""
SITE_TRIALS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = tuple(
    ({"block_k": 64, "num_stages": stages, "programs_per_sm": per_sm}, {"programs_per_sm": per_sm, **expand})
    for stages, per_sm in ((3, 4), (4, 4), (4, 6), (6, 3))
    for expand in ({"blocks_per_item": 4}, {"blocks_per_item": 8}, {"blocks_per_item": 8, "num_stages": 2})
)
"""The same of both halves of a site."""


VLLM_CASES = {"32 adapters, rank": 25, "1 row, 1 adapter": 12}
"""Parts of cases' titles, and seconds after which no case starts."""


def case(shape: Any, lora_rank: int, rows: int = 64, adapters: int = 64) -> Any:
    """Rows of a decode step over adapters of one rank at a site of this shape."""
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
    from moe_lora.kernels.triton.lora.segments import build_segments

    return build_segments(one.token_slots, one.ids, one.slots.num_slots, one.site.num_experts)


def shapes() -> dict[str, Any]:
    from bench.kernels.lora_kernel_plan import DENSE, QWEN3

    return {"gate_up": QWEN3[0], "down": QWEN3[1], "o": DENSE}


def default(kernel: str) -> dict[str, Any]:
    from moe_lora.kernels.triton.configs import FALLBACK, load_table

    return dict(load_table(FALLBACK).config(kernel, "bf16", "decode", 2048, 1536))


def whole_delta(by_tma: bool) -> dict[str, tuple[float, Any]]:
    """Largest relative error of shrink + expand against fp32, and the result, by site."""
    import torch

    results = {}
    for name, shape in shapes().items():
        c = case(shape, 32)
        with weights_come(by_tma):
            out = delta_of(c)
        torch.cuda.synchronize()
        results[name] = (float((out.float() - c.exact).abs().max() / c.exact.abs().max()), out)
    return results


def delta_of(c: Any) -> torch.Tensor:
    import torch

    from moe_lora.kernels.triton.lora.triton_lora import lora_delta

    out = torch.empty_like(c.y[0])
    lora_delta(c.operands(0), out, decode=True, segments=segments_of(c.operands(0)))
    return out


def weights_come(by_tma: bool) -> AbstractContextManager[None]:
    """Within the context shrink and expand take weights by TMA, or by pointer."""
    return _launched(dict.fromkeys((SHRINK, EXPAND), _TMA if by_tma else {}))


def tma(log: Log) -> None:
    """Errors by pointer and by TMA, and equality of bits."""
    import torch

    by_pointer = whole_delta(False)
    log("tma", by_tma=False, error={name: error for name, (error, _) in by_pointer.items()})
    found = whole_delta(True)
    same = {name: bool(torch.equal(found[name][1], out)) for name, (_, out) in by_pointer.items()}
    log("tma", by_tma=True, error={name: error for name, (error, _) in found.items()}, same_bits=same)


def race(log: Log) -> None:
    """Programs rewrite tensor maps per matrix after all loads: look for different bits."""
    import torch

    from moe_lora.kernels.triton.lora.triton_lora import lora_expand, lora_shrink

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


def race_site(log: Log) -> None:
    """Sites, 20 s beside copies, in memory full of NaN: look for different bits."""
    import torch

    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    other = torch.cuda.Stream()
    cases = {name: case(shape, 32) for name, shape in shapes().items()}
    right = {name: delta_of(one) for name, one in cases.items()}
    rounds, wrong, end = 0, 0, time.time() + 20
    with poisoned():
        while time.time() < end:
            with torch.cuda.stream(other):
                noise.add_(1)
            found = {name: delta_of(one) for name, one in cases.items()}
            wrong += sum(not torch.equal(out, right[name]) for name, out in found.items())
            rounds += 1
    log("race_site", rounds=rounds, wrong=wrong)


def site_rows(log: Log) -> None:
    """Whole sites and halves of 1 to 64 rows, each with its own adapter up to 8."""
    import torch

    for name, shape in shapes().items():
        for rows in (1, 4, 16, 64):
            site = Site(name, shape, 32, rows, min(rows, 8))
            site.time_whole(log, "site_rows")
            for kernel in (SHRINK, EXPAND):
                site.time_half(log, "site_rows", kernel)
        torch.cuda.empty_cache()


def lora(log: Log) -> None:
    """GB/s of shrink, of expand and of whole sites, launches included as in a captured step."""
    import torch

    for lora_rank in (32, 16, 64):
        for name, shape in shapes().items():
            Site(name, shape, lora_rank).time(log)
            torch.cuda.empty_cache()


def sites_launched(log: Log) -> None:
    """Each kind of launch of `tma`, `race` and `lora`."""
    for name, shape in shapes().items():
        Site(name, shape, 32).time(log)
        for by_tma in (False, True):
            with weights_come(by_tma):
                delta_of(case(shape, 32))


def lora_tiles(log: Log) -> None:
    """Effect of each change to a launch of LoRA."""
    import torch

    for lora_rank in (32, 64):
        for name, shape in shapes().items():
            site = Site(name, shape, lora_rank)
            for shrink, expand in SITE_TRIALS:
                both = {"change": (shrink, expand)}
                with (
                    tried(log, "lora_tiles", **site.about, kernel="site", **both),
                    _launched({SHRINK: shrink, EXPAND: expand}),
                ):
                    site.time_whole(log, "lora_tiles", **both)
            for kernel, change in TRIALS:
                with (
                    tried(log, "lora_tiles", **site.about, kernel=kernel, change=change),
                    _launched({kernel: change}),
                ):
                    site.time_half(log, "lora_tiles", kernel, change=change)
            torch.cuda.empty_cache()


@contextmanager
def _launched(changes: Mapping[str, dict[str, Any]]) -> Iterator[None]:
    """Within the context kernels are launched with these changes to the default."""
    from moe_lora.kernels.triton import configs

    with ExitStack() as stack:
        for kernel, change in changes.items():
            stack.enter_context(configs.override(kernel, {**default(kernel), **change}))
        yield


class Site:
    """A decode step's rows at a site, in as many copies as no cache holds."""

    def __init__(self, name: str, shape: Any, lora_rank: int, rows: int = 64, adapters: int = 64) -> None:
        self.case = case(shape, lora_rank, rows, adapters)
        self.about: dict[str, Any] = {"site": name, "rank": lora_rank, "rows": rows, "adapters": adapters}
        segments = segments_of(self.case.operands(0))
        self._given = {"decode": True, "segments": segments, "max_lora_rank": lora_rank}

    def time(self, log: Log) -> None:
        """Sorting of its rows, both halves together, and each half."""
        us, _ = cuda_us(lambda: segments_of(self.case.operands(0)).tiles(16))
        log("lora", **self.about, kernel="segments", us=us)
        self.time_whole(log, "lora")
        for kernel in (SHRINK, EXPAND):
            self.time_half(log, "lora", kernel)

    def time_whole(self, log: Log, part: str, **about: Any) -> None:
        """Both halves."""
        from moe_lora.kernels.triton.lora.triton_lora import lora_expand

        def run() -> None:
            for i in range(self.case.num_copies):
                lora_expand(self._shrink(i), self.case.y[i])

        self._log(log, part, "delta", run, kernel="site", **about)

    def time_half(self, log: Log, part: str, kernel: str, **about: Any) -> None:
        """Shrink or expand alone."""
        from moe_lora.kernels.triton.lora.triton_lora import lora_expand

        def shrink() -> list[Any]:
            return [self._shrink(i) for i in range(self.case.num_copies)]

        if kernel == SHRINK:
            self._log(log, part, "shrink", shrink, kernel=kernel, **about)
            return
        shrunk = shrink()

        def expand() -> None:
            for i, one in enumerate(shrunk):
                lora_expand(one, self.case.y[i])

        self._log(log, part, "expand", expand, kernel=kernel, **about)

    def _shrink(self, copy: int) -> Any:
        from moe_lora.kernels.triton.lora.triton_lora import lora_shrink

        return lora_shrink(self.case.operands(copy), **self._given)

    def _log(self, log: Log, part: str, phase: str, run: Callable[[], Any], **about: Any) -> None:
        from bench.kernels.lora_kernel_cases import work

        us, how = cuda_us(run, 7)
        copies = self.case.num_copies
        gb_per_s = work(self.case.spec).bytes[phase] * copies / us / 1e3
        log(part, **self.about, **about, us=us / copies, how=how, GB_s=gb_per_s)


def vllm(log: Log) -> None:
    """`bench_lora_kernels` of decode steps beside vLLM's kernel, if in the tree."""
    from bench.kernels import vllm_peer

    if not vllm_peer.SOURCE.exists():
        log("vllm", source=None)
        return
    for number, (cases, budget_s) in enumerate(VLLM_CASES.items()):
        words = ["--device", "cuda", "--budget-s", str(budget_s), "--case", cases]
        words += ["--peer-module", vllm_peer.__file__, "--out", str(log.folder / f"lora_vllm_{number}.jsonl")]
        subprocess.run([sys.executable, "-m", "bench.kernels.bench_lora_kernels", *words], check=True)
