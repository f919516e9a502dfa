# SPDX-License-Identifier: Apache-2.0
"""An engine that says what it was told to: for tests of the interface, not of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    EngineDeadError,
)
from moe_lora.core.request import (
    AdapterInfo,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    PromptReport,
    RequestTiming,
    TokenLogprobs,
    TokenOutput,
)
from moe_lora.engine.client.messages import PauseScope, SleepOrder, SleepPart

TIMING = RequestTiming(
    queue_s=0.001,
    adapter_load_s=0.002,
    kv_load_s=0.005,
    prefill_s=0.003,
    first_decode_s=0.004,
    num_preemptions=2,
)
EOS = 2


@dataclass
class ScriptedEngine:
    """`EngineClient` whose base and adapters each have one answer, repeated until a limit.

    answers: model name -> token ids (None: the base).  step_s: pause before each token.
    tokens_per_step: how many tokens an output carries.  fail_after: tokens until a request fails.
    refuse: why no request can run.  hang_after: tokens of all requests; further tokens never come.
    hidden: of the last token of every prompt.  cuts: tokens of the next requests before their "abort".
    """

    answers: Mapping[str | None, Sequence[int]]
    vocab_size: int
    max_model_len: int = 128
    step_s: float = 0.0
    tokens_per_step: int = 1
    fail_after: int | None = None
    refuse: str | Exception | None = None
    hang_after: int | None = None
    hidden: bytes | None = None
    cuts: list[int] = field(default_factory=list)
    alive: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    pauses: dict[str, PauseScope] = field(default_factory=dict)
    num_cleared: int = 0
    asleep: set[SleepPart] = field(default_factory=set)
    instances: tuple[Any, ...] = ()
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    num_tokens: int = 0
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    expert_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.answers:
            if name is not None:
                self.adapters[name] = adapter_info(name)

    async def model_info(self) -> ModelInfo:
        self._check_alive()
        return ModelInfo(
            name="base",
            model_dir="models/base",
            family="mixtral",
            dtype="float32",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_loras=4,
            eos_token_ids=(EOS,),
            block_size=16,
            num_kv_blocks=40,
            sampling_defaults=self.sampling_defaults,
            expert_bytes=self.expert_bytes,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        self._check_alive()
        if request.adapter is not None and request.adapter not in self.adapters:
            raise AdapterNotFoundError(f"no adapter is named {request.adapter!r}")
        if self.refuse is not None:
            raise self.refuse if isinstance(self.refuse, Exception) else ValueError(self.refuse)
        self.requests.append(request)
        self.running.add(request.request_id)
        ended = False
        try:
            async for output in self._outputs(request):
                ended = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request.request_id)
            if not ended:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        answer = self.answers.get(request.adapter) or self.answers[None]
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = min(request.sampling.max_tokens or room, room)
        done, cut_at = 0, self.cuts.pop(0) if self.cuts else limit + 1
        while True:
            await asyncio.sleep(self.step_s)
            while self._hangs() and request.request_id not in self.aborted:
                await asyncio.sleep(0.01)
            self._check_alive()
            if request.request_id in self.aborted or done >= cut_at:
                yield self._output(request, (), "abort")
                return
            if self.fail_after is not None and done >= self.fail_after:
                raise EngineDeadError("the engine's process has ended")
            count = min(self.tokens_per_step, limit - done)
            token_ids = tuple(answer[place % len(answer)] for place in range(done, done + count))
            done += count
            ends = [place for place, token_id in enumerate(token_ids) if self._ends(request, token_id)]
            token_ids = token_ids[: ends[0] + 1] if ends else token_ids
            reason = "stop" if ends else "length" if done >= limit else None
            yield self._output(request, token_ids, reason)
            if reason is not None:
                return

    def _hangs(self) -> bool:
        return self.hang_after is not None and self.num_tokens >= self.hang_after

    def _ends(self, request: GenerateRequest, token_id: int) -> bool:
        sampling = request.sampling
        return token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos)

    def _output(
        self, request: GenerateRequest, token_ids: tuple[int, ...], reason: str | None
    ) -> TokenOutput:
        self.num_tokens += len(token_ids)
        logprobs = None
        if request.sampling.logprobs is not None:
            top = ((5, -0.5), (6, float("-inf")))[: request.sampling.logprobs]
            logprobs = tuple(TokenLogprobs(-0.5, 1, top) for _ in token_ids)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            adapter_version=None if request.adapter is None else 1,
            num_cached_tokens=1,
            timing=TIMING if reason else None,
            prompt=PromptReport(hidden=self.hidden) if request.sampling.hidden_state and token_ids else None,
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.aborted.append(request_id)

    async def is_served(self, name: str) -> bool:
        return name in self.adapters

    def is_refused(self, name: str) -> bool:
        return False

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        self._check_alive()
        return getattr(self, f"_{verb}")(*args, **words)

    def _pause_requests(self, scope: PauseScope, *_: object) -> None:
        self.pauses[scope.owner] = scope

    def _resume_requests(self, owner: str | None) -> None:
        self.pauses = {} if owner is None else {n: one for n, one in self.pauses.items() if n != owner}

    def _paused_scopes(self) -> list[PauseScope]:
        return list(self.pauses.values())

    def _abort_requests(self, scope: PauseScope) -> None:
        assert scope

    def _clear_cache(self) -> None:
        self.num_cleared += 1

    def _sleep(self, parts: Sequence[SleepPart], *_: object) -> None:
        self.asleep |= set(parts)

    def _wake_up(self, parts: Sequence[SleepPart]) -> None:
        self.asleep -= set(parts)

    def _sleep_orders(self) -> list[SleepOrder]:
        return [SleepOrder(frozenset(self.asleep))] if self.asleep else []

    def _load_adapter(self, name: str, path: str, replace: bool = False) -> AdapterInfo:
        if name in self.adapters and not replace:
            raise AdapterExistsError(
                f"an adapter is already named {name!r}; unload it or choose another name"
            )
        if "broken" in path:
            raise AdapterError(f"{path}/adapter_model.safetensors: key 'x' matches nothing in the model")
        version = self.adapters[name].version + 1 if name in self.adapters else 1
        self.adapters[name] = adapter_info(name, path, version)
        return self.adapters[name]

    def _unload_adapter(self, name: str, waits: bool = True) -> None:
        if name not in self.adapters:
            raise AdapterNotFoundError(f"no adapter is named {name!r}")
        del self.adapters[name]

    def _pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        if name not in self.adapters:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")
        if pinned and sum(info.pinned for info in self.adapters.values()) >= 1:
            raise CapacityError(f"adapter {name!r} can't be pinned; raise arena_mb")
        self.adapters[name] = replace(
            self.adapters[name], pinned=pinned, residency="device", num_pages=7, idle_s=0.25
        )
        return self.adapters[name]

    async def list_adapters(self) -> list[AdapterInfo]:
        self._check_alive()
        return list(self.adapters.values())

    async def stats(self) -> EngineStats:
        self._check_alive()
        return EngineStats(
            num_running=len(self.running),
            num_waiting=5,
            num_deferred=2,
            kv_usage=0.25,
            running_adapters=("shout", "upper"),
            waiting_adapters=("other",),
            resident_adapters=("shout",),
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.requests),
            generation_tokens=self.num_tokens,
            adapter_loads=3,
            adapters_preloaded=2,
            adapter_load_bytes=4096,
            adapter_hits=5,
            kv_host_hit_tokens=6,
            swapped_out_bytes=7,
            device_bytes=1000,
            device_kv_bytes=400,
            device_kv_invalid_bytes=100,
            host_adapter_bytes=8,
        )

    async def is_alive(self) -> bool:
        return self.alive

    async def close(self) -> None:
        self.alive = False

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine's process has ended")


def adapter_info(name: str, path: str | None = None, version: int = 1) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        version=version,
        lora_rank=8,
        nbytes=1024,
        targets=("q_proj",),
        path=path or f"adapters/{name}",
        residency="host",
    )
