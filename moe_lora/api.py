# SPDX-License-Identifier: Apache-2.0
"""The library: `LLM` for scripts, `AsyncLLM` for asyncio programs, and the exports of `moe_lora`."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.nn.functional import normalize

from moe_lora.adapters.peft.files import adapter_folder
from moe_lora.adapters.registry.register import register_adapter
from moe_lora.adapters.registry.registry import Registry
from moe_lora.config import EngineConfig
from moe_lora.config.settings import check_names, settings_of
from moe_lora.core.errors import (
    AdapterError,
    AdapterFailedError,
    ConfigError,
    EngineDeadError,
    GenerationError,
)
from moe_lora.core.request import (
    AdapterInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PromptReport,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
    add_run,
    name_problem,
    token_ids,
)
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.client import LoopClient
from moe_lora.engine.client.messages import Stop
from moe_lora.engine.core import EngineCore
from moe_lora.engine.loop import EngineLoop
from moe_lora.engine.sequence import check_request
from moe_lora.engine.text.adapter_text import log_adapter_text
from moe_lora.engine.text.text import TextDelta, TextStream, served_tokenizer, with_end_tokens
from moe_lora.engine.text.tokenizer_files import log_generation_config

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "EngineConfig",
    "GenerationError",
    "Registry",
    "SamplingParams",
    "register_adapter",
]


class InProcessClient(LoopClient):
    """`EngineClient` with a private core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._loop = EngineLoop(core, self.deliver)
        super().__init__(self._loop.inbox.put)
        self._loop.start()
        _CLIENTS.add(self)

    def shut_down(self) -> None:
        """End the loop; running requests are dropped."""
        self._loop.inbox.put(Stop())
        self._loop.join()
        self.fail(EngineDeadError("the engine was shut down"))

    async def close(self) -> None:
        stop: Callable[[], None] = self.shut_down
        await asyncio.to_thread(stop)


_CLIENTS: WeakSet[InProcessClient] = WeakSet()


def _end_in_fork() -> None:
    """Refuse calls in a forked process, without the engine's threads."""
    for client in _CLIENTS:
        client._lock = threading.Lock()  # a lost thread may hold the former lock
        client._dead = EngineDeadError("a forked process has no engine; make the LLM in that process")


os.register_at_fork(after_in_child=_end_in_fork)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer.  text is None without a tokenizer in the model directory.

    prompt_logprobs: of each prompt token; None for the first.  hidden_state: [H] fp32, of the prompt's last
    token, after the final norm.  prompt_id_logprobs: [rows, ids] fp32, of `prompt_logprob_token_ids`.
    routed_experts: [tokens of prompt and answer - 1, layers with experts, experts of a token] int16.
    adapter_versions: (version, number of tokens) of the answer, in order; one without `on_publish="switch"`.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    adapter: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    hidden_state: torch.Tensor | None = None
    prompt_id_logprobs: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    adapter_versions: tuple[tuple[int, int], ...] = ()


class Answer:
    """Collects one request's outputs; ended by stop strings."""

    def __init__(self, request: GenerateRequest, stream: TextStream | None) -> None:
        self.request = request
        self._stream = stream
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._cached = 0
        self._prompt: PromptReport | None = None
        self._experts = bytearray()
        self._versions: list[tuple[int, int]] = []
        self.finish_reason: FinishReason | None = None
        self.problem: str | None = None

    def take(self, output: TokenOutput) -> str:
        """Add an output; returns the new certain text.  Sets finish_reason with the last output.

        Sets problem too if the engine could not complete the request.
        """
        if output.finish_reason == "error":
            self.problem = output.error or "the engine gave no reason"
        self._cached = output.num_cached_tokens
        if output.prompt is not None:
            self._prompt = self._prompt or output.prompt
            if output.prompt.experts is not None:
                self._experts += output.prompt.experts[2]
        delta = TextDelta("", len(output.token_ids))
        if self._stream is not None:
            ended = output.finish_reason == "stop"
            delta = self._stream.push(output.token_ids[:-1] if ended else output.token_ids)
            if ended and delta.stop is None:
                delta = TextDelta(delta.text, len(output.token_ids))
        self._tokens += output.token_ids[: delta.num_tokens]
        self._logprobs += (output.logprobs or ())[: delta.num_tokens]
        if output.adapter_version is not None:
            add_run(self._versions, output.adapter_version, len(output.token_ids[: delta.num_tokens]))
        text = delta.text
        self.finish_reason = output.finish_reason if delta.stop is None else "stop"
        if self.finish_reason is not None and delta.stop is None and self._stream is not None:
            rest = self._stream.flush()
            text += rest.text
            if rest.stop is not None:
                self.finish_reason = "stop"
        self._text.append(text)
        return text

    def fail(self, problem: str) -> None:
        """End an answer refused by the engine."""
        self.problem, self.finish_reason = problem, "error"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        prompt, rows = self._prompt or PromptReport(), len(self.request.sampling.prompt_logprob_token_ids)
        scores = None if prompt.id_logprobs is None else _tensor(prompt.id_logprobs).view(rows, -1)
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self._tokens),
            text=None if self._stream is None else "".join(self._text),
            finish_reason=self.finish_reason,
            adapter=self.request.adapter,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
            num_cached_tokens=self._cached,
            prompt_logprobs=None if prompt.logprobs is None else (None, *prompt.logprobs),
            hidden_state=None if prompt.hidden is None else _tensor(prompt.hidden),
            prompt_id_logprobs=scores,
            routed_experts=self._routed_experts(prompt),
            adapter_versions=tuple(self._versions),
        )

    def _routed_experts(self, prompt: PromptReport) -> torch.Tensor | None:
        if prompt.experts is None:
            return None
        num_tokens = self.request.prompt_tokens + len(self._tokens) - 1
        ids = torch.frombuffer(self._experts, dtype=torch.int16)
        return ids.view(-1, *prompt.experts[:2])[:num_tokens].clone()


def _tensor(hidden: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(hidden), dtype=torch.float32)


Prompt = str | Sequence[int] | torch.Tensor
Item = TypeVar("Item")
_Outputs = queue.SimpleQueue[tuple[Answer, TokenOutput | Exception]]


class _Engine:
    """Shared part of `LLM` and `AsyncLLM`: the model, adapters, and requests from prompts."""

    def __init__(self, model_dir: str, adapters: Mapping[str, str] | None = None, **settings: Any) -> None:
        check_names("", settings, settings_of(EngineConfig))
        if not isinstance(adapters, (Mapping, NoneType)):
            raise ConfigError(f"adapters={adapters!r:.100} must be a mapping of names to directories")
        for name in adapters or ():
            _check_name(name)
        config = EngineConfig(
            model_dir=str(model_dir),
            adapters=tuple(
                (name, adapter_folder(str(path), name)) for name, path in (adapters or {}).items()
            ),
            **settings,
        )
        if config.pool is not None:
            raise ConfigError("an adapter pool is over several instances, but this is one; leave pool out")
        self.tokenizer = served_tokenizer(config)
        if config.generation_config == "auto":
            log_generation_config(config.model_dir)
        self.client = InProcessClient(build_engine(config))
        for name, path in config.adapters:
            self._log_text(name, path)

    @property
    def info(self) -> ModelInfo:
        """Facts about the engine's model."""
        return self.client.core.info

    def default_sampling(self) -> SamplingParams:
        """For prompts without `sampling`: `SamplingParams()` with the values of generation_config.json.

        A caller's `SamplingParams` gets the tokenizer's end tokens, and is else used unchanged.
        """
        return SamplingParams(**self.info.sampling_defaults)  # type: ignore[arg-type]

    def publish_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        config: Any = None,
    ) -> AdapterInfo:
        """Serve a new version of `name` (or a new name) from now on, while requests run.

        source: a PEFT directory, or a state dict with `config`: the fields of adapter_config.json, or
        PEFT's LoraConfig.  Only LoRA tensors of a state dict are used, and copied, so training may
        continue.  Running requests finish on their version.  Returns once new requests use the new version.
        Raises AdapterError; BusyError while requests hold a pinned adapter's only slot.
        """
        _check_name(name)
        if isinstance(source, Mapping):
            if config is None:
                raise ValueError(
                    "config is missing; give PEFT's LoraConfig (model.peft_config['default']), or the fields "
                    "of adapter_config.json (r, lora_alpha, …)"
                )
            packed = self.client.core.pack_adapter(name, source, config)
            return self.client.start_call("publish_adapter", packed, None).result()
        if not isinstance(source, (str, os.PathLike)):
            raise ValueError(
                f"source is a {type(source).__name__}; give a PEFT directory, or a state dict and config"
            )
        path = adapter_folder(os.fspath(source), name)
        info = self.client.start_call("load_adapter", name, path, replace=True).result()
        self._log_text(name, path)
        return info

    def _log_text(self, name: str, path: str) -> None:
        log_adapter_text(name, path, self.info.model_dir, used=False)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name`, wait for its running ones, free its memory."""
        self.client.start_call("unload_adapter", name).result()

    def pin_adapter(self, name: str, *, pinned: bool = True) -> AdapterInfo:
        """Load an adapter to the device and keep it there; pinned=False undoes the pin.

        Raises AdapterNotFoundError, or CapacityError if no room is left for one request.
        """
        return self.client.start_call("pin_adapter", name, pinned).result()

    def list_adapters(self) -> list[AdapterInfo]:
        """All served adapters."""
        return self.client.start_call("list_adapters").result()

    def stats(self) -> EngineStats:
        """State and counts of the engine."""
        return self.client.start_call("stats").result()

    def close(self) -> None:
        """End the engine; running requests are dropped."""
        self.client.shut_down()

    def _prepared(self, sampling: SamplingParams | None) -> SamplingParams:
        """The parameters for the engine.  Raises ValueError."""
        if sampling is None:
            sampling = self.default_sampling()
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling={sampling!r:.100} must be SamplingParams(…), or None")
        if self.tokenizer is None and sampling.stop:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        if sampling.bad_words:
            if self.tokenizer is None:
                raise ValueError("bad_words need a tokenizer; use bad_word_ids")
            ids = self.tokenizer.bad_word_ids(sampling.bad_words)
            sampling = replace(sampling, bad_words=(), bad_word_ids=sampling.bad_word_ids + ids)
        if sampling.grammar is not None:
            from moe_lora.engine.text.grammars import check_grammar

            check_grammar(sampling.grammar)
        return with_end_tokens(sampling, self.tokenizer, self.info)

    def _answer(self, prompt: Prompt, adapter: str | None, sampling: SamplingParams) -> Answer:
        """sampling: from `_prepared`."""
        if not isinstance(adapter, (str, NoneType)):
            raise ValueError(f"adapter={adapter!r:.100} must be a name, or None")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model directory has no tokenizer; give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        try:
            given = token_ids(prompt)
        except TypeError as error:
            raise ValueError(f"a prompt must be text or token ids, not {prompt!r:.100}") from error
        request = GenerateRequest(
            request_id=uuid.uuid4().hex, prompt_token_ids=given, sampling=sampling, adapter=adapter
        )
        check_request(request, self.info)
        if self.tokenizer is None:
            return Answer(request, None)
        stream = TextStream(
            self.tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )
        return Answer(request, stream)


class LLM(_Engine):
    """A model and adapters; `generate` answers a batch.

    adapters: {name: directory}.  settings: fields of `EngineConfig`.  Use as a context manager, or call
    `close`.
    """

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapter: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer each prompt (text or token ids), in order.

        adapter and sampling: one for all, or one per prompt; adapter None is the base model; sampling None
        is `default_sampling()`.  Raises ValueError for an invalid prompt and AdapterNotFoundError, and then
        drops all prompts of the call.  Raises GenerationError, after the end of all prompts, if the engine
        could not complete a prompt, for example after a failed load; the error carries the other answers.
        """
        batch = _as_prompts(prompts)
        adapters = _one_each("adapter", adapter, len(batch), str)
        params = _one_each("sampling", sampling, len(batch), SamplingParams)
        prepared = {id(one): self._prepared(one) for one in {id(one): one for one in params}.values()}
        rows = zip(batch, adapters, params, strict=True)
        answers = [self._answer(prompt, name, prepared[id(one)]) for prompt, name, one in rows]
        outputs: _Outputs = queue.SimpleQueue()
        open_answers: set[Answer] = set()
        try:
            for answer in answers:
                open_answers.add(answer)
                self.client.submit(answer.request, partial(_put, outputs, answer))
            while open_answers:
                answer, item = outputs.get()
                if isinstance(item, AdapterFailedError):
                    answer.fail(str(item))
                    open_answers.discard(answer)
                    continue
                if isinstance(item, Exception):
                    raise item
                if answer not in open_answers:
                    continue
                answer.take(item)
                if answer.finish_reason is not None:
                    open_answers.remove(answer)
                    if item.finish_reason is None:
                        self.client.abort_now(answer.request.request_id)
        finally:
            for answer in open_answers:
                self.client.abort_now(answer.request.request_id)
        completions = [answer.completion() for answer in answers]
        _raise_problems(answers, completions)
        return completions

    def embed(
        self, prompts: Prompt | Sequence[Prompt], adapter: str | Sequence[str | None] | None = None
    ) -> torch.Tensor:
        """Hidden states of the prompts' last tokens, after the final norm, scaled to length 1: [prompts, H].

        prompts, adapter and errors: as in `generate`.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0.0, hidden_state=True)
        found = [one.hidden_state for one in self.generate(prompts, adapter, sampling)]
        if not found:
            return torch.empty(0, self.client.core.shape_and_dtype[0].hidden_size)
        return normalize(torch.stack([one for one in found if one is not None]), dim=1)


class AsyncLLM(_Engine):
    """`LLM` for an asyncio program with many concurrent streams; other methods are the same."""

    async def generate(
        self, prompt: Prompt, adapter: str | None = None, sampling: SamplingParams | None = None
    ) -> Completion:
        """The whole answer.  Raises GenerationError if the engine could not complete the request."""
        answer = self._answer(prompt, adapter, self._prepared(sampling))
        async for _ in self._pieces(answer):
            pass
        return await _completion(answer)

    async def stream(
        self, prompt: Prompt, adapter: str | None = None, sampling: SamplingParams | None = None
    ) -> AsyncIterator[str]:
        """The answer's text in pieces.  A close of the iterator aborts the request.

        Raises GenerationError, after the text so far, if the engine could not complete the request.
        """
        answer = self._answer(prompt, adapter, self._prepared(sampling))
        async for text in self._pieces(answer):
            if text:
                yield text

    async def _pieces(self, answer: Answer) -> AsyncIterator[str]:
        try:
            async for output in self.client.generate(answer.request):
                yield answer.take(output)
                if answer.finish_reason is not None:
                    break
        except AdapterFailedError as error:
            answer.fail(str(error))
        if answer.problem is not None:
            _raise_problems([answer], [await _completion(answer)])


async def _completion(answer: Answer) -> Completion:
    """In a thread with log probabilities of the prompt."""
    apart = answer.request.sampling.prompt_logprobs is not None
    return await asyncio.to_thread(answer.completion) if apart else answer.completion()


def _raise_problems(answers: Sequence[Answer], completions: Sequence[Completion]) -> None:
    problems = {i: answer.problem for i, answer in enumerate(answers) if answer.problem is not None}
    if problems:
        raise GenerationError(problems, completions)


def _put(outputs: _Outputs, answer: Answer, item: TokenOutput | Exception) -> None:
    outputs.put((answer, item))


def _check_name(name: str) -> None:
    if problem := name_problem(name) if isinstance(name, str) else "is not a text":
        raise AdapterError(f"the name {name!r:.50} {problem}")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    given: list[Any] = [one.tolist() if hasattr(one, "tolist") else one for one in prompts]
    return [given] if given and all(isinstance(item, int) for item in given) else given


def _one_each(name: str, value: Any, count: int, kind: type[Item]) -> list[Any]:
    if isinstance(value, (kind, Mapping)) or not isinstance(value, Iterable):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one, or one per prompt")
    return values
