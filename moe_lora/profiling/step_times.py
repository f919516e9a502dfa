# SPDX-License-Identifier: Apache-2.0
"""Times of whole engine steps by batch, for `moe-lora profile-steps`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moe_lora.adapters.packed import PackedAdapter, Pair, assemble, pack_layer
from moe_lora.cache.unified import SWAP_OUT_ABOVE
from moe_lora.config import EngineConfig
from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.core.shape import ModelShape, Site
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore
from moe_lora.engine.ranks.rank import DTYPES, resolved
from moe_lora.families import shape_of
from moe_lora.kernels.operands import kv_layout
from moe_lora.workload.replay_plan import PlannedRequest

_STD = 0.02


def random_adapter(
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    lora_rank: int,
    *,
    seed: int,
    targets: tuple[str, ...] | None = None,
) -> PackedAdapter:
    """A random adapter with equal layers.  Raises ConfigError for a bad rank."""
    if lora_rank < 1:
        raise ConfigError(f"lora_rank={lora_rank} must be 1 or more")
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        _pair(site, module, lora_rank, generator)
        for site in map(shape.site, targets or shape.default_targets)
        for module in range(len(site.modules))
    ]
    layer = pack_layer(pairs, shape.num_entries, dtype, name)
    return assemble(name, [layer] * shape.num_layers, shape)


def _pair(site: Site, module: int, lora_rank: int, generator: torch.Generator) -> Pair:
    num_copies = max(1, site.num_experts)

    def matrices(width: int, is_shared: bool) -> torch.Tensor:
        return torch.randn(1 if is_shared else num_copies, lora_rank, width, generator=generator) * _STD

    return Pair(
        site=site,
        modules=(module,),
        experts=range(num_copies),
        shrink=matrices(site.in_features, site.name == "latent_v"),
        expands=(matrices(site.out_features[module], site.name == "latent_k"),),
        scale=1.0,
        source="random",
    )


_LOAD_POLL_S = 0.001


class TimedRow(Protocol):
    """A request of a timed batch.  adapter None: the base model."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def num_tokens(self) -> int: ...


class StepClock:
    """An engine with resident random adapters, timed from outside.

    adapters: name -> rank, on attention and MLP.  num_decode_steps: timed after each prefill.
    processor_time: this thread's CPU seconds instead of wall time.  Raises ConfigError for impossible
    settings.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: Mapping[str, int],
        num_decode_steps: int,
        *,
        processor_time: bool = False,
    ) -> None:
        hf_config = config.hf_config()
        self.device = torch.device(resolved(config, hf_config).device)
        on_cpu = self.device.type == "cpu"
        if processor_time and not (on_cpu and config.num_threads == 1 and config.num_ranks == 1):
            raise ConfigError(
                "processor time is that of a step only on one CPU thread; give --device cpu --threads 1, or "
                "leave out --processor-time"
            )
        self._now_s = time.thread_time if processor_time else time.perf_counter
        self.core = engine_with_adapters(config, adapters)
        shape = shape_of(hf_config)
        self.expert_share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
        self._num_decode_steps = num_decode_steps
        self._num_requests = 0

    def run(self, rows: Sequence[TimedRow]) -> tuple[float, list[float]]:
        """Seconds of the prefill step, and of the following decode steps.

        Raises CapacityError if the rows don't fit.
        """
        requests = [self._request(row) for row in rows]
        for request in requests:
            self.core.add_request(request)
        prefill_s, num_started = self._step()
        if num_started < len(rows):
            self._drop(requests)
            raise CapacityError(
                f"{num_started} of {len(rows)} requests started together; raise max_num_seqs, "
                "max_num_batched_tokens or the memory for adapters"
            )
        decode_s = [self._step()[0] for _ in range(self._num_decode_steps)]
        self._drop(requests)
        return prefill_s, decode_s

    def close(self) -> None:
        self.core.close()

    def _step(self) -> tuple[float, int]:
        self._synchronize()
        start_s = self._now_s()
        outputs = self.core.step()
        self._synchronize()
        return self._now_s() - start_s, len(outputs)

    def _request(self, row: TimedRow) -> GenerateRequest:
        self._num_requests += 1
        vocab = self.core.info.vocab_size
        first = 7919 * self._num_requests
        return GenerateRequest(
            request_id=str(self._num_requests),
            prompt_token_ids=tuple((first + 31 * i) % vocab for i in range(row.num_tokens)),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=self._num_decode_steps + 2, min_tokens=0, ignore_eos=True
            ),
            adapter=row.adapter,
        )

    def _drop(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self.core.abort(request.request_id)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def engine_with_adapters(config: EngineConfig, adapters: Mapping[str, int]) -> EngineCore:
    """An engine without prefix cache, with resident random adapters (name -> rank).

    Their memory stays below the swap-out threshold.
    """
    hf_config = config.hf_config()
    dtype = DTYPES[resolved(config, hf_config).dtype]
    shape = replace(shape_of(hf_config), dtype_bytes=dtype.itemsize)
    slack = shape.num_layers * kv_layout(shape, config.block_size, dtype).page_bytes
    least = shape.adapter_bytes(16) + slack
    needed = max(least, sum(shape.adapter_bytes(rank) + slack for rank in adapters.values()))
    room_gb = math.ceil(needed / SWAP_OUT_ABOVE / 1e3) / 1e6
    core = build_engine(
        replace(
            config,
            max_loras=max(1, len(adapters)),
            lora_memory_gb=room_gb,
            prefix_caching=False,
            async_scheduling="off",
        )
    )
    for seed, (name, rank) in enumerate(adapters.items()):
        core.add_adapter(random_adapter(shape, dtype, name, rank, seed=seed), None)
        _bring_in(core, name)
    return core


def _bring_in(core: EngineCore, name: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    core.add_request(
        GenerateRequest(request_id=f"first-{name}", prompt_token_ids=(0,), sampling=sampling, adapter=name)
    )
    while core.has_work:
        if not core.step():
            time.sleep(_LOAD_POLL_S)


_LONGEST_SLEEP_S = 0.01


@dataclass(slots=True)
class OpenRequest:
    """A request's times in seconds after the start; NaN: not yet."""

    arrival_s: float
    output_tokens: int
    first_token_s: float = math.nan
    finish_s: float = math.nan


class OverloadError(Exception):
    """A request waited too long for its first token."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"a request waited {waited_s:.3g} s for its first token")
        self.waited_s = waited_s


def serve_open_loop(
    core: EngineCore,
    plan: Sequence[PlannedRequest],
    *,
    longest_wait_s: float,
    now_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[OpenRequest]:
    """Serve the plan (by arrival) open-loop on an idle engine; every answer has its full length.

    TTFT counts from the planned arrival.  Raises OverloadError, with every request dropped, after a wait of
    longest_wait_s for a first token.
    """
    start_s = now_s()
    requests = [OpenRequest(planned.arrival_s, planned.output_tokens) for planned in plan]
    waiting: dict[str, OpenRequest] = {}
    running: dict[str, OpenRequest] = {}
    num_sent = 0
    try:
        while num_sent < len(plan) or running:
            elapsed_s = now_s() - start_s
            while num_sent < len(plan) and plan[num_sent].arrival_s <= elapsed_s:
                request_id = f"open-{num_sent}"
                core.add_request(_request(core, request_id, plan[num_sent]))
                waiting[request_id] = running[request_id] = requests[num_sent]
                num_sent += 1
            if not running:
                sleep(min(_LONGEST_SLEEP_S, max(0.0, plan[num_sent].arrival_s - elapsed_s)))
                continue
            _step(core, waiting, running, lambda: now_s() - start_s)
            oldest = next(iter(waiting.values()), None)
            waited_s = 0.0 if oldest is None else now_s() - start_s - oldest.arrival_s
            if waited_s > longest_wait_s:
                raise OverloadError(waited_s)
    finally:
        for request_id in running:
            core.abort(request_id)
    return requests


def _step(
    core: EngineCore,
    waiting: dict[str, OpenRequest],
    running: dict[str, OpenRequest],
    elapsed_s: Callable[[], float],
) -> None:
    outputs = core.step()
    end_s = elapsed_s()
    for output in outputs:
        if output.request_id in waiting:
            waiting.pop(output.request_id).first_token_s = end_s
        if output.finish_reason is not None:
            running.pop(output.request_id).finish_s = end_s


def _request(core: EngineCore, request_id: str, planned: PlannedRequest) -> GenerateRequest:
    vocab = core.info.vocab_size
    first = 7919 * (planned.index + 1)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple((first + 31 * i) % vocab for i in range(planned.prompt_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=planned.output_tokens, ignore_eos=True),
        adapter=planned.adapter,
    )
