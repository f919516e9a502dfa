# SPDX-License-Identifier: Apache-2.0
"""Granite 3: <|tool_call|> or <tool_call> before a list of objects."""

from __future__ import annotations

import re

from .json_calls import OBJECT, ListedCalls


class GraniteCalls(ListedCalls):
    OPEN = ("<|tool_call|>", "<tool_call>")
    SHAPES = tuple((mark + '[{"name": "NAME", "arguments": ', "}]") for mark in OPEN)
    HEADER = re.compile(rf"(?:\s*\[)?{OBJECT}", re.DOTALL)
