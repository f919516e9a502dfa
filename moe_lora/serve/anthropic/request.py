# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/messages as chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from moe_lora.engine.text.chat_template import joined_system
from moe_lora.serve.openai.converted import (
    ConvertedBody,
    ConvertedChat,
    Fields,
    as_content,
    as_tool,
    content_of,
    expect,
    unsupported,
    wrong,
)
from moe_lora.serve.openai.fields import MAX_NAME_CHARS
from moe_lora.serve.openai.protocol import MAX_STOP_STRINGS, THINKING, Listed, StopString

if TYPE_CHECKING:
    from typing_extensions import Self

ROLES = ("user", "assistant", "system")
BLOCKS = ("text", "tool_use", "tool_result", "thinking")
CHAT_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
}
_DIRECT = (["direct"],)


class MessagesBody(ConvertedBody):
    """POST /v1/messages."""

    CHAT_NAMES = CHAT_NAMES
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (None,),
        "context_management": (None, {}),
        "diagnostics": (None, {}),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
    }

    messages: Listed[dict[str, Any]]
    max_tokens: int
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    stop_sequences: Annotated[Listed[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    system: Any = None
    thinking: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    user_profile_id: str | None = None


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens."""

    max_tokens: Any = None


class MessagesChat(ConvertedChat):
    """The chat of a message."""

    NAMES = CHAT_NAMES
    BODY: ClassVar[type[MessagesBody]] = MessagesBody

    @classmethod
    def converted(cls, data: Any) -> Self:
        body = cls.BODY.model_validate(data)
        unknown: dict[str, None] = {}
        messages: Sequence[Any] = messages_of(body.messages, unknown)
        if body.system is not None:
            system = content_of(body.system, "system", ("text",), unknown)
            messages = joined_system([{"role": "system", "content": system}, *messages])
        last = messages[-1]
        continues = last["role"] == "assistant" and "content" in last and "tool_calls" not in last
        chat = {
            **body.shared(),
            **_output(body, unknown),
            **_tool_choice(body.tool_choice, unknown),
            "messages": messages,
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "tools": None if not body.tools else _tools(body.tools, unknown),
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        thinks, budget = _thinking(body.thinking, unknown)
        chat["thinking_token_budget"] = None if cls is CountedChat else budget
        given = chat.get("chat_template_kwargs")
        if thinks is not None and isinstance(given, dict | None):
            chat["chat_template_kwargs"] = {**dict.fromkeys(THINKING, thinks), **(given or {})}
        return cls.from_chat(chat, [*body.unknown_fields(), *unknown], {})


class CountedChat(MessagesChat):
    """The chat of a count."""

    BODY = CountBody


def messages_of(given: list[dict[str, Any]], unknown: dict[str, None]) -> list[dict[str, Any]]:
    """Messages of a chat; consecutive messages of one role are one turn."""
    if not given:
        raise wrong("messages", "is empty; send at least one message")
    messages: list[dict[str, Any]] = []
    for number, one in enumerate(given):
        with Fields(one, f"messages[{number}]", unknown) as message:
            role, content = message.text("role"), message.get("content")
            if role not in ROLES:
                what = f"the role {role[:MAX_NAME_CHARS]!r} is not supported; allowed are {', '.join(ROLES)}"
                raise wrong(message.place, what)
            place = f"{message.place}.content"
            if isinstance(content, str):
                content = [{"type": "text", "text": expect(content, str, place)}]
            _turn(messages, role)
            for block, found in enumerate(expect(content, list, place)):
                with Fields(found, f"{place}[{block}]", unknown) as fields:
                    _add_block(messages, role, fields, unknown)
    for found in messages:
        if texts := found.pop("texts", None):
            found["content"] = as_content(texts)
    kept = [found for found in messages if len(found) > 1]
    if not kept:
        raise wrong("messages", "has no content; send a text")
    return kept


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message, or a new message of this role."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "texts": []})
    return messages[-1]


def _add_block(messages: list[dict[str, Any]], role: str, block: Fields, unknown: dict[str, None]) -> None:
    kind = block.text("type")
    allowed = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking")}
    if kind not in allowed.get(role, ("text",)):
        choices = ", ".join(allowed.get(role, ("text",)))
        what = f"the type {kind[:MAX_NAME_CHARS]!r} is not supported for {role}; allowed are {choices}"
        raise wrong(block.place, what)
    block.skip("cache_control")
    if kind == "text":
        block.skip("citations")
        _turn(messages, role)["texts"].append(block.text("text"))
    elif kind == "thinking":
        block.skip("signature")
        turn = _turn(messages, role)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block.text("thinking")
    elif kind == "tool_use":
        block.refuse(caller=({"type": "direct"},), toolset_name=())
        arguments = json.dumps(expect(block.get("input"), dict, f"{block.place}.input"), ensure_ascii=False)
        function = {"name": block.text("name"), "arguments": arguments}
        call = {"id": block.text("id"), "type": "function", "function": function}
        _turn(messages, role).setdefault("tool_calls", []).append(call)
    else:
        block.refuse(toolset_name=())
        content = content_of(block.get("content") or "", f"{block.place}.content", ("text",), unknown)
        result = {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}
        if block.get("is_error", bool):
            result |= {"is_error": True, "content": _as_error(content)}
        messages.append(result)


def _as_error(content: Any) -> Any:
    """A result's content that names the error: templates print the content alone."""
    first = content if isinstance(content, str) else content[0]["text"]
    if first.lstrip().lower().startswith("error"):
        return content
    if isinstance(content, str):
        return f"Error: {content}" if content else "Error"
    return [{"type": "text", "text": f"Error: {first}"}, *content[1:]]


def _tools(tools: list[dict[str, Any]], unknown: dict[str, None]) -> list[dict[str, Any]]:
    found = []
    for number, given in enumerate(tools):
        with Fields(given, f"tools[{number}]", unknown) as tool:
            kind = tool.get("type")
            if kind not in (None, "custom"):
                what = f"the type {str(kind)[:MAX_NAME_CHARS]!r} is not supported; allowed is custom"
                raise wrong(tool.place, what)
            tool.refuse(defer_loading=(False,), allowed_callers=_DIRECT, input_examples=([],))
            tool.skip("cache_control", "eager_input_streaming")
            function = {
                "name": tool.text("name"),
                "description": tool.get("description", str),
                "parameters": expect(tool.get("input_schema"), dict, f"{tool.place}.input_schema"),
                "strict": tool.get("strict", bool),
            }
        found.append(as_tool(function))
    return found


def _tool_choice(given: dict[str, Any] | None, unknown: dict[str, None]) -> dict[str, Any]:
    if given is None:
        return {}
    with Fields(given, "tool_choice", unknown) as choice:
        kind = choice.text("type")
        is_single = choice.get("disable_parallel_tool_use", bool)
        names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        if kind == "tool":
            names["tool"] = {"type": "function", "function": {"name": choice.text("name")}}
        if kind not in names:
            raise unsupported("tool_choice.type", (*names, "tool"))
    return {"tool_choice": names[kind], "parallel_tool_calls": False if is_single else None}


def _output(body: MessagesBody, unknown: dict[str, None]) -> dict[str, Any]:
    """The effort, and the format under its newer or older name."""
    with Fields(body.output_config or {}, "output_config", unknown) as output:
        effort, asked = output.get("effort"), output.get("format")
        output.refuse(task_budget=())
    place = "output_config.format"
    if body.output_format is not None:
        if asked is not None:
            raise wrong("output_format", f"is the older name of {place}; send one of them")
        place, asked = "output_format", body.output_format
    if asked is None:
        return {"reasoning_effort": effort}
    with Fields(asked, place, unknown) as form:
        if form.text("type") != "json_schema":
            raise unsupported(f"{place}.type", ("json_schema",))
        schema = expect(form.get("schema"), dict, f"{place}.schema")
    json_schema = {"name": "answer", "schema": schema}
    return {
        "reasoning_effort": effort,
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }


def _thinking(given: dict[str, Any] | None, unknown: dict[str, None]) -> tuple[bool | None, int | None]:
    """The template's `THINKING` (None: the default), and the reasoning's limit."""
    if given is None:
        return None, None
    with Fields(given, "thinking", unknown) as thinking:
        kind, budget = thinking.text("type"), None
        thinking.refuse(display=("summarized",))
        if kind not in (kinds := ("enabled", "adaptive", "disabled")):
            raise unsupported("thinking.type", kinds)
        if kind == "enabled":
            budget = expect(thinking.get("budget_tokens"), int, "thinking.budget_tokens")
            if budget < 1:
                raise wrong("thinking.budget_tokens", f"is {budget}; it must be at least 1")
    return kind != "disabled", budget
