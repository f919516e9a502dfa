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
        self._source, self._state = "", self._header


def schema_of_calls(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool
) -> tuple[dict[str, Any] | None, bool]:
    """JSON schema of the calls, and whether a function is strict; None: the choice forces no call."""
    if choice in (None, "none", "auto"):
        return None, False
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    functions = [tool["function"] for tool in tools if wanted in (None, tool["function"]["name"])]
    most = {} if parallel and wanted is None else {"maxItems": 1}
    calls = [_schema_of_call(function, place) for place, function in enumerate(functions)]
    strict = any(function.get("strict") is True for function in functions)
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}, strict


def _schema_of_call(function: Mapping[str, Any], place: int) -> dict[str, Any]:
    # An $id of its own makes references begin at the function's schema.
    arguments = {"$id": f"urn:call:{place}", "type": "object", **(function.get("parameters") or {})}
    properties = {"name": {"const": function["name"]}, "arguments": arguments}
    closed = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}
