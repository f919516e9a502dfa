# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies: served, known from other servers, unknown.

A known field may have a neutral value only.  An unknown field is ignored and named, or refused
(`LimitsConfig.unknown_fields`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from moe_lora.core.errors import FieldError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Ignored-Fields"
MAX_NAMED = 64
"""Limit of unknown names per request and in the log."""
MAX_NAME_CHARS = 64
"""Characters of a shown unknown name."""
CHOOSES_ADAPTER = re.compile(r"(?i:adapter|(?<![a-z])lora)|Lo[Rr][Aa]")
"""Names of other servers' fields for an adapter; here `model` names the adapter."""
LORA_PATH = "lora_path"
"""SGLang's field for an adapter of the base in `model`."""
IGNORED = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
        *("return_mm_kwargs", "safety_identifier", "separate_reasoning", "store"),
        *("stream_interval", "user"),
    }
)
"""Fields without an effect on the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("audio", "custom_logit_processor", "enable_thinking", "guided_decoding_backend"),
            *("guided_whitespace_pattern", "input_embeds", "input_ids", "max_dynamic_patch"),
            *("max_new_tokens", "max_output_tokens", "min_dynamic_patch", "min_new_tokens", "prediction"),
            *("repetition_detection", "rid", "sampling_params", "structural_tag", "task"),
            "web_search_options",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("continue_final_message", "include_stop_str_in_output", "json_mode", "no_stop_trim"),
            *("return_cached_tokens_details", "return_hidden_states", "return_logprob", "return_meta_info"),
            *("return_prompt_text", "return_prompt_token_ids", "return_routed_experts"),
            *("return_token_offsets", "use_audio_in_video", "use_beam_search", "watermarking"),
        ),
        (None, False),
    ),
    **dict.fromkeys(
        (
            *("max_repetition_pattern_size", "min_length", "min_repetition_pattern_size"),
            *("no_repeat_ngram_size", "repetition_min_count", "routed_experts_prompt_start"),
            *("routed_experts_start_len", "top_a", "top_logprobs_num"),
        ),
        (None, 0),
    ),
    **dict.fromkeys(("length_penalty", "num_beams", "typical_p"), (None, 1)),
    **dict.fromkeys(
        ("include_reasoning", "skip_special_tokens", "spaces_between_special_tokens", "stream_reasoning"),
        (None, True),
    ),
    **dict.fromkeys(("chat_template", "prompt_embeds", "stop_regex", "suffix"), (None, "")),
    **dict.fromkeys(
        (
            *("documents", "functions", "logits_processors", "models", "stop_sequences"),
            *("token_ids_logprob", "tools"),
        ),
        (None, []),
    ),
    **dict.fromkeys(
        (
            *("custom_params", "ec_transfer_params", "extra_body", "guided_decoding", "images_config"),
            *("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "reasoning"),
            *("response_schema", "session_params", "thinking", "vllm_xargs"),
        ),
        (None, {}),
    ),
    **dict.fromkeys(("function_call", "tool_choice"), (None, "none", "auto")),
    "format": (None, "", {}, "text"),
    "grammar": (None, "", {}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    **dict.fromkeys(("thinking_budget", "thinking_token_budget"), (None, -1)),
    "verbosity": (None, "medium"),
}
"""Other servers' fields with an effect, and neutral values."""
INSTEAD = {
    **dict.fromkeys(("enable_thinking", "thinking"), "chat_template_kwargs.enable_thinking"),
    **dict.fromkeys(("format", "json_mode", "response_schema"), "response_format"),
    "grammar": "structured_outputs.grammar",
    "guided_decoding": "structured_outputs",
    "min_length": "min_tokens",
    "num_beams": "use_beam_search",
    "stop_sequences": "stop",
    "thinking_budget": "thinking_token_budget",
}
"""A chat's fields with the effect of other servers' fields."""
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "function_call"), (None,)),
    **dict.fromkeys(("reasoning", "reasoning_content", "refusal", "tool_call_id"), (None, "")),
    **dict.fromkeys(("annotations", "tool_calls"), (None, [])),
}
"""Fields of OpenAI's messages, and their unused values."""


def drop_neutral(
    data: dict[str, Any],
    own: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns a body without foreign fields.  names: field of chats -> field of the body.

    Raises FieldError for a value with an effect.
    """
    if data.get(LORA_PATH) is not None and LORA_PATH not in own:
        data = _with_adapter(data)
    kept = {}
    for name, value in data.items():
        if name in own:
            kept[name] = value
        elif name != LORA_PATH and chooses_adapter(name):
            if value not in (None, "", [], {}, False):
                what = f"{shown_name(name)} is not supported; name the adapter in model, and leave it out"
                raise FieldError(name, what)
        elif name in neutral:
            if not _is_neutral(value, neutral[name]):
                choices = " or ".join(json.dumps(allowed) for allowed in neutral[name])
                in_chats = INSTEAD.get(name, "")
                here = names.get(in_chats, in_chats)
                way_out = f"; chats have {in_chats}" if in_chats else ""
                if here.split(".")[0] in own:
                    way_out = f"; or send {here} instead"
                raise FieldError(name, f"{name} is not supported; leave it out, or send {choices}{way_out}")
        elif name not in IGNORED and name != LORA_PATH:
            kept[name] = value
    return kept


def chooses_adapter(name: str) -> bool:
    """True for other servers' adapter fields, in any spelling."""
    return CHOOSES_ADAPTER.search(name) is not None


def _with_adapter(data: dict[str, Any]) -> dict[str, Any]:
    """The body with `lora_path` in `model`."""
    adapter, model = data[LORA_PATH], data.get("model")
    if not isinstance(adapter, str):
        raise FieldError(LORA_PATH, f"{LORA_PATH} is no text; name one adapter, or send several requests")
    if not adapter or not isinstance(model, str | None):
        return data
    is_named = model is not None and (model == adapter or model.endswith(f":{adapter}"))
    return data if is_named else {**data, "model": f"{model}:{adapter}" if model else adapter}


def drop_unused(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without unused fields: templates may test a field's presence."""
    return {
        name: value
        for name, value in message.items()
        if name not in NEUTRAL_IN_MESSAGE or not _is_neutral(value, NEUTRAL_IN_MESSAGE[name])
    }


def _is_neutral(value: Any, allowed: tuple[Any, ...]) -> bool:
    """True if allowed; booleans are not numbers."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def check_unknown(data: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises FieldError for a misspelled field, and too many unknown fields."""
    unknown = [name for name in data if name not in own]
    if len(unknown) > MAX_NAMED:
        what = f"{len(unknown)} fields of the request are unknown; send at most {MAX_NAMED}"
        raise FieldError(unknown[0], what)
    for name in unknown:
        if field := _meant(name, own):
            raise FieldError(name, f"{name} is not a field of this request; did you mean {field}?")


def _meant(name: str, own: Collection[str]) -> str | None:
    if len(name) > MAX_NAME_CHARS:
        return None
    plain = _plain(name)
    for field in own:
        if plain == _plain(field) or _is_near(name, field):
            return field
    return None


def _plain(name: str) -> str:
    """Drops case and separators: maxTokens equals max_tokens."""
    return name.replace("_", "").replace("-", "").lower()


def _is_near(name: str, field: str) -> bool:
    """True for few edits from name to field: one for 4 to 7 characters, two for 8 or more.

    A name of four must have the field's letters: step is not stop.
    """
    size = len(field)
    most = 0 if size < 4 else 1 if size < 8 else 2
    if abs(len(name) - size) > most or (size == len(name) == 4 and sorted(name) != sorted(field)):
        return False
    return _edits(name, field, most) <= most


def _edits(first: str, second: str, most: int) -> int:
    """Insertions, deletions, replacements and swaps; above `most`: any such number."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        before, last, row = row, before, [i, *[most + 1] * len(second)]
        for j in range(max(1, i - most), min(len(second), i + most) + 1):
            other = second[j - 1]
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (one != other))
            if i > 1 and j > 1 and one == second[j - 2] and first[i - 2] == other:
                cost = min(cost, last[j - 2] + 1)
            row[j] = cost
        if min(row) > most:
            break
    return row[-1]


class IgnoredFields:
    """Names unknown fields in the answer's header, and once in the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Collection[str]) -> dict[str, str]:
        """The answer's header; empty without names."""
        for name in names:
            if name in self._logged or len(self._logged) >= MAX_NAMED:
                continue
            self._logged.add(name)
            logger.warning("requests have the unknown field %s, which is ignored (unknown_fields=warn)", name)
            if len(self._logged) == MAX_NAMED:
                logger.warning("%d unknown fields of requests are named; further ones are not", MAX_NAMED)
        return {IGNORED_HEADER: ", ".join(names)} if names else {}


def shown_name(name: str) -> str:
    """An unknown name in ASCII, without list separators."""
    return quote(name[:MAX_NAME_CHARS], safe="[]{}()$@!~*'+./:", errors="replace") or '""'
