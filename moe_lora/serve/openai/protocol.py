# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the OpenAI-compatible endpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from moe_lora.config import MAX_COUNT
from moe_lora.core.request import GREEDY_BELOW, MAX_LOGPROB_IDS, SamplingParams
from moe_lora.serve.http_errors import ApiError, bad_request

from .fields import IGNORED, NEUTRAL, FieldError, check_unknown, drop_neutral, drop_unused

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_ID_CHARS = 256
MAX_NAMED_KEYS = 5
MAX_ID_DIGITS = 12
"""Most digits of a token id in any vocabulary."""


def whole_characters(text: str) -> str:
    """The text itself.  Raises ValueError for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start} is no text") from error
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list checked up to its first wrong item."""


class ApiModel(BaseModel):
    """Exact types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuses the first unknown field alone."""
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise unknown_field(name)
        return data


def unknown_field(name: str) -> FieldError:
    """The error for an unknown field."""
    return FieldError(name, f"{name[:MAX_ID_CHARS]} is not a field of this request; leave it out")


class PeerModel(ApiModel):
    """Keeps unknown fields apart, refuses misspelled fields."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.keys() <= cls.model_fields.keys():
            check_unknown(data, cls.model_fields)
        return data

    def unknown_fields(self) -> list[str]:
        return list(self.model_extra or ())

    def drop_unknown(self) -> None:
        """Drops unknown fields, possibly with large values."""
        if self.model_extra:
            self.model_extra.clear()


def refuse_unknown(body: PeerModel) -> None:
    """Raises ApiError for the first unknown field."""
    unknown = body.unknown_fields()
    if unknown:
        error = unknown_field(unknown[0])
        raise bad_request(str(error), error.param)


def _show_foreign(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Peers' fields in OpenAPI: refused fields with neutral values, ignored fields."""
    own = kind.model_fields.keys()
    schema["x-refused"] = {name: list(allowed) for name, allowed in NEUTRAL.items() if name not in own}
    schema["x-ignored"] = sorted(IGNORED - own)


class ApiRequest(PeerModel):
    """A body of the OpenAI interface.  NAMES: own field -> client's field."""

    NAMES: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(json_schema_extra=_show_foreign)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.keys() <= cls.model_fields.keys():
            data = drop_neutral(data, cls.model_fields)
            check_unknown(data, cls.model_fields)
        return data

    @property
    def client_names(self) -> Mapping[str, str]:
        return self.NAMES

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the client's names of fields."""
        return error.renamed(self.client_names)


MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_MODEL_CHARS = 1024
MAX_BAD_WORDS = 1024
SAMPLING_FIELDS = {
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "prompt_logprobs"),
    *("processed_logprobs", "on_publish"),
}
PROMPT_FIELDS = frozenset({"echo", "prompt_logprobs", "truncate_prompt_tokens"})

StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0
MAX_SALT_CHARS = 1024
MAX_LENGTH_PENALTY = 10.0
MAX_TERMS, MAX_WEIGHT = 8, 1e4
"""Limits of a weighted sum of adapters."""
NO_SEED = -1
""""No seed" in clients of several servers."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
THINKING = ("enable_thinking", "thinking")
"""Fields of chats, and variables of templates, with one effect."""
_TEMPLATE_FIELDS = ("documents", "reasoning_effort", "tools")
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


def _as_bool(value: Any) -> Any:
    """A boolean for the forms of `thinking`.  Raises FieldError for other objects."""
    forms = {"enabled": True, "disabled": False}
    if not isinstance(value, dict) or not value:
        return None if value == {} else value
    kind = value.get("type")
    if len(value) > 1 or not isinstance(kind, str) or kind not in forms:
        what = 'thinking must be {"type": "enabled"} or {"type": "disabled"}'
        raise FieldError("thinking", f"{what}; thinking_token_budget limits it")
    return forms[kind]


Thinking = Annotated[bool | dict[str, Any] | None, AfterValidator(_as_bool)]


class StreamOptions(PeerModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class StructuredFields(ApiRequest):
    """Grammars of answers, in the forms of OpenAI, vLLM and SGLang."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Listed[Text] | None = None
    guided_grammar: Text | None = None
    guided_json_object: bool | None = None
    json_schema: dict[str, Any] | Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None


STRUCTURED_FIELDS = frozenset(StructuredFields.model_fields) | {"tool_choice", "parse_context"}


class WeightedAdapter(ApiModel):
    """A term of a weighted sum of adapters."""

    name: Annotated[Text, Field(max_length=MAX_MODEL_CHARS)]
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


def _terms(value: Any) -> Any:
    """None for an unused field.  Raises FieldError without weights."""
    if value in (None, "", [], {}):
        return None
    if not isinstance(value, list):
        what = 'lora is a list of {"name": ..., "weight": ...}'
        raise FieldError("lora", f"{what}; name a single adapter in model, and leave lora out")
    return value


def _to_first_wrong(given: Any) -> Any:
    """A mapping with a wrong value, as that value alone: it is the only error."""
    for key, one in given.items() if isinstance(given, dict) else ():
        if type(one) not in (int, float) or not -math.inf < one < math.inf:
            return {key: one}
    return given


class SamplingFields(StructuredFields):
    """Fields of both generating endpoints.  null: the default."""

    default_max_tokens: ClassVar[int | None] = None
    """For absent max_tokens; None: the rest of the context."""
    adapts_parsers: ClassVar[bool] = False
    """True if the body states where the reasoning is: `adapted`."""
    renders: ClassVar[bool] = False
    """True for `return_token_offsets`."""
    shows_experts: ClassVar[bool] = True
    """False if the answer shows no experts."""

    model: Annotated[Text, Field(max_length=MAX_MODEL_CHARS)] | None = None
    request_id: Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: StopString | Annotated[Listed[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[Listed[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_to_first_wrong)] = None
    allowed_token_ids: Listed[TokenId] | None = None
    bad_words: Annotated[Listed[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    logprob_token_ids: Annotated[Listed[TokenId], Field(max_length=MAX_LOGPROB_IDS)] | None = None
    processed_logprobs: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    on_publish: Literal["keep", "switch"] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Timeout | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    lora: Annotated[Listed[WeightedAdapter] | None, Field(max_length=MAX_TERMS), BeforeValidator(_terms)] = (
        None
    )

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def unknown_fields(self) -> list[str]:
        inner = [] if self.stream_options is None else self.stream_options.unknown_fields()
        return [*super().unknown_fields(), *(f"stream_options.{name}" for name in inner)]

    def drop_unknown(self) -> None:
        super().drop_unknown()
        if self.stream_options is not None:
            self.stream_options.drop_unknown()

    @property
    def as_chat(self) -> ChatRequest | None:
        """The chat for the parsers; None: a plain answer."""
        return None

    def without_prompt(self) -> Self:
        """The body without large fields."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise FieldError("best_of", f"best_of={self.best_of} must equal n={self.num_choices}")
        options = self.stream_options
        if options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream=true")
        if self.use_beam_search or self.length_penalty not in (None, 1.0):
            from .beams import check_beams

            check_beams(self)
        return self

    def sampling(
        self, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, int | float]
    ) -> SamplingParams:
        """The engine's parameters; defaults: of absent fields.  Raises ApiError."""
        given: dict[str, Any] = {**defaults, **self.model_dump(include=SAMPLING_FIELDS, exclude_none=True)}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if given.get("seed") == NO_SEED:
            del given["seed"]
        if self.logit_bias or self.bad_words or self.allowed_token_ids is not None:
            given |= self._edits()
        if self.return_routed_experts is not None or self.use_beam_search:
            given["routed_experts"] = bool(self.return_routed_experts)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            params = SamplingParams(
                **given,
                max_tokens=max_tokens,
                logprobs=logprobs,
                logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
            )
        except ValueError as error:
            raise bad_request(str(error), re.split(r"\W", str(error), maxsplit=1)[0]) from error
        return replace(params, temperature=0.0) if params.temperature < GREEDY_BELOW else params

    def _edits(self) -> dict[str, Any]:
        wrong = [key for key in self.logit_bias or {} if not (key.isascii() and key.isdigit())]
        if wrong:
            named = ", ".join(repr(key[:MAX_ID_CHARS]) for key in wrong[:MAX_NAMED_KEYS])
            what = f'logit_bias has the keys {named}; keys are token ids, as in {{"5": 1.5}}'
            raise bad_request(what, "logit_bias")
        allowed = self.allowed_token_ids
        return {
            "logit_bias": {int(key[:MAX_ID_DIGITS]): bias for key, bias in (self.logit_bias or {}).items()},
            "bad_words": tuple(self.bad_words or ()),
            "allowed_token_ids": None if allowed is None else tuple(dict.fromkeys(allowed)),
        }


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Text | Listed[Text] | Listed[int] | Listed[Listed[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt.  Raises ApiError for an empty prompt."""
        if isinstance(self.prompt, str):
            prompts: list[Any] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        else:
            prompts = list(self.prompt)
        if not prompts or not all(prompts):
            raise bad_request("prompt is empty; give at least one token or character", "prompt")
        return prompts

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": ""})


class InOrder(ApiModel):
    """Template fields in the body's order: templates may print messages."""

    model_config = ConfigDict(extra="allow")

    _order: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _note_order(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = handler(data)
        if isinstance(data, dict):
            found._order = tuple(data)
        return found

    @model_serializer(mode="wrap")
    def _in_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        return {name: found[name] for name in self._order if name in found} | found


class TextPart(InOrder):
    """A part of a content; further fields go to the template."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        return data


class ChatMessage(InOrder):
    """A message; further fields go to the template."""

    role: Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARS)]
    content: Text | Listed[TextPart] | None = None
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuses a misspelled `content`."""
        if isinstance(data, dict):
            if "content" not in data:
                check_unknown(data, ("role", "content", "name"))
            return drop_unused(data)
        return data

    def for_template(self) -> dict[str, Any]:
        """The message without null fields, as in transformers."""
        return self.model_dump(exclude_none=True)


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions.  chat_template: a name.

    add_generation_prompt None: true, unless the answer continues the last message.
    """

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool = False
    continue_final_message: bool | None = None
    chat_template: Text | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    enable_thinking: bool | None = None
    thinking: Thinking = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def as_chat(self) -> ChatRequest | None:
        return self

    @property
    def client_names(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": limit, **self.NAMES}

    @property
    def conversations(self) -> Sequence[ChatRequest]:
        """A chat per prompt."""
        return (self,)

    @property
    def thinking_field(self) -> str | None:
        """The field that turns reasoning on or off, if any."""
        return next((name for name in THINKING if getattr(self, name) is not None), None)

    @property
    def template_variables(self) -> dict[str, Any]:
        """chat_template_kwargs, with the request's fields.

        A template reads one of the variables THINKING; reasoning_effort "none" sets these too.
        """
        fields = ("documents", "reasoning_effort") if not self.tools else _TEMPLATE_FIELDS
        given = {name: value for name in fields if (value := getattr(self, name)) is not None}
        if (name := self.thinking_field) is not None:
            given |= dict.fromkeys(THINKING, getattr(self, name))
        quiet = dict.fromkeys(THINKING, False) if self.reasoning_effort == "none" else {}
        return {**quiet, **(self.chat_template_kwargs or {}), **given}

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        """Refuses contradictions."""
        name, variables = self.thinking_field, self.chat_template_kwargs or {}
        if name is None:
            return self
        asked, quiet = getattr(self, name), False if self.reasoning_effort == "none" else None
        others = {"thinking": self.thinking, "reasoning_effort": quiet}
        others |= {f"chat_template_kwargs.{one}": variables.get(one) for one in THINKING}
        for other, value in others.items():
            if value not in (None, asked):
                raise FieldError(name, f"{name} contradicts {other}; send one of them, or the same in both")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs=true")
        if self.tools or self.tool_choice is not None:
            from .parsers.requests import check_tools

            check_tools(self)
        return self

    def without_prompt(self) -> Self:
        empty = dict.fromkeys(("documents", "tools", "kv_transfer_params"))
        return self.model_copy(update={"messages": [], **empty})
