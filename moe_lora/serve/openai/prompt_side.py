# SPDX-License-Identifier: Apache-2.0
"""A prompt in the answer: echo, log probabilities; shortened prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from msgspec import structs

from moe_lora.core.request import ModelInfo, SamplingParams, TokenLogprobs, TokenOutput
from moe_lora.serve.frontend import ABORTED
from moe_lora.serve.http_errors import ApiError, bad_request, to_json

from .endpoints import LEAST_LOGPROB, ChatFormat, ChoiceFormat, CompletionFormat
from .generation import Delta, Generation
from .preparing import check_prompt
from .protocol import ChatRequest, CompletionRequest, SamplingFields

if TYPE_CHECKING:
    from moe_lora.engine.text.text import TextStream, Tokenizer

    from .preparing import Prepared

SLICE_S = 1e-3
"""Longest delay of requests by an answer's encoding."""
SLICE_TOKENS = 16
MAX_STREAMED_SCORES = 1 << 14
"""Log probabilities of prompt tokens in one event."""


class PromptSide(NamedTuple):
    """A body's prompt side.  echo: text before each answer."""

    sampling: SamplingParams
    prompts: Sequence[Sequence[int]]
    echo: tuple[str, ...] | None


def prompt_side(
    body: SamplingFields,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer | None,
    info: ModelInfo,
) -> PromptSide:
    """The body's prompt side.  Raises ApiError."""
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not sent in streams; leave stream out", "prompt_logprobs")
    kept = [shortened(one, body, info, sampling.max_tokens or 1) for one in prompts]
    if not body.echo:
        return PromptSide(sampling, kept, None)
    if isinstance(body, ChatRequest):
        return PromptSide(sampling, kept, tuple(map(_last_message, body.conversations)))
    if sampling.logprobs is not None:
        asked = sampling.logprobs, body.prompt_logprobs or 0
        width = 1 + (info.vocab_size if sampling.logprobs == -1 else sampling.logprobs)
        if body.stream and width * max(map(len, kept)) > MAX_STREAMED_SCORES:
            what = f"echo has more than {MAX_STREAMED_SCORES} log probabilities of a prompt in a stream"
            raise bad_request(f"{what}; leave stream out, or lower logprobs", "stream")
        sampling = replace(sampling, prompt_logprobs=-1 if -1 in asked else max(asked))
    for part in kept:
        check_prompt(part, sampling, info)
    texts = zip(cast("CompletionRequest", body).prompts, prompts, kept, strict=True)
    echo = tuple(
        given if isinstance(given, str) and len(whole) == len(part) else _decoded(part, tokenizer)
        for given, whole, part in texts
    )
    return PromptSide(sampling, kept, echo)


def shortened(token_ids: Sequence[int], body: Any, info: ModelInfo, answer_tokens: int) -> Sequence[int]:
    """The prompt's last (truncation_side right: first) truncate_prompt_tokens; -1: as the context allows.

    Raises ApiError.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        limit = max(1, info.max_model_len - answer_tokens)
    if not 1 <= limit <= info.max_model_len:
        what = f"truncate_prompt_tokens={limit} must be -1, or between 1 and {info.max_model_len}"
        raise bad_request(what, "truncate_prompt_tokens")
    return token_ids[:limit] if body.truncation_side == "right" else token_ids[-limit:]


def with_offsets(
    request: Prepared, prompts: Sequence[str | list[int]], tokenizer: Tokenizer | None, *, add_special: bool
) -> Prepared:
    """The request with its tokens' places in texts, on request."""
    if not cast("Any", request.body).return_token_offsets:
        return request
    found: list[Sequence[tuple[int, int]] | None] = []
    for text, kept in zip(prompts, request.prompts, strict=True):
        if tokenizer is None or not isinstance(text, str):
            found.append(None)
            continue
        [encoding] = tokenizer.backend.encode_batch([text], add_special_tokens=add_special)
        is_start = request.body.truncation_side == "right"
        found.append(encoding.offsets[: len(kept)] if is_start else encoding.offsets[-len(kept) :])
    return replace(request, offsets=tuple(found))


def _last_message(body: ChatRequest) -> str:
    """The text of a final assistant message."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)


def _decoded(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.decode(list(token_ids), skip_special_tokens=False)


class PromptOnly(Generation):
    """Answers without tokens: drops the engine's single token."""

    def _delta(self, index: int, output: TokenOutput, text: TextStream | None) -> Delta:
        if output.finish_reason in ("stop", "length"):
            none = None if output.logprobs is None else ()
            output = structs.replace(output, token_ids=(), logprobs=none, finish_reason="length")
        return super()._delta(index, output, None)


class PromptCompletion(CompletionFormat):
    """Completions with an echo, or prompt log probabilities."""

    in_choice = {"prompt_token_ids": None, "token_ids": None}  # noqa: RUF012

    def __init__(self, tokenizer: Tokenizer | None, prepared: Prepared, *, with_token_ids: bool) -> None:
        super().__init__(tokenizer, with_token_ids=with_token_ids)
        self._prepared = prepared
        self._echoed: set[int] = set()
        self._scores: Iterable[TokenLogprobs] = ()
        self._echoing: Sequence[int] = ()
        self._encoded: dict[int, msgspec.Raw] = {}
        self._shown_scores: dict[int, msgspec.Raw | None] = {}

    async def collect(self, generation: Generation) -> list[Delta]:
        """The choices; encodes long log probabilities in slices."""
        whole = await generation.whole()
        for delta in whole:
            prompt, asked = generation.prompt_of(delta.index), self._prepared.body.prompt_logprobs
            self._shown_scores[delta.index] = await shown_scores(self, prompt, delta, asked)
            scores = None if delta.prompt is None else delta.prompt.logprobs
            if scores is not None and self._prepared.echo is not None and delta.logprobs is not None:
                entries = self._echo_entries(delta.index, prompt, scores, delta.token_ids, delta.logprobs)
                self._encoded[delta.index] = await in_slices(_object_of_lists(entries))
        return whole

    def chunk(self, delta: Delta) -> dict[str, Any]:
        entry = self.whole(delta)
        del entry["prompt_logprobs"]
        return entry

    def whole(self, delta: Delta) -> dict[str, Any]:
        prepared, index = self._prepared, delta.index
        number = index // prepared.body.num_choices
        first = prepared.echo is not None and index not in self._echoed
        if first and prepared.sampling.prompt_logprobs is not None:
            check_report(delta)
        self._scores = (delta.prompt and delta.prompt.logprobs) or () if first else ()
        self._echoing = prepared.prompts[number] if first else ()
        entry = super().whole(delta)
        if first and prepared.echo is not None:
            self._echoed.add(index)
            entry["text"] = prepared.echo[number] + entry["text"]
        entry["prompt_logprobs"] = self._shown_scores.pop(index, None)
        return entry

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        if index in self._encoded:
            return self._encoded.pop(index)
        if not self._echoing:
            return super().logprobs(index, token_ids, logprobs)
        found: dict[str, list[Any]] = {}
        for entry in self._echo_entries(index, self._echoing, self._scores, token_ids, logprobs):
            for name, values in entry.items():
                found.setdefault(name, []).extend(values)
        return found

    def _echo_entries(
        self,
        index: int,
        prompt: Sequence[int],
        scores: Iterable[TokenLogprobs],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
    ) -> Iterator[dict[str, list[Any]]]:
        """Log probabilities of prompt and answer, in parts."""
        text = self.token_text(prompt[0], is_first=True)
        self._offsets[index] = len(text)
        yield {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        num = self._prepared.sampling.logprobs or 0
        all_ids, found = [*prompt[1:], *token_ids], chain(scores, logprobs)
        num_cut = len(prompt) - 1  # the report may have more likely tokens
        size = 1 if self._prepared.sampling.prompt_logprobs == -1 else SLICE_TOKENS
        for start in range(0, len(all_ids), size):
            part = range(start, min(start + size, len(all_ids)))
            cut = [structs_top(one, num) if n < num_cut else one for n, one in zip(part, found, strict=False)]
            yield super().logprobs(index, [all_ids[one] for one in part], cut)


def check_report(delta: Delta) -> None:
    """Raises ApiError for an abort before the prompt's report."""
    if delta.prompt is None and delta.finish_reason == "abort":
        raise ApiError(503, ABORTED)


def structs_top(scores: TokenLogprobs, num: int) -> TokenLogprobs:
    """The scores with the `num` likeliest tokens; -1: all."""
    return scores if num == -1 else replace(scores, likeliest=scores.top[:num])


async def in_slices(parts: Iterable[bytes]) -> msgspec.Raw:
    """JSON in joined parts; other requests run between slices of SLICE_S."""
    found, until_s = bytearray(), time.monotonic() + SLICE_S
    for part in parts:
        found += part
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = time.monotonic() + SLICE_S
    return msgspec.Raw(found)


async def shown_scores(
    form: ChoiceFormat, prompt: Sequence[int], delta: Delta, num_top: int | None
) -> msgspec.Raw | None:
    """A choice's prompt_logprobs, or None.  Raises ApiError as `check_report`."""
    if num_top is None:
        return None
    check_report(delta)
    if delta.prompt is None or delta.prompt.logprobs is None:
        return None
    return await in_slices(_score_parts(form, prompt, delta.prompt.logprobs, num_top))


def _score_parts(
    form: ChoiceFormat, prompt: Sequence[int], scores: Iterable[TokenLogprobs], num_top: int
) -> Iterator[bytes]:
    """vLLM's prompt_logprobs: entries of each token and the likeliest; null for the first."""
    yield b"[null"
    for token_id, one in zip(prompt[1:], scores, strict=True):
        top = structs_top(one, num_top).top
        ranked = {token_id: (one.logprob, one.position)}
        ranked |= {other: (value, rank) for rank, (other, value) in enumerate(top, 1) if other != token_id}
        opening = b",{"
        for other, (value, rank) in ranked.items():
            entry = {
                "logprob": max(value, LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": form.token_text(other),
            }
            yield b'%s"%d":%s' % (opening, other, to_json(entry))
            opening = b","
        yield b"}"
    yield b"]"


def _object_of_lists(entries: Iterable[dict[str, list[Any]]]) -> Iterator[bytes]:
    """An object of lists in pieces."""
    encoded: dict[str, list[bytes]] = {}
    for entry in entries:
        for name, values in entry.items():
            encoded.setdefault(name, []).append(to_json(values)[1:-1])
        yield b""
    lists = (b'"%s":[%s]' % (name.encode(), b",".join(parts)) for name, parts in encoded.items())
    yield b"{%s}" % b",".join(lists)


class PromptChat(ChatFormat):
    """Another format's chats with an echo, or prompt log probabilities."""

    def __init__(self, form: ChatFormat, prepared: Prepared) -> None:
        self.text, self.reasoning_tokens, self.watch = form.text, form.reasoning_tokens, form.watch
        self.beside_choices = dict(form.beside_choices)
        self._form = form
        self._prepared = prepared
        self._echoed: set[int] = set()

    def show_at_end(self, name: str, value_of: Callable[[int], object]) -> None:
        self._form.show_at_end(name, value_of)

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._form.opening(index)

    def beside(self, index: int) -> dict[str, Any]:
        self._form.prompt_of = self.prompt_of
        return self._form.beside(index)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._with_echo(self._form.chunk(delta), delta.index, "delta")

    async def collect(self, generation: Generation) -> list[Delta]:
        """The choices; encodes long log probabilities in slices."""
        whole, asked = await generation.whole(), self._prepared.body.prompt_logprobs
        found = await shown_scores(self._form, generation.prompt_of(0), whole[0], asked)
        self.beside_choices["prompt_logprobs"] = found
        return whole

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self._with_echo(self._form.whole(delta), delta.index, "message")

    def _with_echo(self, entry: dict[str, Any], index: int, key: str) -> dict[str, Any]:
        echo = self._prepared.echo
        if echo is not None and index not in self._echoed:
            self._echoed.add(index)
            text = echo[index // self._prepared.body.num_choices]
            entry[key]["content"] = text + (entry[key].get("content") or "")
        return entry
