# SPDX-License-Identifier: Apache-2.0
"""Other interfaces over chats: bodies become chats, answers become blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import Request
from pydantic import PrivateAttr, ValidationError, model_validator
from starlette.responses import Response

from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request, describe_validation, to_json

from .endpoints import ChatFormat, EventStream, while_connected
from .fields import MAX_NAMED, NEUTRAL, FieldError, check_unknown, drop_neutral
from .generation import Delta, Generation
from .parsers.answers import AnswerPart, MarkedText, ParsedChoice, ToolCall
from .parsers.machine import object_start
from .preparing import Prepared
from .protocol import ApiRequest, ChatRequest, StreamOptions, whole_characters

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.engine.text.text import Tokenizer

SHARED = (
    *("model", "stream", "temperature", "top_p", "request_id", "priority", "timeout", "cache_salt"),
    *("top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"),
    *("allowed_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("structured_outputs", "chat_template_kwargs"),
)
"""Fields with the same meaning in a chat."""
_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "an integer"}


class Fields:
    """The fields of an object; `unknown` gets the names of unread fields.

    Raises FieldError for a wrong value, and at the exit for a misspelled name.
    """

    def __init__(self, value: Any, place: str, unknown: dict[str, None]) -> None:
        self.place, self._unknown = place, unknown
        self._left: dict[str, Any] = dict(expect(value, dict, place))
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None and self._left:
            check_unknown(self._left, self._known)
            plain = re.sub(r"\[\d+\]", "[]", self.place)
            self._unknown.update(dict.fromkeys(f"{plain}.{name}" for name in self._left))

    def get(self, name: str, kind: type | None = None) -> Any:
        """The value, or None."""
        self._known.add(name)
        value = self._left.pop(name, None)
        return value if value is None or kind is None else expect(value, kind, f"{self.place}.{name}")

    def text(self, name: str) -> str:
        """A required text."""
        return str(expect(self.get(name), str, f"{self.place}.{name}"))

    def refuse(self, **neutral: tuple[Any, ...]) -> None:
        """Raises FieldError for values outside null and the given."""
        for name, allowed in neutral.items():
            value = self.get(name)
            if value is not None and value not in allowed:
                raise unsupported(f"{self.place}.{name}", allowed)

    def skip(self, *names: str) -> None:
        """Ignore fields without an effect on the answer."""
        for name in names:
            self.get(name)


def expect(value: Any, kind: type, place: str) -> Any:
    """The value itself.  Raises FieldError for another type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong(place, f"must be {_TYPES[kind]}")
    if kind is str:
        try:
            whole_characters(str(value))
        except ValueError as error:
            raise wrong(place, str(error)) from None
    return value


def wrong(place: str, what: str) -> FieldError:
    return FieldError(re.split(r"[.\[]", place, maxsplit=1)[0], f"{place}: {what}")


def unsupported(place: str, allowed: Sequence[Any] = ()) -> FieldError:
    choices = " or ".join(json.dumps(one) for one in (None, *allowed))
    return wrong(place, f"this value is not supported; leave {place.split('.')[-1]} out, or send {choices}")


def content_of(value: Any, place: str, kinds: Sequence[str], unknown: dict[str, None]) -> Any:
    """A message's content from a text, or text parts of these kinds."""
    if isinstance(value, str):
        return str(expect(value, str, place))
    texts = []
    for number, given in enumerate(expect(value, list, place)):
        with Fields(given, f"{place}[{number}]", unknown) as part:
            kind = part.text("type")
            if kind not in kinds:
                what = f"the type {kind[:64]!r} is not supported; allowed are {', '.join(kinds)}"
                raise wrong(part.place, what)
            part.skip("annotations", "logprobs", "cache_control", "citations")
            texts.append(part.text("text"))
    return as_content(texts)


def as_content(texts: Sequence[str]) -> Any:
    """A chat message's content: one text, or parts."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


class ConvertedBody(ApiRequest):
    """A body of another interface; `SHARED` fields go to the chat unchanged."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    CHAT_NAMES: ClassVar[Mapping[str, str]] = {}
    """Field of chats -> field here."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {*cls.model_fields, *SHARED}
        data = drop_neutral(data, own, {**NEUTRAL, **cls.NEUTRAL}, cls.CHAT_NAMES)
        for name in list(data):
            is_foreign = name in ChatRequest.model_fields and name not in own
            if is_foreign and data.pop(name) is not None:
                here = cls.CHAT_NAMES.get(name)
                way_out = f"send {here}" if here else "leave it out"
                raise FieldError(name, f"{name} is a field of /v1/chat/completions; here, {way_out}")
        check_unknown(data, own)
        return data

    def shared(self) -> dict[str, Any]:
        return {name: value for name, value in (self.model_extra or {}).items() if name in SHARED}

    def unknown_fields(self) -> list[str]:
        return [name for name in super().unknown_fields() if name not in SHARED]


class ConvertedChat(ChatRequest):
    """A chat from another interface's body."""

    shows_experts: ClassVar[bool] = False
    _shown: dict[str, Any] = PrivateAttr(default_factory=dict)
    """Fields that the answer repeats."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        return data

    @property
    def shown(self) -> dict[str, Any]:
        return self._shown

    @classmethod
    def model_validate(cls, obj: Any, **words: Any) -> Self:
        """The chat of a body.  Raises ApiError."""
        try:
            return cls.converted(obj)
        except FieldError as error:
            raise bad_request(str(error), error.param) from error
        except ValidationError as error:
            raise describe_validation(error) from error

    @classmethod
    def converted(cls, data: Any) -> Self:
        """The body's chat.  Raises FieldError and ValidationError."""
        raise NotImplementedError

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any], unknown: Sequence[str], shown: dict[str, Any]) -> Self:
        """The chat of these fields.  Raises FieldError and ApiError."""
        if len(unknown) > MAX_NAMED:
            what = f"{len(unknown)} fields of the request are unknown; send at most {MAX_NAMED}"
            raise FieldError(unknown[0], what)
        given = {name: value for name, value in chat.items() if value is not None}
        try:
            found = super().model_validate({**given, **dict.fromkeys(unknown)})
        except ValidationError as error:
            raise describe_validation(error).renamed(cls.NAMES) from error
        found._shown = shown
        return found


def as_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's tool of a function."""
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


@dataclass
class AnswerBlock:
    """A piece of an answer.

    kind: reasoning, content or call.  is_cut: without an end.
    """

    kind: str
    text: str = ""
    call: ToolCall | None = None
    is_cut: bool = False
    item_id: str = ""
    logprobs: list[Any] = field(default_factory=list)

    def arguments(self) -> Any:
        """The decoded arguments; of a cut call, whole values."""
        return object_start(self.text) if self.is_cut else json.loads(self.text or "{}")


class BlockFormat(ChatFormat):
    """The answer of one chat as blocks, whole or as events."""

    def __init__(self, tokenizer: Tokenizer, prepared: Prepared) -> None:
        super().__init__(tokenizer, with_token_ids=False)
        assert isinstance(prepared.body, ConvertedChat)
        self.prepared, self.chat = prepared, prepared.body
        self._parsers = prepared.parsers
        self._choice: ParsedChoice | None = None
        if self._parsers is not None:
            self.text = MarkedText(tokenizer, self._parsers.marks())
            self._choice = ParsedChoice(self._parsers)
        self.blocks: list[AnswerBlock] = []
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        self.adapter_version: int | None = None
        self._has_opened = self._has_answer = False
        self._logprobs: list[Any] = []

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        self.generation, self.head = generation, head
        if self.chat.stream:
            return BlockEvents(generation, self, {**headers, **self.headers()})
        await while_connected(request, self._collect())
        return JsonResponse(self.whole_answer(), headers={**headers, **self.headers()})

    def headers(self) -> dict[str, str]:
        """Further headers, read after a whole answer."""
        return {}

    def whole_answer(self) -> dict[str, Any]:
        raise NotImplementedError

    def opened(self) -> list[dict[str, Any]]:
        """Events before the first block."""
        raise NotImplementedError

    def block_opened(self, block: AnswerBlock) -> list[dict[str, Any]]:
        raise NotImplementedError

    def block_grown(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def block_closed(self, block: AnswerBlock) -> list[dict[str, Any]]:
        raise NotImplementedError

    def closed(self) -> list[dict[str, Any]]:
        """Events after the last block."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def _collect(self) -> bool:
        async with self.generation.deltas() as deltas:
            async for delta in deltas:
                list(self._grown(delta))
        list(self._close_last())
        self._join_malformed(at_limit=self.finish_reason != "stop")
        self._finish()
        return True

    def _join_malformed(self, *, at_limit: bool = False) -> None:
        """Malformed calls become content, joined with adjacent content."""
        blocks, self.blocks = self.blocks, []
        for block in blocks:
            if block.call is not None and not block.call.is_shown(at_limit=at_limit):
                block = AnswerBlock("content", block.call.source)
            last = self.blocks[-1] if self.blocks else block
            if last is not block and last.kind == block.kind == "content":
                last.text += block.text
                last.logprobs += block.logprobs
            else:
                self.blocks.append(block)

    def _read(self, delta: Delta) -> list[AnswerPart]:
        """New parts; counts reasoning tokens before the answer."""
        parts = [AnswerPart("content", delta.text)] if delta.text else []
        if self._choice is not None:
            parts = self._choice.parts(delta.text, ended=delta.finish_reason is not None)
        self._has_answer = self._has_answer or any(part.kind != "reasoning" for part in parts)
        if not self._has_answer:
            self.num_reasoning_tokens += len(delta.token_ids)
        elif delta.logprobs is not None and not (self._choice and self._choice.calls):
            self._logprobs += self.logprobs(0, delta.token_ids, delta.logprobs)["content"]
        self.finish_reason, self.matched_stop = delta.finish_reason, delta.matched_stop
        self.adapter_version = delta.adapter_version
        return parts

    def version(self) -> dict[str, int]:
        """`adapter_version` for an adapter's answer, else empty."""
        return {} if self.adapter_version is None else {"adapter_version": self.adapter_version}

    def _finish(self) -> None:
        """Mark cut blocks; without reasoning, drop the count of its tokens."""
        if not any(block.kind == "reasoning" for block in self.blocks):
            self.num_reasoning_tokens = 0
        if self.blocks and self.blocks[-1].call is None:
            self.blocks[-1].is_cut = self.finish_reason in ("length", "abort")
        calls = [] if self._choice is None else self._choice.calls
        if self.finish_reason == "stop" and any(call.is_valid() for call in calls):
            self.finish_reason = "tool_calls"

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Events of a step, with opening and closing."""
        if not self._has_opened:
            self._has_opened = True
            yield from self.opened()
        yield from self._grown(delta)
        if delta.finish_reason is not None:
            self._finish()
            yield from self._close_last()
            yield from self.closed()

    def _grown(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Events of a step's blocks."""
        for part in self._read(delta):
            yield from self._grow(part)
        if delta.finish_reason is not None and not self.blocks:
            yield from self._grow(AnswerPart("content", ""))

    def _grow(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != part.kind or last.call is not part.call:
            yield from self._close_last()
            last = AnswerBlock(part.kind, call=part.call)
            self.blocks.append(last)
            yield from self.block_opened(last)
        last.text += part.text
        scores = self._logprobs if last.kind == "content" else []
        last.logprobs += scores
        if part.text or scores:
            yield from self.block_grown(last, part.text)
        if scores:
            self._logprobs = []

    def _close_last(self) -> Iterator[dict[str, Any]]:
        if not self.blocks:
            return
        last = self.blocks[-1]
        if last.call is not None:
            last.is_cut = not last.call.is_valid()
        elif last.kind == "content" and self._logprobs:
            yield from self._grow(AnswerPart("content", ""))
        yield from self.block_closed(last)


class BlockEvents(EventStream):
    """A stream of named events."""

    END = b""

    def __init__(self, generation: Generation, form: BlockFormat, headers: Mapping[str, str]) -> None:
        super().__init__(generation, form, {}, StreamOptions(), headers)
        self._blocks = form

    def _events(self, delta: Delta) -> bytes:
        return b"".join(map(_encoded, self._blocks.events(delta)))

    def _failed(self, error: ApiError) -> bytes:
        return b"".join(map(_encoded, self._blocks.failed(error)))


def _encoded(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event))
