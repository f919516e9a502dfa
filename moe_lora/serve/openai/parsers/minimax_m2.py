# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: <invoke name="NAME"> with <parameter name="KEY">."""

from __future__ import annotations

import re

from .tagged_calls import TaggedCalls


class MiniMaxCalls(TaggedCalls):
    OPEN = ("<invoke name=",)
    NOISE = ("<minimax:tool_call>", "</minimax:tool_call>")
    HEADER = re.compile(r"""\s*["']?\s*([^<>\s"']+)\s*["']?\s*>""")
    KEY = "<parameter name="
    ARGUMENT = re.compile(r"""\s*<parameter name=\s*["']?(?![\s"'])([^<>\n]*[^<>\s"'])["']?\s*>""")
    VALUE_END = "</parameter>"
    FINISH = ("</invoke>",)
    CLOSE = "</invoke>"
    SHAPES = (('<invoke name="NAME">\n', "</invoke>"),)
    ARGUMENT_SHAPE = ('<parameter name="', '">')
    VALUE_SHAPE = "</parameter>"
    NEXT = ("<parameter name=", "</invoke>", "</minimax:tool_call>")
    EARLY = ("\n<parameter name=", "\n</invoke>")
