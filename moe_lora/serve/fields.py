"""Fields of the OpenAI and vLLM interfaces that this server knows but does not act on.

A field that would change the result must not be dropped silently: it is accepted only with a value that
asks for nothing.  Fields that never change the result are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
NOTHING: tuple[Any, ...] = (None, "", [], {}, False)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "audio",
            "bad_words",
            "chat_template",
            "continue_final_message",
            "documents",
            "echo",
            "frequency_penalty",
            "function_call",
            "functions",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "include_stop_str_in_output",
            "logit_bias",
            "logits_processors",
            "mm_processor_kwargs",
            "prediction",
            "presence_penalty",
            "prompt_embeds",
            "prompt_logprobs",
            "reasoning_effort",
            "structured_outputs",
            "suffix",
            "tools",
            "truncate_prompt_tokens",
            "use_beam_search",
            "verbosity",
            "web_search_options",
        ),
        NOTHING,
    ),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "tool_choice": (None, "none", "auto"),
}
NEUTRAL_IN_MESSAGE = dict.fromkeys(
    ("annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_call_id", "tool_calls"),
    NOTHING,
)


class UnsupportedFieldError(ValueError):
    """A field that asks for what this server can't do.  param: its name."""

    def __init__(self, name: str, neutral: tuple[Any, ...]) -> None:
        choices = ", ".join(dict.fromkeys(json.dumps(allowed) for allowed in neutral))
        super().__init__(f"{name} is not supported; leave it out (accepted values: {choices})")
        self.param = name


def drop_neutral(data: Any, ignored: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """`data` without fields that ask for nothing.  Raises ValueError for those that ask for something."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if name in neutral:
            if not any(_same(value, allowed) for allowed in neutral[name]):
                raise UnsupportedFieldError(name, neutral[name])
        elif name not in ignored:
            kept[name] = value
    return kept


def _same(value: Any, allowed: Any) -> bool:
    """Equal, where 0 counts as False but True not as 1."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed or (allowed is False and value == 0 and isinstance(value, (int, float)))
    return value == allowed


def whole_characters(text: str) -> str:
    """The text itself.  Raises ValueError for halves of surrogate pairs, which JSON can say."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start} is no text") from error
    return text


Text = Annotated[str, AfterValidator(whole_characters)]


class Message(BaseModel):
    """Settings of every request model: exact types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ApiRequest(Message):
    """A body of the OpenAI interface."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, IGNORED, NEUTRAL)
