# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Coder: <function=NAME> with <parameter=KEY>."""

from __future__ import annotations

import re

from .tagged_calls import TaggedCalls


class Qwen3CoderCalls(TaggedCalls):
    OPEN = ("<tool_call>", "<function=")
    HEADER = re.compile(r"(?:\s*<function=)?\s*([^<>\s]+)\s*>")
    KEY = "<parameter="
    ARGUMENT = re.compile(r"\s*<parameter=\s*(?!\s)([^<>\n]*[^<>\s])\s*>")
    VALUE_END = "</parameter>"
    FINISH = ("</function>", "</tool_call>")
    CLOSE = "</tool_call>"
    TRIM = True
    SHAPES = (
        ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"),
        ("<function=NAME>\n", "</function>"),
    )
    ARGUMENT_SHAPE = ("<parameter=", ">\n")
    VALUE_SHAPE = "\n</parameter>"
    NEXT = ("<parameter=", "</function>", "</tool_call>")
    EARLY = ("\n<parameter=", "\n</function>")
