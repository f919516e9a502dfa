"""Request bodies of the OpenAI-compatible endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from moe_lora.config import MAX_COUNT
from moe_lora.core.request import GREEDY_BELOW, SamplingParams
from moe_lora.serve.http_errors import bad_request

if TYPE_CHECKING:
    from typing_extensions import Self

# Fields of the OpenAI and vLLM interfaces that this server knows but does not act on.
#
# A field that would change the result must not be dropped silently: it is accepted only with a value that
# asks for nothing.  Fields that never change the result are dropped.


MAX_ID_CHARS = 256
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "audio",
            "guided_json",
            "mm_processor_kwargs",
            "prediction",
            "prompt_logprobs",
            "structured_outputs",
            "truncate_prompt_tokens",
            "web_search_options",
        ),
        (None,),
    ),
    **dict.fromkeys(("echo", "include_stop_str_in_output", "use_beam_search"), (None, False)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (None, 0)),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    **dict.fromkeys(("guided_grammar", "guided_regex", "prompt_embeds", "suffix"), (None, "")),
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "bad_words",
            "functions",
            "guided_choice",
            "logits_processors",
            "tools",
        ),
        (None, []),
    ),
    **dict.fromkeys(("function_call", "tool_choice"), (None, "none", "auto")),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "verbosity": (None, "medium"),
}
"""The values of each field that ask for nothing."""
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "function_call"), (None,)),
    **dict.fromkeys(("reasoning_content", "refusal", "tool_call_id"), (None, "")),
    **dict.fromkeys(("annotations", "tool_calls"), (None, [])),
}


class FieldError(ValueError):
    """What is wrong with the field `param`, or with it beside others."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def drop_neutral(data: Any, ignored: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """`data` without fields that ask for nothing.  Raises ValueError for those that ask for something."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if name in neutral:
            if not any(_same(value, allowed) for allowed in neutral[name]):
                choices = " or ".join(json.dumps(allowed) for allowed in neutral[name])
                raise FieldError(name, f"{name} is not supported; leave it out, or send {choices}")
        elif name not in ignored:
            kept[name] = value
    return kept


def _same(value: Any, allowed: Any) -> bool:
    """Equal; true and false are no numbers."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def whole_characters(text: str) -> str:
    """The text itself.  Raises ValueError for halves of surrogate pairs, which JSON can say."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start} is no text") from error
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first wrong item: a million would be a million errors."""


class ApiModel(BaseModel):
    """Settings of every request model: exact types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuses the first unknown field; pydantic itself would name them all."""
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise FieldError(
                        name, f"{name[:MAX_ID_CHARS]} is not a field of this request; leave it out"
                    )
        return data


class ApiRequest(ApiModel):
    """A body of the OpenAI interface."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, IGNORED, NEUTRAL)


MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_MODEL_CHARS = 1024
SAMPLING_FIELDS = {"min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"}

StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ApiRequest):
    """What both generating endpoints share.  null means the default everywhere."""

    default_max_tokens: ClassVar[int | None] = None
    """Where none are asked for; less where the context has less room; None: all of it."""

    model: Annotated[Text, Field(max_length=MAX_MODEL_CHARS)] | None = None
    request_id: Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: int | None = None
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
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Timeout | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def without_prompt(self) -> Self:
        """The body without what may be large."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuses fields that contradict each other."""
        if self.best_of is not None and self.best_of != self.num_choices:
            raise FieldError("best_of", f"best_of={self.best_of} must equal n={self.num_choices}")
        options = self.stream_options
        if options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream=true")
        if options is not None and options.continuous_usage_stats and options.include_usage is False:
            raise FieldError(
                "stream_options",
                "stream_options.continuous_usage_stats=true needs include_usage=true, or leave that out",
            )
        return self

    def sampling(
        self, logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, int | float]
    ) -> SamplingParams:
        """The engine's parameters; defaults: of absent fields.  Raises ApiError naming the wrong field."""
        given = {**defaults, **self.model_dump(include=SAMPLING_FIELDS, exclude_none=True)}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            params = SamplingParams(
                **given,
                max_tokens=max_tokens,
                logprobs=logprobs,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
            )
        except ValueError as error:
            raise bad_request(str(error), str(error).split("=", 1)[0]) from error
        return replace(params, temperature=0.0) if params.temperature < GREEDY_BELOW else params


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    default_max_tokens = 16

    prompt: Text | Listed[Text] | Listed[int] | Listed[Listed[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt.  Raises ApiError if there is none, or an empty one."""
        if isinstance(self.prompt, str):
            prompts: list[Any] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        else:
            prompts = list(self.prompt)
        if not prompts or not all(prompts):
            raise bad_request("the prompt is empty; give at least one token or character", "prompt")
        return prompts

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": ""})


class TextPart(ApiModel):
    type: Literal["text"]
    text: Text


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Listed[TextPart] | None = None
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, frozenset(), NEUTRAL_IN_MESSAGE)

    def for_template(self) -> dict[str, Any]:
        """The message without null fields: transformers drops null fields too."""
        return self.model_dump(exclude_none=True)


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions.  chat_template: a name of the model's templates."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    chat_template: Text | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """chat_template_kwargs, with the documents."""
        variables = dict(self.chat_template_kwargs or {})
        return variables if self.documents is None else {**variables, "documents": self.documents}

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs=true")
        return self

    def without_prompt(self) -> Self:
        return self.model_copy(update={"messages": [], "documents": None})


class LoadAdapterRequest(ApiModel):
    """POST /v1/load_lora_adapter.  lora_path None: where the registry has it."""

    lora_name: Text
    lora_path: Text | None = None
    load_inplace: bool = False


class RegisterAdapterRequest(ApiModel):
    """POST /v1/registry/adapters."""

    lora_name: Text
    lora_path: Text
    owner: Text = ""
    link: bool = False


class CapacityRequest(ApiModel):
    """POST /v1/lora_server/capacity."""

    capacity: Annotated[int, Field(ge=1, le=MAX_COUNT)]


class MigrateRequest(ApiModel):
    """POST /v1/migrate."""

    source: Text
    target: Text
    num_requests: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    kind: Literal["tokens", "kv"] = "tokens"


class UnloadAdapterRequest(ApiModel):
    """POST /v1/unload_lora_adapter.  lora_int_id: another server's internal number, not needed here."""

    lora_name: Text
    lora_int_id: int | None = None
