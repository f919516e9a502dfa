# SPDX-License-Identifier: Apache-2.0
"""Mistral: [TOOL_CALLS] before a list of objects, or before each NAME[ARGS]{…}."""

from __future__ import annotations

import re
import uuid
from typing import ClassVar

from .json_calls import OBJECT, JsonCalls


class MistralCalls(JsonCalls):
    OPEN: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    MARKS: ClassVar[tuple[str, ...]] = ("[ARGS]", "[CALL_ID]")
    HEADER = re.compile(
        rf"\s*\[?{OBJECT}|\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)",
        re.DOTALL,
    )

    @staticmethod
    def new_id(name: str, index: int) -> str:
        """Mistral's templates take ids of nine letters and digits."""
        return uuid.uuid4().hex[:9]

    def _close(self) -> bool:
        self._end_call()
        if self._is_outer:
            self._state = self._between
        return True

    def _between(self) -> bool:
        """After an object of a list: a comma, or the list's end."""
        rest = self._rest.lstrip()
        if not rest and not self._ended:
            return False
        self._state = self._content
        if rest[:1] in {",", "]"}:
            self._source = ""
            if self._consume(len(self._rest) - len(rest) + 1)[-1] == ",":
                self._state = self._header
            else:
                self._source = None
        return True
