# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls and reasoning, one file a format."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .machine import Parser

TOOL_FORMATS = {
    "hermes": ("hermes", "HermesCalls"),
    "qwen3_coder": ("qwen3_coder", "Qwen3CoderCalls"),
    "llama3_json": ("llama3_json", "Llama3Calls"),
    "mistral": ("mistral", "MistralCalls"),
    "harmony": ("harmony", "Harmony"),
    "glm4": ("glm4", "Glm4Calls"),
    "deepseek_v3": ("deepseek_v3", "DeepSeekCalls"),
    "kimi": ("kimi", "KimiCalls"),
    "granite": ("granite", "GraniteCalls"),
    "gemma4": ("gemma4", "Gemma4Calls"),
    "minimax_m2": ("minimax_m2", "MiniMaxCalls"),
}
"""`front_end.tool_call_parser` -> module and class."""


FORCED = "forced"


def parser_class(name: str) -> type[Parser]:
    """Imports the format's module."""
    module, attribute = ("json_calls", "ForcedCalls") if name == FORCED else TOOL_FORMATS[name]
    return cast("type[Parser]", getattr(import_module(f".{module}", __name__), attribute))
