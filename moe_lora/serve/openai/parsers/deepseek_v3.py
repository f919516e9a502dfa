# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3, R1 and V3.1; V3 has a fence around the JSON."""

from __future__ import annotations

import re

from .json_calls import JsonCalls


class DeepSeekCalls(JsonCalls):
    OPEN = ("<｜tool▁call▁begin｜>",)
    NOISE = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    CLOSE = "<｜tool▁call▁end｜>"
    MARKS = ("<｜tool▁sep｜>",)
    HEADER = re.compile(
        r"\s*(?!\s)(?:function<｜tool▁sep｜>(?P<fenced>[^\n`<{]+)\n```json\s*|(?P<plain>[^\n`<{]+)<｜tool▁sep｜>\s*)(?=\{)"
    )
    FILLER = " \t\r\n`"
    SHAPES = (
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    )

    def _name(self, found: re.Match[str]) -> str | None:
        return (found["fenced"] or found["plain"]).strip() or None
