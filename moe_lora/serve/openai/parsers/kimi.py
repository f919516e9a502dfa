# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2: a call's id is functions.NAME:INDEX."""

from __future__ import annotations

import re

from .json_calls import JsonCalls


class KimiCalls(JsonCalls):
    OPEN = ("<|tool_call_begin|>",)
    NOISE = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    GAP = ""
    CLOSE = "<|tool_call_end|>"
    MARKS = ("<|tool_call_argument_begin|>",)
    SHAPES = (
        (
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    )
    HEADER = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    )

    @staticmethod
    def new_id(name: str, index: int) -> str:
        return f"functions.{name}:{index}"
