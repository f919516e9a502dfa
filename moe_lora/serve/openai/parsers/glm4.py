# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and later: <tool_call>NAME with <arg_key> and <arg_value>."""

from __future__ import annotations

import re

from .tagged_calls import TaggedCalls


class Glm4Calls(TaggedCalls):
    OPEN = ("<tool_call>",)
    HEADER = re.compile(r"\s*([^<>\s{}]+)\s*(?=<arg_key>|</tool_call>)")
    KEY = "<arg_key>"
    ARGUMENT = re.compile(r"\s*<arg_key>\s*(?!\s)([^<>\n]*[^<>\s])\s*</arg_key>\s*<arg_value>")
    VALUE_END = "</arg_value>"
    FINISH = ("</tool_call>",)
    CLOSE = "</tool_call>"
    SHAPES = (("<tool_call>NAME\n", "</tool_call>"), ("<tool_call>NAME", "</tool_call>"))
    ARGUMENT_SHAPE = ("<arg_key>", "</arg_key>\n<arg_value>")
    VALUE_SHAPE = "</arg_value>"
