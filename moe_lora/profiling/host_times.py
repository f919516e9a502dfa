# SPDX-License-Identifier: Apache-2.0
"""Times of host workers, device and loads, for `moe-lora profile-steps --host-worker`."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.core.shape import ModelShape, Site
from moe_lora.dist.deltas.session import ClientSession, FrameLayout, lay_out_request
from moe_lora.dist.host_workers.profile import host_section
from moe_lora.dist.host_workers.workers import HostWorkers, WorkerTimes
from moe_lora.engine.core import EngineCore
from moe_lora.engine.ranks.host_settings import machine_of, model_of
from moe_lora.lora.row_routing import content_number
from moe_lora.policies.admission.host_start import HostStart
from moe_lora.timing.host_times import HostTimes, PartTime

from .step_times import StepClock, random_adapter

TOKENS_BESIDE_PROMPT = 3
_NAME = "rank{}"
_LOOK_S = 1e-4
Samples = dict[tuple[str, int, int], list[float]]


@dataclass(frozen=True)
class _Row:
    adapter: str | None
    num_tokens: int


def measure_host(
    config: EngineConfig,
    ranks: Sequence[int],
    *,
    max_tokens: int,
    num_rounds: int,
    quantile: float = 0.5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The `host` section of a performance model's file.

    For prompts of 1 to max_tokens tokens and each rank: one worker on the last core computes a layer's deltas
    site by site; an engine computes one prompt, and loads an adapter.  Takes the quantile of num_rounds
    samples; fits relative errors by nonnegative least squares.
    """
    config = replace(
        config,
        max_num_seqs=1,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_tokens + TOKENS_BESIDE_PROMPT,
        prefix_caching=False,
    )
    sizes = sorted({1, max_tokens, *(4**power for power in range(1, 8) if 4**power < max_tokens)})
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        names = {_NAME.format(rank): rank for rank in ranks}
        clock = stack.enter_context(closing(StepClock(config, names, 1)))
        shape, dtype = clock.core.shape_and_dtype
        worker = _Worker(shape, dtype, ranks, max_tokens)
        stack.callback(worker.close)
        total = (num_rounds + 1) * len(ranks)
        for number in range(num_rounds + 1):
            found = samples if number else defaultdict(list)
            for index, rank in enumerate(ranks):
                for size in sizes:
                    for site in shape.sites:
                        found["+".join(site.modules), size, rank].append(worker.seconds(site, size, rank))
                    prefill_s, _ = clock.run([_Row(_NAME.format(rank), size)])
                    found["device", size, rank].append(prefill_s / shape.num_layers)
                load_s, num_bytes = _load_s(clock.core, shape, dtype, rank)
                found["load", num_bytes, rank].append(load_s)
                on_progress(number * len(ranks) + index + 1, total)
        machine = machine_of(clock.device)
    chosen = {key: float(np.quantile(values, quantile)) for key, values in samples.items()}
    times, errors = _fit(chosen, shape, dtype, max_tokens, max(ranks))
    listed = [
        {"what": what, "size": size, "lora_rank": rank, "samples_s": samples[what, size, rank]}
        for what, size, rank in samples
    ]
    return host_section(times, machine, model_of(shape, dtype, config.weights_name()), errors, listed)


class _Worker:
    def __init__(self, shape: ModelShape, dtype: torch.dtype, ranks: Sequence[int], max_tokens: int) -> None:
        self._shape = shape
        self._layout = FrameLayout(shape, dtype, max_tokens * max(1, shape.num_experts_per_token))
        core = max(os.sched_getaffinity(0))
        self._workers = HostWorkers(
            self._layout, None, 1, max_tokens, cores=[core], times=WorkerTimes(answer_timeout_s=60.0)
        )
        self._numbers: dict[int, int] = {}
        targets = tuple(site.name for site in shape.sites)
        for rank in ranks:
            packed = random_adapter(shape, dtype, _NAME.format(rank), rank, seed=rank, targets=targets)
            self._workers.store.put(_with_own_layers(packed))
            self._numbers[rank] = content_number(packed.content_hash)
        self._x = torch.randn(self._layout.max_rows, max(site.in_features for site in shape.sites)).to(dtype)
        self._layer = 0

    def close(self) -> None:
        self._workers.close()

    def seconds(self, site: Site, num_tokens: int, lora_rank: int) -> float:
        """Seconds from a site's request to its deltas; layers in turn."""
        shape = self._shape
        session = self._workers.links[0].session
        assert isinstance(session, ClientSession), "the worker ended"
        self._layer = (self._layer + 1) % shape.num_layers
        top_k = shape.num_experts_per_token if site.num_experts else 0
        rows = num_tokens * max(1, top_k)
        ids = None
        if top_k:
            ids = np.arange(rows, dtype=np.int32).reshape(num_tokens, top_k) % site.num_experts
            if site.name == "down":
                num_tokens, top_k, ids = rows, 1, ids.reshape(rows, 1)
        begin_s = time.perf_counter()
        request = lay_out_request(
            session.frame(), self._layout, self._layer, shape.sites.index(site), num_tokens, top_k, rows
        )
        request.slot[:], request.generation[:] = 0, self._numbers[lora_rank]
        if request.ids is not None:
            request.ids[:] = ids
        request.x.copy_(self._x[:num_tokens, : site.in_features])
        session.take(session.send(request))
        return time.perf_counter() - begin_s


def _with_own_layers(packed: PackedAdapter) -> PackedAdapter:
    layers = [
        replace(one, data=one.data.clone(), table=one.table.clone(), scale=one.scale.clone())
        for one in packed.layers
    ]
    return replace(packed, layers=tuple(layers))


def _load_s(core: EngineCore, shape: ModelShape, dtype: torch.dtype, lora_rank: int) -> tuple[float, int]:
    """Seconds until service, and the adapter's bytes."""
    name = f"load{lora_rank}"
    packed = random_adapter(shape, dtype, name, lora_rank, seed=lora_rank)
    core.remove_adapter(_NAME.format(lora_rank))
    core.add_adapter(packed, None)
    begin_s = time.perf_counter()
    core.adapters.pin(core.adapters.current(name))
    while name not in core.stats().resident_adapters:
        core.tend()
        time.sleep(_LOOK_S)
    load_s = time.perf_counter() - begin_s
    core.remove_adapter(name)
    core.add_adapter(replace(packed, name=_NAME.format(lora_rank)), None)
    core.adapters.pin(core.adapters.current(_NAME.format(lora_rank)))
    while _NAME.format(lora_rank) not in core.stats().resident_adapters:
        core.tend()
        time.sleep(_LOOK_S)
    core.adapters.unpin(core.adapters.current(_NAME.format(lora_rank)))
    return load_s, packed.nbytes


def _fit(
    chosen: dict[tuple[str, int, int], float],
    shape: ModelShape,
    dtype: torch.dtype,
    max_tokens: int,
    max_rank: int,
) -> tuple[HostTimes, dict[str, float]]:
    errors: dict[str, float] = {}

    def solve(what: str, features: Callable[[int, int], list[float]]) -> list[float]:
        points = [(size, rank, value) for (name, size, rank), value in chosen.items() if name == what]
        matrix = np.array([features(size, rank) for size, rank, _ in points])
        seconds = np.array([value for _, _, value in points])
        scale = matrix.max(axis=0)
        found, _ = nnls(matrix / scale / seconds[:, None], np.ones(len(seconds)))
        errors[what] = float(np.mean(np.abs(matrix / scale @ found - seconds) / seconds))
        return [float(value) for value in found / scale]

    def part(what: str) -> PartTime:
        fixed, token, rank, both = solve(what, lambda size, rank: [1.0, size, rank, size * rank])
        return PartTime(fixed_s=fixed, per_token_s=token, per_rank_s=rank, per_token_rank_s=both)

    load_fixed_s, load_byte_s = solve("load", lambda size, _: [1.0, size])
    whole = replace(shape, dtype_bytes=dtype.itemsize)
    times = HostTimes(
        worker={name: part(name) for name in ("+".join(site.modules) for site in shape.sites)},
        device=part("device"),
        num_layers=shape.num_layers,
        load_fixed_s=load_fixed_s,
        load_bytes_per_s=1.0 / max(load_byte_s, 1e-15),
        bytes_per_rank=whole.adapter_bytes(max_rank) / max_rank,
        max_tokens=max_tokens,
        max_rank=max_rank,
    )
    return times, errors


def break_even_lines(times: HostTimes, ranks: Sequence[int], workers: Sequence[int]) -> list[str]:
    """Per rank and number of workers: c, and the prompt length from which waiting is faster."""
    lines = []
    for rank in ranks:
        adapter, c = times.adapter(rank), times.tokens_per_worker(rank)
        lines.append(
            f"rank {rank}: a worker computes c = {c} tokens in time; a load takes "
            f"{1e3 * times.load_s(adapter):.3g} ms"
        )
        for number in workers:
            start = HostStart(times=times, num_workers=number, tokens_per_worker=c)
            tokens, load_s = start.break_even_tokens(adapter), start.break_even_load_s(c, adapter)
            lines.append(
                f"  {number} worker{'s' if number > 1 else ''}: waiting is quicker "
                + ("for no prompt in use" if tokens is None else f"from a prompt of {tokens} tokens on")
                + f"; for one of {c} tokens where a load takes less than {1e3 * load_s:.3g} ms"
            )
    return lines
