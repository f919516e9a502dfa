# SPDX-License-Identifier: Apache-2.0
"""A chat's tools, in the template's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from moe_lora.serve.openai.fields import FieldError

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.openai.protocol import ChatRequest

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


def check_tools(body: ChatRequest) -> None:
    """Raises FieldError for a wrong tool, or a choice outside of the tools."""
    names = [_name_of(tool, place) for place, tool in enumerate(body.tools or ())]
    if len(names) > MAX_TOOLS:
        raise FieldError("tools", f"tools has {len(names)} entries; send at most {MAX_TOOLS}")
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise FieldError(
            "tool_choice", f"tool_choice={json.dumps(choice)} needs tools; send tools, or leave it out"
        )
    _check_forced(choice, names)


def _name_of(tool: Mapping[str, Any], place: int) -> str:
    where = f"tools[{place}]"
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function" or not isinstance(function, dict):
        raise FieldError("tools", f'{where} must be {{"type": "function", "function": {{"name": …}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise FieldError("tools", f"{where}.function.name must be a text of 1 to {MAX_NAME_CHARS} characters")
    if not isinstance(function.get("parameters"), dict | None):
        raise FieldError("tools", f"{where}.function.parameters must be a JSON schema (an object), or absent")
    return name


def _check_forced(choice: Any, names: Sequence[str]) -> None:
    """Raises FieldError for an unknown forced call."""
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise FieldError(
                "tool_choice", 'tool_choice must be {"type": "function", "function": {"name": …}}'
            )
        if name not in names:
            listed = ", ".join(names)[:500]
            raise FieldError(
                "tool_choice", f"tool_choice names {name[:100]!r}, which is not in tools ({listed})"
            )


def with_fit_arguments(
    messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, name: str | None
) -> list[dict[str, Any]]:
    """The messages with past calls' arguments in the template's form: objects or JSON text."""
    templates = tokenizer.chat_templates
    if templates is None or (name is not None and name not in templates.sources):
        return list(messages)
    known = _TAKES_TEXT.setdefault(templates, {})
    if name not in known:
        known[name] = _takes_text(tokenizer, name)
    fitted = _as_text if known[name] else _as_object
    return [
        message
        if not isinstance(calls := message.get("tool_calls"), list)
        else {**message, "tool_calls": [_fitted(call, fitted) for call in calls]}
        for message in messages
    ]


_TAKES_TEXT: WeakKeyDictionary[Any, dict[str | None, bool]] = WeakKeyDictionary()
"""Templates -> name -> True for arguments as text."""
_MARK = "zxkq"


def _takes_text(tokenizer: Tokenizer, name: str | None) -> bool:
    """True if the template fails for an object or prints Python code, but prints a text."""

    def rendered(arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "callid123", "type": "function", "function": function}
        asked = {"role": "user", "content": "x"}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered = {"role": "tool", "content": "x", "name": "f", "tool_call_id": "callid123"}
        try:
            return tokenizer.render_chat([asked, called, answered], name=name)
        except ValueError:
            return ""

    with_object = rendered({_MARK: "x"})
    if _MARK in with_object and f"'{_MARK}'" not in with_object:
        return False
    return _MARK in rendered(json.dumps({_MARK: "x"}))


def _fitted(call: Any, fitted: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": fitted(function["arguments"])}}


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
