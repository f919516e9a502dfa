# SPDX-License-Identifier: Apache-2.0
"""Bodies with prompts to tokenise or embed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from fastapi import Request
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from moe_lora.core.host import return_memory
from moe_lora.serve.access import Caller, caller_of
from moe_lora.serve.frontend import adapter_in
from moe_lora.serve.http_errors import ApiError, bad_request, describe_validation
from moe_lora.serve.limits import Limits, body_of, client_of

from .fields import shown_name
from .preparing import INLINE_BYTES, Bounds, Preparer, encoded, no_tokenizer, parse, rendered, tokenizer_of
from .protocol import (
    MAX_ID_CHARS,
    MAX_MODEL_CHARS,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    THINKING,
    ApiRequest,
    ChatRequest,
    Listed,
    ReasoningEffort,
    Text,
    Thinking,
    Timeout,
    TokenId,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.frontend import Frontend

_OF_CHATS = ("reasoning_effort", *THINKING)
_CHAT = ("chat_template", "chat_template_kwargs", "tools", *_OF_CHATS)
EMBEDDING_ONLY = ("dimensions", "encoding_format", "embed_dtype", "endianness", "use_activation", "normalize")
"""Fields of embeddings, meaningless in a chat."""
MAX_INPUTS = 2048
"""Inputs of one request, as in OpenAI's interface."""


class PromptBody(ApiRequest):
    """A prompt, or messages.  prompt_field: the prompt's field."""

    prompt_field: ClassVar[str]
    generation_prompt: ClassVar[bool]
    may_be_empty: ClassVar[bool] = False

    model: Annotated[Text, Field(max_length=MAX_MODEL_CHARS)] | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: Thinking = None

    def texts(self, tokenizer: Tokenizer | None) -> list[str | list[int]]:
        """Prompts as texts or token ids.  Raises ApiError."""
        given = getattr(self, self.prompt_field)
        if (given is None) == (self.messages is None):
            what = f"{self.prompt_field} or messages must be given, and not both"
            raise bad_request(what, self.prompt_field if given is None else "messages")
        if given is None:
            if tokenizer is None:
                raise no_tokenizer("a chat")
            if not self.conversations:
                raise bad_request("messages is empty; give at least one message", "messages")
            return [rendered(self._chat(one), tokenizer) for one in self.conversations]
        for name in _OF_CHATS:
            if getattr(self, name) not in (None, "none"):
                raise bad_request(f"{name} needs messages; leave it out", name)
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not (given and all(given)) and not self.may_be_empty:
            raise bad_request(f"{self.prompt_field} is empty; give at least one token", self.prompt_field)
        return list(given)

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """Messages of each prompt."""
        return [self.messages or []]

    def _chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        asked = self.add_generation_prompt
        ends = self.generation_prompt and not self.continue_final_message if asked is None else asked
        fields = {"messages": messages, **{name: getattr(self, name) for name in _CHAT}}
        fields |= {"add_generation_prompt": ends, "continue_final_message": self.continue_final_message}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise describe_validation(error) from None


class TokenizeRequest(PromptBody):
    """POST /tokenize.  tool_choice: "none" drops tools."""

    prompt_field, generation_prompt, may_be_empty = "prompt", True, True

    prompt: Text | Annotated[Listed[Text], Field(max_length=MAX_INPUTS)] | None = None
    return_token_strs: bool | None = None
    tool_choice: Any = None
    _is_batch: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _read_forms(self) -> Self:
        self._is_batch = isinstance(self.prompt, list)
        if self.tool_choice == "none":
            self.tools = None
        return self

    @property
    def is_batch(self) -> bool:
        """True: a list of prompts."""
        return self._is_batch


class EmbeddingRequest(PromptBody):
    """POST /v1/embeddings and /pooling.

    messages: one or several conversations; input takes both forms too.  use_activation, normalize: scale to
    length 1.
    """

    prompt_field, generation_prompt = "input", False
    max_tokens: ClassVar[int] = 1
    num_choices: ClassVar[int] = 1
    return_token_ids: ClassVar[bool] = False
    lora: ClassVar[None] = None
    use_beam_search: ClassVar[bool] = False
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    input: Text | Listed[Text] | Listed[int] | Listed[Listed[int]] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    dimensions: int | None = None
    task: Text | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    padding: Literal["do_not_pad"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Timeout | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_chats(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in ("input", "messages"):
            chats = _chats(data.get(name))
            if chats is not None and (name == "messages" or data.get("messages") is None):
                data = {**data, name: None, "messages": chats}
                break
        return data

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        return self.messages or []


def _chats(given: Any) -> list[Any] | None:
    """Conversations of a list of messages, or of lists.  None: another value."""
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, dict):
        return [given]
    return given if isinstance(first, list) and first and isinstance(first[0], dict) else None


class DetokenizeRequest(ApiRequest):
    """POST /detokenize.  skip_special_tokens: in SGLang's form."""

    model: Annotated[Text, Field(max_length=MAX_MODEL_CHARS)] | None = None
    tokens: Listed[TokenId] | Annotated[Listed[Listed[TokenId]], Field(max_length=MAX_INPUTS)]
    skip_special_tokens: bool | None = None


@dataclass(frozen=True)
class ReadBody:
    """A checked body.  prompts: token ids, empty without prompts."""

    body: Any
    prompts: Sequence[Sequence[int]] = ()
    ignored: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()


def read_now(kind: type[ApiRequest], content: bytes, tokenizer: Tokenizer | None, bounds: Bounds) -> ReadBody:
    """The content's body.  Raises ApiError for the first problem."""
    try:
        body: Any = parse(cast("Any", kind), content, bounds)
        ignored = tuple(map(shown_name, body.unknown_fields()))
        body.drop_unknown()
        if not isinstance(body, PromptBody):
            return ReadBody(body, ignored=ignored, granted=bounds.granted)
        tokenizer = tokenizer_of(body.model, tokenizer, bounds)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        prompts = encoded(body.texts(tokenizer), tokenizer, add_special=special)
        body = body.model_copy(update={"messages": None, body.prompt_field: None})
        return ReadBody(body, prompts, ignored, bounds.granted)
    finally:
        if len(content) >= INLINE_BYTES:
            return_memory()


async def read_body(
    request: Request, kind: type[ApiRequest], frontend: Frontend, preparer: Preparer
) -> ReadBody:
    """The body for a known model.  Raises ApiError."""
    info, limits = await frontend.client.model_info(), frontend.limits
    caller = caller_of(request.scope)
    texts = None if preparer.adapter_texts is None else preparer.adapter_texts(caller.key)
    bounds = Bounds(info=info, limits=limits.config, adapter_texts=texts)
    if preparer.aliases is not None and preparer.aliases.live:
        from moe_lora.serve.aliases import choice_of

        bounds = replace(bounds, aliases=choice_of(preparer.aliases.live, preparer.bases, request.scope))
    async with body_of(request, limits, limits.config.max_body_bytes) as content:
        args = kind, bytes(content), preparer.tokenizer, bounds
        if len(content) >= INLINE_BYTES:
            found = await preparer.elsewhere(client_of(request.scope), read_now, *args)
        else:
            found = await asyncio.to_thread(read_now, *args)
    if found.granted:
        caller = request.state.caller = caller.with_right(*found.granted)
    await check_model(found.body.model, frontend, caller)
    if isinstance(found.body, PromptBody):
        check_total(sum(map(len, found.prompts)), limits, found.body.prompt_field)
    return found


def check_total(num_tokens: int, limits: Limits, field: str) -> None:
    """Raises ApiError above max_request_tokens."""
    most = limits.config.max_request_tokens
    if num_tokens > most:
        what = f"{field} has {num_tokens} tokens, more than the {most} of one request; send several"
        raise limits.refusal("request_tokens", bad_request(what, field))


async def check_model(model: str | None, frontend: Frontend, caller: Caller) -> None:
    """Raises ApiError for an unknown model."""
    if model is not None and model not in frontend.model_names:
        names = frontend.client.adapters
        model = adapter_in(model, frontend.model_names, names)
        if not model:
            return
        if not caller.may_use(model) or not (model in names or await frontend.client.is_served(model)):
            what = f"the model {model!r} does not exist; GET /v1/models lists what does"
            raise ApiError(404, what, "model")
