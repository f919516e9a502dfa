# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: steps of models of real sizes against the device's rates in the same part.

On a CPU they run with tiny models, as a trial; records then say `cpu` and hold no rates.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bench.harness.released_models import GPT_OSS_20B, MIXTRAL_8X7B, QWEN3_30B_A3B, in_bf16, tiny

from .roofline_engine import (
    QUICK,
    REAL,
    Kernels,
    Prompts,
    Work,
    answers,
    ask,
    decode,
    drawn,
    kernels_noted,
    logits_of,
    random_prompts,
    started,
)
from .run_log import Log, copied_per_s, cuda_us

if TYPE_CHECKING:
    import torch

    from bench.engine.ceiling import StepBytes
    from moe_lora.core.shape import ModelShape
    from moe_lora.engine.core import EngineCore


def qwen3(log: Log) -> None:
    """Decode and prefill of Qwen3-30B-A3B."""
    _steps(log, "Qwen3-30B-A3B", QWEN3_30B_A3B)


def gpt_oss(log: Log) -> None:
    """Decode and prefill of GPT-OSS-20B, in bf16."""
    _steps(log, "GPT-OSS-20B", in_bf16(GPT_OSS_20B))


def mixtral(log: Log) -> None:
    """Decode and prefill of Mixtral-8x7B, cut to the fitting layers."""
    _steps(log, "Mixtral-8x7B", MIXTRAL_8X7B)


def zipf_adapters(log: Log) -> None:
    """A full batch of Qwen3-30B-A3B with adapters by Zipf 1.2, with one adapter per request, and without; cut
    so that all adapters fit.
    """
    if log.quick:
        tiny_steps(log)
    else:
        _adapter_steps(log, "Qwen3-30B-A3B", QWEN3_30B_A3B, replace(REAL, max_layers=log.max_layers))


def dependent(log: Log) -> None:
    """Steps of layers of Qwen3-30B-A3B with early kernel starts (`configs.DEPENDENT`) and without, without
    adapters and with.
    """
    work = replace(QUICK if log.quick else REAL, num_adapters=8, max_layers=log.max_layers or 12)
    work = replace(work, batches=work.batches[:: len(work.batches) - 1])
    config = tiny(QWEN3_30B_A3B) if log.quick else QWEN3_30B_A3B
    names = [f"a{i}" for i in range(work.num_adapters)]
    tokens = []
    for early in (False, True):
        with _early(work.device, early), started(config, work, names) as core:
            about: dict[str, Any] = {"device": _device_name(work.device), "early": early}
            about["layers"] = core.shape_and_dtype[0].num_layers
            prompts = random_prompts(core, max(work.batches), work.context)
            tokens.append(answers(core, prompts[:16], drawn(names, len(prompts[:16])), work.same_steps))
            if early:
                log("dependent", **about, same_tokens=tokens[0] == tokens[1])
            for batch in work.batches:
                arms: dict[str, list[str | None]] = {"base": [None] * batch, "zipf": [*drawn(names, batch)]}
                for arm, who in arms.items():
                    seconds, _, kernels = decode(core, prompts[:batch], who, work.num_steps)
                    claims = _claims(work.device, step_ms=statistics.median(seconds) * 1e3)
                    log("dependent", **about, batch=batch, arm=arm, **claims)
                    _log_kernels(log, kernels, **about, batch=batch, arm=arm, step="decode")


def _log_kernels(log: Log, kernels: Kernels, **about: Any) -> None:
    if kernels:  # a CPU has none
        log("kernels", **about, us_and_launches=kernels)


@contextmanager
def _early(device: str, early: bool) -> Iterator[None]:
    """Within the context, as if the device's table said so."""
    import torch

    from moe_lora.kernels.triton import configs

    table = replace(configs.table_of(torch.device(device)), dependent_launch=early)
    with patch.object(configs, "table_of", lambda device: table):
        yield


def tiny_steps(log: Log) -> None:
    """A few steps of a tiny model with adapters, launched one by one."""
    work = replace(QUICK, device="cpu" if log.quick else "cuda")
    _adapter_steps(log, "tiny, as Qwen3-30B-A3B", tiny(QWEN3_30B_A3B), work, eager=True)


def memcheck(log: Log) -> None:
    """`tiny_steps` under compute-sanitizer, if installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        log("memcheck", tool=None)
        return
    part = [sys.executable, "-m", "bench.gpu.first_run", str(log.folder), "tiny_steps", "--here"]
    # Separate allocations, so that accesses beside a tensor are seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # API errors are no memory errors: a capture may fail where nothing may be allocated.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", *part]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    (log.folder / "memcheck_said.txt").write_text(done.stdout)
    log("memcheck", tool=tool, status=done.returncode, said=done.stdout[-500:])
    if done.returncode:
        raise RuntimeError(f"compute-sanitizer ended with status {done.returncode}: memcheck_said.txt")


def _steps(log: Log, model: str, config: dict[str, Any]) -> None:
    """Bits of replayed graphs, then decode time over bytes, and prefill time over products."""
    work = QUICK if log.quick else replace(REAL, max_layers=log.max_layers)
    if log.quick:
        model, config = f"tiny, as {model}", tiny(config)
    rates = Rates.measured(log, work.device)
    with started(config, work) as core:
        about = {"model": model, "layers": core.shape_and_dtype[0].num_layers}
        prompts = random_prompts(core, max(work.batches), work.context)
        _compare_bits(log, about, core, prompts[: work.batches[1]], work)
        for batch in work.batches:
            seconds, num_bytes, kernels = decode(core, prompts[:batch], [None] * batch, work.num_steps)
            log("decode", **about, **_speed(work.device, seconds, num_bytes, rates, batch))
            _log_kernels(log, kernels, **about, step="decode", batch=batch)
        _time_prefill(log, about, core, work, rates)
    Rates.measured(log, work.device)  # check for a slower device


def _adapter_steps(log: Log, model: str, config: dict[str, Any], work: Work, *, eager: bool = False) -> None:
    """Decode steps with adapters and without, in turn, three times each."""
    work = replace(work, batches=work.batches[-1:])  # one size of steps to compile and capture
    rates = Rates.measured(log, work.device)
    batch = max(work.batches)
    names = [f"a{i}" for i in range(work.num_adapters)]
    with started(config, work, names, eager=eager) as core:
        shape = core.shape_and_dtype[0]
        about = {"model": model, "layers": shape.num_layers, "lora_rank": work.lora_rank}
        prompts = random_prompts(core, batch, work.context)
        arms: dict[str, list[str | None]] = {
            "base": [None] * batch,
            "zipf": [*drawn(names, batch)],
            "distinct": [*names[:batch]],
        }
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(3):
            for arm, who in arms.items():
                seconds, num_bytes, kernels = decode(core, prompts, who, work.num_steps)
                found[arm].append(statistics.median(seconds))
                speed = _speed(work.device, seconds, num_bytes, rates, batch)
                share = {"adapters": len({*who} - {None}), "adapter_share": num_bytes.adapter_share}
                log("zipf_adapters", **about, arm=arm, **share, **speed)
                _log_kernels(log, kernels, **about, step="decode", arm=arm, batch=batch)
        _compare_bits(log, about, core, prompts, work, arms["zipf"])
        for arm in ("zipf", "distinct"):
            ratios = [base / lora for base, lora in zip(found["base"], found[arm], strict=True)]
            claims = _claims(work.device, of_base=statistics.median(ratios), of_base_rounds=ratios)
            log("zipf_adapters", **about, arm=arm, device=_device_name(work.device), **claims)


@dataclass(frozen=True)
class Rates:
    """copy: bytes per second, read and written, by the fastest way.  gemm: flops per second of a large
    product in bf16.  Not measured on a CPU."""

    copy: float
    gemm: float

    @classmethod
    def measured(cls, log: Log, device: str) -> Rates:
        import torch

        if device != "cuda":
            log("rates", device=_device_name(device))
            return cls(1.0, 1.0)
        copies = copied_per_s()
        a = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
        rates = cls(copies["best"], 2e6 * 8192**3 / cuda_us(lambda: a @ a)[0])
        by_way = {way: rate / 1e12 for way, rate in copies.items()}
        log("rates", device=_device_name(device), copy_TB_s=by_way, gemm_TFLOP_s=rates.gemm / 1e12)
        torch.cuda.empty_cache()
        return rates


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _claims(device: str, **rates: Any) -> dict[str, Any]:
    """The rates, if they are a GPU's."""
    return rates if device == "cuda" else {}


def _speed(
    device: str, seconds: list[float], num_bytes: StepBytes, rates: Rates, batch: int
) -> dict[str, Any]:
    """Fields of a record of decode steps."""
    step_s, parts = statistics.median(seconds), vars(num_bytes)
    roofline_s = num_bytes.total / rates.copy
    claims = _claims(
        device,
        step_ms=step_s * 1e3,
        step_ms_all=[round(s * 1e3, 3) for s in seconds],
        tokens_per_s=batch / step_s,
        roofline_ms=roofline_s * 1e3,
        of_roofline=roofline_s / step_s,
    )
    return {"device": _device_name(device), "batch": batch, "bytes": parts, **claims}


def _time_prefill(log: Log, about: dict[str, Any], core: EngineCore, work: Work, rates: Rates) -> None:
    """A step that computes whole prompts, with sampling and reads of their first tokens."""
    prompts = random_prompts(core, work.num_prompts, work.prompt_tokens)
    times = []
    for _ in range(1 + work.num_rounds):
        ask(core, prompts, [None] * len(prompts), 1)
        begin = time.perf_counter()
        while core.has_work:
            core.step()
        times.append(time.perf_counter() - begin)
    ask(core, prompts, [None] * len(prompts), 1)
    with kernels_noted(work.device) as kernels:
        while core.has_work:
            core.step()
    _log_kernels(log, kernels, **about, step="prefill")
    seconds = statistics.median(times[1:])
    flops = prefill_flops(
        core.shape_and_dtype[0], core._runner._model.spec.window, work.num_prompts, work.prompt_tokens
    )
    claims = _claims(
        work.device,
        ms=seconds * 1e3,
        ms_all=[round(s * 1e3, 2) for s in times],
        TFLOP_s=flops / seconds / 1e12,
        of_gemm=flops / seconds / rates.gemm,
    )
    sizes = {"num_prompts": work.num_prompts, "prompt_tokens": work.prompt_tokens, "flops": flops}
    log("prefill", **about, device=_device_name(work.device), **sizes, **claims)


def prefill_flops(shape: ModelShape, windows: Sequence[int], num_prompts: int, length: int) -> int:
    """Of the linear layers of all rows, of attended pairs, and of the head of each last row."""
    rows = sum(
        s.in_features * s.total_out_features * (shape.num_experts_per_token if s.num_experts else 1)
        for s in shape.sites
    )
    pairs = sum(sum(min(i, window or i) for i in range(1, length + 1)) for window in windows)
    attention = 2 * pairs * shape.num_heads * shape.head_dim
    linear = length * shape.num_layers * rows + shape.hidden_size * shape.vocab_size
    return 2 * num_prompts * (linear + attention)


def _compare_bits(
    log: Log,
    about: dict[str, Any],
    core: EngineCore,
    prompts: Prompts,
    work: Work,
    names: Sequence[str | None] | None = None,
) -> None:
    """Logits of steps replayed as graphs, launched one by one, and not compiled."""
    import torch

    runner = core._runner
    names = names or [None] * len(prompts)

    def logits(**changes: Any) -> list[torch.Tensor]:
        return logits_of(core, prompts, names, work.same_steps, **changes)

    before = 0 if runner._graphs is None else runner._graphs.num_replayed
    replayed = logits()
    number = 0 if runner._graphs is None else runner._graphs.num_replayed - before
    launched, eager = logits(_graphs=None), logits(_graphs=None, _eager=True)
    difference = max(float((a - b).abs().max()) for a, b in zip(replayed, eager, strict=True))
    log(
        "same_bits",
        **about,
        device=_device_name(work.device),
        steps=len(replayed),
        replayed=number,
        as_launched=all(map(torch.equal, replayed, launched)),
        as_eager=all(map(torch.equal, replayed, eager)),
        largest_difference_from_eager=difference,
    )
