# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/responses as chats."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, ClassVar

from moe_lora.engine.text.chat_template import joined_system
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai.converted import (
    ConvertedBody,
    ConvertedChat,
    Fields,
    as_tool,
    content_of,
    expect,
    unsupported,
    wrong,
)
from moe_lora.serve.openai.fields import MAX_NAME_CHARS
from moe_lora.serve.openai.protocol import Listed, Text

if TYPE_CHECKING:
    from typing_extensions import Self

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text")
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "prompt": "input",
}
SHOWN = (
    *("background", "enable_response_messages", "include", "instructions", "max_output_tokens", "metadata"),
    *("parallel_tool_calls", "previous_response_id", "reasoning", "store", "text", "tool_choice", "tools"),
    "top_logprobs",
)
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_ID_CHARS, ID_PREFIX = 128, "resp_"


class ResponsesBody(ConvertedBody):
    """POST /v1/responses."""

    CHAT_NAMES = CHAT_NAMES
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None,),
        "truncation": (None, "disabled"),
    }

    input: Any = None
    background: bool | None = None
    enable_response_messages: bool | None = None
    include: Listed[str] | None = None
    instructions: Text | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = None
    tools: Listed[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    stop: Any = None


class PreviousNeeded(ApiError):
    """The body continues the response `message`."""


class ResponsesChat(ConvertedChat):
    """The chat of a response.  `shown["input"]`: its messages as JSON, for the store; or None."""

    NAMES = CHAT_NAMES

    @classmethod
    def converted(cls, data: Any) -> Self:
        return cls.after(data, None)

    @classmethod
    def after(cls, data: Any, previous: list[dict[str, Any]] | None) -> Self:
        """previous: messages of the continued response.  Raises FieldError, PreviousNeeded."""
        body = ResponsesBody.model_validate(data)
        if body.previous_response_id is not None and previous is None:
            if len(body.previous_response_id) > MAX_ID_CHARS:
                raise wrong("previous_response_id", f"must have at most {MAX_ID_CHARS} characters")
            if not body.previous_response_id.startswith(ID_PREFIX):
                raise wrong("previous_response_id", f"must begin with {ID_PREFIX}; send a response's id")
            raise PreviousNeeded(404, body.previous_response_id, "previous_response_id")
        unknown: dict[str, None] = {}
        if body.input is None:
            raise wrong("input", "must be a text or a list of items; send one of these")
        messages = [*(previous or ()), *messages_of(body.input, unknown)]
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        _check_metadata(body.metadata)
        _check_background(body)
        with Fields(body.stream_options or {}, "stream_options", unknown) as options:
            options.refuse(include_obfuscation=(False,))
        chat = {
            **body.shared(),
            **_reasoning(body.reasoning, unknown),
            **_logprobs(body),
            "messages": joined_system([*system, *messages]),
            "max_tokens": body.max_output_tokens,
            "stop": body.stop,
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _response_format(body.text, unknown),
            "tools": None if not body.tools else _tools(body.tools, unknown),
            "tool_choice": _tool_choice(body.tool_choice),
        }
        shown = {name: getattr(body, name) for name in SHOWN}
        shown["input"] = None if body.store is False else json.dumps(messages).encode()
        return cls.from_chat(chat, [*body.unknown_fields(), *unknown], shown)


class ContinuedChat(ResponsesChat):
    """The chat of a continued response: {"previous": […], "body": {…}}."""

    @classmethod
    def converted(cls, data: Any) -> Self:
        return cls.after(data["body"], data["previous"])


def messages_of(items: Any, unknown: dict[str, None]) -> list[dict[str, Any]]:
    """Messages from a text or items; items of one turn are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": expect(items, str, "input")}]
    messages: list[dict[str, Any]] = []
    for number, given in enumerate(expect(items, list, "input")):
        with Fields(given, f"input[{number}]", unknown) as item:
            kind = item.get("type") or "message"
            item.skip("id", "status")
            if kind == "message":
                _add_message(messages, item, unknown)
            elif kind == "reasoning":
                _turn(messages, "reasoning_content")["reasoning_content"] = _reasoning_text(item, unknown)
            elif kind == "function_call":
                function = {"name": item.text("name"), "arguments": item.text("arguments")}
                call = {"id": item.text("call_id"), "type": "function", "function": function}
                item.refuse(namespace=(), caller=({"type": "direct"},))
                _turn(messages).setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                output = content_of(item.get("output"), f"{item.place}.output", PARTS, unknown)
                messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": output})
            else:
                allowed = "message, reasoning, function_call, function_call_output"
                what = f"the type {str(kind)[:MAX_NAME_CHARS]!r} is not supported; allowed are {allowed}"
                raise wrong(item.place, what)
    return messages


def _add_message(messages: list[dict[str, Any]], item: Fields, unknown: dict[str, None]) -> None:
    role = item.text("role")
    if role not in ROLES:
        what = f"the role {role[:MAX_NAME_CHARS]!r} is not supported; allowed are {', '.join(ROLES)}"
        raise wrong(item.place, what)
    item.skip("phase")
    content = content_of(item.get("content"), f"{item.place}.content", PARTS, unknown)
    if role == "assistant":
        _turn(messages, "content")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _turn(messages: list[dict[str, Any]], new: str | None = None) -> dict[str, Any]:
    """The final assistant message.  new: a field that the message must lack."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or new in last or (new == "reasoning_content" and len(last) > 1):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning_text(item: Fields, unknown: dict[str, None]) -> str:
    for number, summary in enumerate(item.get("summary", list) or ()):
        with Fields(summary, f"{item.place}.summary[{number}]", unknown) as part:
            part.skip("type", "text")
    content, encrypted = item.get("content"), item.get("encrypted_content", str)
    if content is None and encrypted:
        try:
            return base64.b64decode(encrypted, validate=True).decode()
        except ValueError:
            what = "is not of this server; send the reasoning's content, or leave the item out"
            raise wrong(f"{item.place}.encrypted_content", what) from None
    found = content_of(content or "", f"{item.place}.content", ("reasoning_text", "text"), unknown)
    return found if isinstance(found, str) else "\n".join(part["text"] for part in found)


def encrypted(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: base64, without encryption."""
    return base64.b64encode(reasoning.encode()).decode()


def _tools(tools: list[dict[str, Any]], unknown: dict[str, None]) -> list[dict[str, Any]]:
    found = []
    for number, given in enumerate(tools):
        with Fields(given, f"tools[{number}]", unknown) as tool:
            kind = tool.text("type")
            if kind != "function":
                what = f"the type {kind[:MAX_NAME_CHARS]!r} is not supported; allowed is function"
                raise wrong(tool.place, what)
            tool.refuse(defer_loading=(False,), allowed_callers=(["direct"],))
            function = {
                "name": tool.text("name"),
                "description": tool.get("description", str),
                "parameters": tool.get("parameters", dict),
                "strict": tool.get("strict", bool),
            }
        found.append(as_tool(function))
    return found


def _tool_choice(given: Any) -> Any:
    if given in (None, "none", "auto", "required"):
        return given
    if isinstance(given, dict) and given.keys() == {"type", "name"} and given["type"] == "function":
        return {"type": "function", "function": {"name": expect(given["name"], str, "tool_choice.name")}}
    raise wrong(
        "tool_choice",
        'allowed are none, auto, required, or {"type": "function", "name": …}; send one of these',
    )


def _reasoning(given: dict[str, Any] | None, unknown: dict[str, None]) -> dict[str, Any]:
    with Fields(given or {}, "reasoning", unknown) as reasoning:
        reasoning.refuse(summary=("auto",), generate_summary=("auto",), context=("auto",), mode=())
        return {"reasoning_effort": reasoning.get("effort")}


def _logprobs(body: ResponsesBody) -> dict[str, Any]:
    for name in body.include or ():
        if name not in (ENCRYPTED, LOGPROBS):
            what = f"{name[:MAX_NAME_CHARS]!r} is not supported; allowed are {ENCRYPTED} and {LOGPROBS}"
            raise wrong("include", what)
    if LOGPROBS not in (body.include or ()) and not body.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs}


def _response_format(given: dict[str, Any] | None, unknown: dict[str, None]) -> dict[str, Any] | None:
    with Fields(given or {}, "text", unknown) as text:
        text.refuse(verbosity=("medium",))
        asked = text.get("format")
    if asked is None:
        return None
    with Fields(asked, "text.format", unknown) as form:
        kind = form.text("type")
        if kind in ("text", "json_object"):
            return {"type": kind}
        if kind != "json_schema":
            raise unsupported("text.format.type", ("text", "json_object", "json_schema"))
        schema = {"name": form.text("name"), "schema": expect(form.get("schema"), dict, "text.format.schema")}
        form.skip("description", "strict")
        return {"type": "json_schema", "json_schema": schema}


def _check_background(body: ResponsesBody) -> None:
    is_streamed = bool(body.shared().get("stream"))
    if body.background and body.store is False:
        raise wrong("background", "background can only be used when `store` is true; leave store out")
    if body.background and is_streamed:
        raise wrong("background", "a response in the background has no stream; leave stream out")
    if body.enable_response_messages and (body.background or is_streamed):
        what = "needs a whole answer; leave background and stream out"
        raise wrong("enable_response_messages", what)


def _check_metadata(given: dict[str, Any] | None) -> None:
    if given is None:
        return
    if len(given) > MAX_METADATA:
        raise wrong("metadata", f"has {len(given)} entries; send at most {MAX_METADATA}")
    for name, value in given.items():
        is_text = isinstance(value, str) and len(value) <= MAX_VALUE_CHARS
        if len(name) > MAX_KEY_CHARS or not is_text:
            what = (
                f"keys have at most {MAX_KEY_CHARS} characters, values are texts of at most {MAX_VALUE_CHARS}"
            )
            raise wrong("metadata", what)
