# SPDX-License-Identifier: Apache-2.0
"""Calls that the request forces: a grammar makes the answer a list of {"name": …, "arguments": {…}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .json_calls import OBJECT, ListedCalls


class ForcedCalls(ListedCalls):
    HEADER = re.compile(rf"(?:\s*\[)?{OBJECT}", re.DOTALL)

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._source, self._state = [], self._header


def forced_functions(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool
) -> tuple[list[dict[str, Any]], bool] | None:
    """Functions for the answer, and True if several calls may follow.  None: no forced call."""
    if choice in (None, "none", "auto"):
        return None
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    functions = [one for one in functions_of(tools) if wanted in (None, one["name"])]
    return functions, parallel and wanted is None


def functions_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of each function that a grammar reads."""
    return [{name: tool["function"].get(name) for name in ("name", "parameters", "strict")} for tool in tools]
