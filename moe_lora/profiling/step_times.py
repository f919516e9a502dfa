"""How long whole steps of an engine take, by what is in the batch; for `moe-lora profile-steps`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from moe_lora.config import EngineConfig
from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.core.shape import ModelShape
from moe_lora.models.families import read_config

from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore
from .random_adapters import random_adapter
from moe_lora.engine.ranks.rank import DTYPES, kv_layout, resolved

_LOAD_POLL_S = 0.001


class TimedRow(Protocol):
    """A request of a timed batch: its adapter (None: the base model) and the length of its prompt."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def num_tokens(self) -> int: ...


class StepClock:
    """An engine with random adapters, all resident, whose steps are timed from outside.

    adapters: name -> rank.  Adapters are on attention and MLP of every layer.  num_decode_steps: timed after
    each prefill.  processor_time: seconds of this thread on a processor, instead of those that pass, which
    other programs stretch; for one CPU thread.  Raises ConfigError for settings that can't work.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: Mapping[str, int],
        num_decode_steps: int,
        *,
        processor_time: bool = False,
    ) -> None:
        hf_config = read_config(Path(config.model_dir))
        self.device = torch.device(resolved(config, hf_config).device)
        on_cpu = self.device.type == "cpu"
        if processor_time and not (on_cpu and config.num_threads == 1 and config.expert_parallel == 1):
            raise ConfigError(
                "processor time is that of a step only on one CPU thread; give --device cpu --threads 1, or "
                "leave out --processor-time"
            )
        self._now_s = time.thread_time if processor_time else time.perf_counter
        self.core = engine_with_adapters(config, adapters)
        shape = ModelShape.from_hf_config(hf_config)
        self.expert_share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
        self._num_decode_steps = num_decode_steps
        self._num_requests = 0

    def run(self, rows: Sequence[TimedRow]) -> tuple[float, list[float]]:
        """Seconds of the prefill step with all rows, and of the decode steps after it.

        Raises CapacityError if they don't fit into one step.
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
        """Seconds of a step, and the requests that gained a token."""
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
    """An engine with these adapters (name -> rank), of random values, on its device, where they stay.

    There is room for all of them below the share from which on the cache swaps out, and no history is kept.
    """
    hf_config = read_config(Path(config.model_dir))
    dtype = DTYPES[resolved(config, hf_config).dtype]
    shape = replace(ModelShape.from_hf_config(hf_config), dtype_bytes=dtype.itemsize)
    slack = shape.num_layers * kv_layout(config, shape, dtype).page_bytes
    least = shape.adapter_bytes(16) + slack  # the engine's own bound below
    needed = max(least, sum(shape.adapter_bytes(rank) + slack for rank in adapters.values()))
    room_gb = math.ceil(needed / config.swap_out_above / 1e3) / 1e6
    core = build_engine(
        replace(config, max_loras=max(1, len(adapters)), lora_memory_gb=room_gb, prefix_caching=False)
    )
    for seed, (name, rank) in enumerate(adapters.items()):
        core.add_adapter(random_adapter(shape, dtype, name, rank, seed=seed), None)
        _bring_in(core, name)
    return core


def _bring_in(core: EngineCore, name: str) -> None:
    """Answer one request of the adapter, as it is read beside the steps."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    core.add_request(
        GenerateRequest(request_id=f"first-{name}", prompt_token_ids=(0,), sampling=sampling, adapter=name)
    )
    while core.has_work:
        if not core.step():
            time.sleep(_LOAD_POLL_S)
