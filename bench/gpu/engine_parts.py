# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: an engine's steps, copies to the device, attention."""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .run_log import Log, copied_per_s, cuda_us, tried

if TYPE_CHECKING:
    import torch

    from moe_lora.kernels.operands import AttentionOperands

PROMPT = [1, 2, 3, 4]


def engine(log: Log) -> None:
    """Synchronisations of a decode step with their places, launches, busy share of the GPU."""
    served = _random_model()
    for eager in (True, False):
        _watch_engine(log, *served, eager)


def _random_model() -> tuple[str, dict[str, str]]:
    """Folders of a model and of its adapters, by name."""
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
    return str(model), adapters


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
    """Adapter loads: pageable against pinned; cost of a slot write."""
    import torch

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
        slots.write_layer(1, layer, table, scale, 2, range(0))
    torch.cuda.synchronize()
    log("h2d", what="point 48 layers of a slot, ms", value=(time.perf_counter() - begin) * 1e3)


def attention(log: Log) -> None:
    """Our decode attention against the rate of a copy, prompts against torch's attention without pages."""
    from torch.nn import functional

    copy_tb_s = copied_per_s()["best"] / 1e12
    log("attention", copy_TB_s=copy_tb_s)
    for rows, context in ((1, 1024), (8, 1024), (64, 1024), (1, 32768), (16, 8192)):
        for heads, kv_heads, head_dim, window in ((32, 4, 128, 0), (64, 8, 64, 128), (32, 8, 128, 0)):
            one = attention_case(rows, 1, context, heads, kv_heads, head_dim, window, "cuda")
            seen = min(context, window) if window else context
            num_bytes = 2 * rows * seen * kv_heads * head_dim * 2
            about = {"rows": rows, "context": context, "heads": (heads, kv_heads, head_dim), "window": window}
            log("attention", **about, **_timed_attention(one, num_bytes, copy_tb_s))
    for context, heads, kv_heads, head_dim in ((2048, 32, 4, 128), (8192, 32, 8, 128), (2048, 64, 8, 64)):
        one = attention_case(1, context, context, heads, kv_heads, head_dim, 0, "cuda")
        us, how = cuda_us(lambda one=one: _attend(one))  # type: ignore[misc]
        q = one.q.transpose(0, 1)[None]
        k, v = (part.transpose(0, 1)[None].repeat_interleave(heads // kv_heads, 1) for part in (one.k, one.v))
        given: dict[str, Any] = {"is_causal": True, "scale": one.scale}
        torch_us, _ = cuda_us(lambda: functional.scaled_dot_product_attention(q, k, v, **given))  # noqa: B023
        right = functional.scaled_dot_product_attention(q, k, v, **given)[0].transpose(0, 1)
        error = float((_attend(one).float() - right.float()).abs().max())
        rate = 2 * context**2 * heads * head_dim / us / 1e6
        about = {"prompt": context, "heads": (heads, kv_heads, head_dim), "us": us, "how": how}
        log("attention", **about, TFLOP_s=rate, of_torch=torch_us / us, error=error)


_SINGLE_TRIALS: tuple[dict[str, int], ...] = (
    {},
    {"part_tokens": 128},
    {"num_stages": 3},
    {"num_stages": 7},
    {"block_n": 32, "num_stages": 7},
    {"block_n": 128, "num_stages": 3},
    {"num_warps": 2},
    {"num_warps": 8},
    {"part_tokens": 128, "num_stages": 3},
    {"part_tokens": 512},
)
_SEVERAL_TRIALS: tuple[dict[str, int], ...] = (
    {},
    {"num_stages": 3},
    {"num_stages": 7},
    {"block_n": 128, "num_stages": 3},
    {"block_n": 128, "num_stages": 5},
    {"block_m": 64, "num_warps": 4, "num_stages": 5},
    {"block_m": 64, "num_warps": 4, "block_n": 128, "num_stages": 3},
    {"num_warps": 4},
    {"block_n": 32, "num_stages": 7},
)
"""Changes to how sequences of one row, and of several, are launched."""


def attention_tiles(log: Log) -> None:
    """Effect of each change to a launch of attention."""
    heads = ((32, 4, 128, 0), (64, 8, 64, 128), (32, 8, 128, 0))
    for single, trials in ((True, _SINGLE_TRIALS), (False, _SEVERAL_TRIALS)):
        cases = ((1, 1, 1024), (16, 1, 1024), (64, 1, 1024)) if single else ((4, 2048, 2048),)
        for (num_seqs, rows, context), (num, num_kv, head_dim, window) in itertools.product(cases, heads):
            one = attention_case(num_seqs, rows, context, num, num_kv, head_dim, window, "cuda")
            for change in trials:
                about = {"rows": num_seqs * rows, "heads": (num, num_kv, head_dim), "change": change}
                with tried(log, "attention_tiles", **about):
                    us, how = cuda_us(partial(_changed, one, single, change))
                    log("attention_tiles", **about, us=us, how=how)


def _changed(one: AttentionOperands, single: bool, change: dict[str, int]) -> None:
    from moe_lora.kernels.triton.attention.triton_attention import paged_attention, tiles_for

    tiles = replace(tiles_for(one.q.dtype, one.q.shape[2], single=single), **change)
    paged_attention(one, single=tiles if single else None, several=None if single else tiles)


def attention_case(
    num_seqs: int,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    device: str,
) -> AttentionOperands:
    """bf16 operands of num_seqs sequences with `rows` rows and `context` tokens, over unordered pages."""
    import torch

    from moe_lora.kernels.operands import AttentionOperands, KvLayout, StepTables

    layout = KvLayout(
        num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=torch.bfloat16
    )
    num_pages = num_seqs * -(-context // 16)
    step = StepTables(
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * rows,
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_tables=torch.randperm(num_pages, dtype=torch.int32).view(num_seqs, -1),
        decode=rows == 1,
    )
    given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    arena = torch.randn(num_pages * layout.page_bytes // 2, **given).view(torch.uint8)
    q, k, v = (torch.randn(num_seqs * rows, n, head_dim, **given) for n in (heads, kv_heads, kv_heads))
    to = step.to(torch.device(device))
    return AttentionOperands(q, k, v, None, head_dim**-0.5, window, 0, to, layout, arena)


def _attend(one: AttentionOperands) -> torch.Tensor:
    from moe_lora.kernels.triton.attention.triton_attention import paged_attention

    return paged_attention(one)


def _timed_attention(one: AttentionOperands, num_bytes: int, copy_tb_s: float) -> dict[str, Any]:
    """Time and rates, the write of K and V among them."""
    us, how = cuda_us(lambda: _attend(one))
    rate = num_bytes / us / 1e6
    return {"us": us, "how": how, "TB_s": rate, "of_copy": rate / copy_tb_s, "error": attention_error(one)}


def attention_error(one: AttentionOperands) -> float:
    """Largest absolute difference from the reference."""
    from moe_lora.kernels import reference

    expected = reference.paged_attention(one._replace(arena=one.arena.clone()))
    return float((_attend(one).float() - expected.float()).abs().max())
