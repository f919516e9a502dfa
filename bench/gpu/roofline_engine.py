# SPDX-License-Identifier: Apache-2.0
"""Engines over random weights of released models' sizes, as many layers as fit, and decode steps of them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

    from bench.engine.ceiling import StepBytes
    from moe_lora.adapters.packed import PackedAdapter
    from moe_lora.core.shape import ModelShape
    from moe_lora.engine.core import EngineCore

Prompts = list[tuple[int, ...]]
Kernels = dict[str, tuple[float, int]]
"""By name the microseconds of a kernel's launches, and their number."""
MEMORY_SHARE = 0.85
"""Of free memory, for weights, KV and adapters."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of an engine.

    batches: concurrent decode requests, with context tokens at the start and num_steps timed steps.
    num_prompts: of prompt_tokens each, prefilled in one step, num_rounds times.  num_adapters: of the
    requests, all of one rank, on attention and experts.  same_steps: steps compared bit for bit.  max_layers:
    limit of the model's layers.
    """

    device: str
    batches: tuple[int, ...]
    context: int
    num_steps: int
    num_prompts: int
    prompt_tokens: int
    num_rounds: int
    num_adapters: int
    lora_rank: int
    same_steps: int
    max_layers: int | None = None

    @property
    def max_model_len(self) -> int:
        return max(self.context, self.prompt_tokens) + self.num_steps + _MORE_TOKENS

    @property
    def kv_tokens(self) -> int:
        """Room for the largest batch, with a fifth to spare."""
        decoding = max(self.batches) * (self.context + self.num_steps + _MORE_TOKENS)
        return int(1.2 * max(decoding, self.num_prompts * self.max_model_len))


_MORE_TOKENS = 96
"""Tokens of a request beyond its timed steps."""
REAL = Work(
    device="cuda",
    batches=(1, 4, 16, 64),
    context=900,
    num_steps=24,
    num_prompts=4,
    prompt_tokens=2048,
    num_rounds=5,
    num_adapters=64,
    lora_rank=32,
    same_steps=8,
)
QUICK = Work(
    device="cpu",
    batches=(1, 4),
    context=20,
    num_steps=3,
    num_prompts=2,
    prompt_tokens=40,
    num_rounds=1,
    num_adapters=6,
    lora_rank=4,
    same_steps=2,
)


@contextmanager
def started(
    config: dict[str, Any],
    work: Work,
    adapters: Sequence[str] = (),
    *,
    eager: bool = False,
) -> Iterator[EngineCore]:
    """An engine of as many layers as fit, with these adapters on the device."""
    from bench.engine.engine_runs import with_all_resident
    from moe_lora.config import EngineConfig
    from moe_lora.engine.build import build_engine
    from moe_lora.families import cut_to, shape_of

    num_layers = layers_that_fit(config, work, len(adapters), _free_bytes(work.device))
    shape = shape_of(cut_to(config, num_layers))
    adapter_bytes = len(adapters) * shape.adapter_bytes(work.lora_rank)
    pages_bytes = (work.kv_tokens * shape.kv_bytes_per_token() + 1.1 * adapter_bytes) / 1e6
    on_cuda = work.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        core = build_engine(
            EngineConfig(
                model_dir=folder,
                device=work.device,
                dtype="bfloat16",
                load_format="dummy",
                num_layers=num_layers,
                max_loras=max(1, len(adapters)),
                max_num_seqs=max(*work.batches, work.num_prompts),
                max_num_batched_tokens=max(work.num_prompts * work.prompt_tokens, max(work.batches)),
                max_model_len=work.max_model_len,
                arena_mb=pages_bytes,
                host_arena_mb=0,
                prefix_caching=False,
                async_scheduling="on",  # as on a GPU by default
                eager=eager or not on_cuda,
                decode_buckets=work.batches if on_cuda else None,
            )
        )
    try:
        for packed in packed_adapters(shape, work.lora_rank, adapters):
            core.add_adapter(packed, None)
        with_all_resident(core, tuple((name, "") for name in adapters))
        yield core
    finally:
        core.close()


def _free_bytes(device: str) -> float:
    import torch

    return float(torch.cuda.mem_get_info()[0]) if device == "cuda" else float("inf")


def layers_that_fit(config: dict[str, Any], work: Work, num_adapters: int, free_bytes: float) -> int:
    """Layers of the model whose weights, KV and adapters fit `MEMORY_SHARE` of free memory, beside embedding
    and head; at least 1.
    """
    from moe_lora.families import cut_to, shape_of

    whole = shape_of(config)
    layer = shape_of(cut_to(config, 1))
    weights = sum(s.in_features * s.total_out_features * max(1, s.num_experts) for s in layer.sites)
    per_layer: float = weights * layer.dtype_bytes + work.kv_tokens * layer.kv_bytes_per_token()
    per_layer += 1.1 * num_adapters * layer.adapter_bytes(work.lora_rank)
    room = MEMORY_SHARE * free_bytes - 2 * layer.vocab_size * layer.hidden_size * layer.dtype_bytes
    num_layers = min(whole.num_layers, work.max_layers or whole.num_layers)
    return num_layers if room == float("inf") else max(1, min(num_layers, int(room / per_layer)))


def packed_adapters(shape: ModelShape, lora_rank: int, names: Sequence[str]) -> list[PackedAdapter]:
    """Adapters on attention and experts.  All layers share one memory; a device has copies."""
    import torch

    from moe_lora.adapters.packed import Pair, assemble, pack_layer
    from moe_lora.core.shape import DEFAULT_TARGETS

    if not names:
        return []
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int, std: float) -> torch.Tensor:
        return torch.empty(size).normal_(0.0, std, generator=generator).bfloat16()

    pairs = []
    for site in (site for site in shape.sites if site.name in DEFAULT_TARGETS):
        num = max(1, site.num_experts)
        modules = range(len(site.modules))
        for fed in [tuple(modules)] if site.num_experts else [(module,) for module in modules]:
            pairs.append(
                Pair(
                    site=site,
                    modules=fed,
                    experts=range(num),
                    shrink=noise(num, lora_rank, site.in_features, std=site.in_features**-0.5),
                    expands=tuple(
                        noise(num, lora_rank, site.out_features[module], std=0.2 * lora_rank**-0.5)
                        for module in fed
                    ),
                    scale=2.0,
                    source=site.name,
                )
            )
    layer = pack_layer(pairs, shape.num_entries, torch.bfloat16, "roofline")
    first = assemble(names[0], [layer] * shape.num_layers, shape)
    return [replace(first, name=name, content_hash=f"{i:064x}") for i, name in enumerate(names)]


def drawn(names: Sequence[str], number: int) -> list[str]:
    """By Zipf 1.2."""
    import numpy as np

    from moe_lora.workload.popularity.popularity import zipf

    return zipf(names, 1.2).sample(number, np.random.default_rng(0))


# Steps of such an engine.


def random_prompts(core: EngineCore, number: int, length: int) -> Prompts:
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(core.info.vocab_size, (number, length), generator=generator)
    return [tuple(row) for row in drawn.tolist()]


def ask(core: EngineCore, prompts: Prompts, names: Sequence[str | None], max_tokens: int) -> list[str]:
    """Add greedy requests; their ids."""
    from moe_lora.core.request import GenerateRequest, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    ids = []
    for number, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        ids.append(f"{time.monotonic_ns()}-{number}")
        core.add_request(
            GenerateRequest(request_id=ids[-1], prompt_token_ids=prompt, adapter=name, sampling=sampling)
        )
    return ids


def answers(
    core: EngineCore, prompts: Prompts, names: Sequence[str | None], num_tokens: int
) -> list[list[int]]:
    """Greedy tokens of each request."""
    ids = ask(core, prompts, names, num_tokens)
    found: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while core.has_work:
        for gained in core.step():
            found[gained.request_id] += gained.token_ids
    return [found[request_id] for request_id in ids]


def logits_of(
    core: EngineCore, prompts: Prompts, names: Sequence[str | None], num_tokens: int, **changes: Any
) -> list[torch.Tensor]:
    """Logits of each step of these requests.  changes: attributes of the runner meanwhile."""
    runner = core._runner
    kept: list[torch.Tensor] = []
    run = runner.run

    def noted(*given: Any) -> torch.Tensor:
        found = run(*given)
        kept.append(found.clone())
        return found

    with patch.multiple(runner, run=noted, **changes):
        answers(core, prompts, names, num_tokens)
    return kept


@contextmanager
def graphs_of(core: EngineCore, graphs: dict[Any, Any]) -> Iterator[None]:
    """Within the context steps are captured to, and replayed from, these."""
    if core._runner._graphs is None:
        yield
    else:
        with patch.object(core._runner._graphs, "_graphs", graphs):
            yield


def decode(
    core: EngineCore, prompts: Prompts, names: Sequence[str | None], num_steps: int
) -> tuple[list[float], StepBytes, Kernels]:
    """Seconds of steps with a token per request, bytes of the next step, and its
    kernels' times (see `kernels_noted`).
    """
    from bench.engine.ceiling import recorded_bytes, step_recorded

    ids = ask(core, prompts, names, num_steps + _MORE_TOKENS)
    if not any(len(core.step()) == len(prompts) for _ in range(_MORE_TOKENS - 8)):
        raise RuntimeError(f"{len(prompts)} requests were never in one step")
    for _ in range(3):  # not counted: prompts may still have been in the last one
        core.step()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        gained = core.step()
        seconds.append(time.perf_counter() - begin)
        assert len(gained) == len(prompts), "a request stayed out of a decode step"
    with kernels_noted(core._runner._device.type) as kernels:
        core.step()
    with step_recorded(core) as record, patch.object(core._runner, "_graphs", None):
        core.step()
    shape, dtype = core.shape_and_dtype
    assert record.step is not None
    lengths = record.step.seq_lens.tolist()
    for request_id in ids:
        core.abort(request_id)
    num_bytes = recorded_bytes(core, record, shape, dtype.itemsize)
    seen = sum(min(n, window or n) for window in core._runner._model.spec.window for n in lengths)
    num_bytes = replace(num_bytes, kv=seen * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize)
    return seconds, num_bytes, kernels


@contextmanager
def kernels_noted(device: str) -> Iterator[Kernels]:
    """Kernels launched in the context, the longest first.

    Filled at the context's end; empty on a CPU.
    """
    import torch

    found: Kernels = {}
    if device != "cuda":
        yield found
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        yield found
        torch.cuda.synchronize()
    for one in sorted(trace.key_averages(), key=lambda one: -one.self_device_time_total):
        if one.self_device_time_total > 0:
            found[one.key] = round(one.self_device_time_total, 1), one.count
