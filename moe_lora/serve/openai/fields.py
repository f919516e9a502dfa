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
    **dict.fromkeys(
        ("continue_final_message", "echo", "include_stop_str_in_output", "use_beam_search"), (None, False)
    ),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "priority"), (None, 0)),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    **dict.fromkeys(
        ("chat_template", "guided_grammar", "guided_regex", "prompt_embeds", "suffix"), (None, "")
    ),
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "bad_words",
            "documents",
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


class UnsupportedFieldError(ValueError):
    """A field that asks for what this server can't do.  param: its name."""

    def __init__(self, name: str, neutral: tuple[Any, ...]) -> None:
        choices = " or ".join(json.dumps(allowed) for allowed in neutral)
        super().__init__(f"{name} is not supported; leave it out, or send {choices}")
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


class Message(BaseModel):
    """Settings of every request model: exact types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ApiRequest(Message):
    """A body of the OpenAI interface."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, IGNORED, NEUTRAL)
