# SPDX-License-Identifier: Apache-2.0
"""Mistral: [TOOL_CALLS] before a list, or before NAME[ARGS]{…}."""

from __future__ import annotations

import re
import uuid

from .json_calls import OBJECT, ListedCalls


class MistralCalls(ListedCalls):
    OPEN = ("[TOOL_CALLS]",)
    MARKS = ("[ARGS]", "[CALL_ID]")
    SHAPES = (("[TOOL_CALLS]NAME[ARGS]", ""), ('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"))
    HEADER = re.compile(
        rf"(?:\s*\[)?{OBJECT}|\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)",
        re.DOTALL,
    )

    @staticmethod
    def new_id(name: str, index: int) -> str:
        """Mistral's templates need nine letters and digits."""
        return uuid.uuid4().hex[:9]
