# SPDX-License-Identifier: Apache-2.0
"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

import re

from .json_calls import OBJECT, JsonCalls


class HermesCalls(JsonCalls):
    OPEN = ("<tool_call>",)
    CLOSE = "</tool_call>"
    HEADER = re.compile(OBJECT, re.DOTALL)
    OUTER = True
    SHAPES = (('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),)
