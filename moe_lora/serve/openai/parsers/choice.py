# SPDX-License-Identifier: Apache-2.0
"""A chat's parsers by setting, chat template, or family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_lora.config import AUTO, LimitsConfig
from moe_lora.core.request import ThinkingLimit
from moe_lora.serve.http_errors import ApiError, bad_request

from . import FORCED, TOOL_FORMATS, parser_class
from .thinking import REASONING_FORMATS, Plain, Thinking

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.openai.protocol import ChatRequest

    from .machine import Parser

HARMONY = "harmony"
TAIL_TOKENS = 8
"""Tokens of a prompt's end, for a mark of reasoning."""
_TOOL_SIGNS = {
    "<|channel|>": HARMONY,
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_call|>": "granite",
    "<|tool_call>": "gemma4",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm4",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "tool▁call▁begin": "deepseek_v3",
    "<|tool_call_begin|>": "kimi",
    "<|python_tag|>": "llama3_json",
}
"""Text of a chat template -> format; the first counts."""
_REASONING_SIGNS = {
    "<|channel|>": HARMONY,
    "<|channel>": "gemma4",
    "<seed:think>": "seed_oss",
    "[THINK]": "mistral",
    "<think>": "qwen3",
    "</think>": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class AnswerParsers:
    """The parsers of each choice of a chat.

    tool_format, reasoning: "" for none.  is_open, is_closed: the prompt ends in the reasoning, or after it.
    tools: name -> JSON schema.  parallel: False: only the first call counts.  has_strict: a grammar holds
    chosen calls.
    """

    tool_format: str = ""
    reasoning: str = ""
    is_open: bool = False
    is_closed: bool = False
    tools: Mapping[str, Any] = field(default_factory=dict)
    shows_reasoning: bool = True
    parallel: bool = True
    has_strict: bool = False

    def new(self) -> Parser:
        answer = parser_class(self.tool_format)(self.tools) if self.tool_format else Plain({})
        if not self.reasoning or HARMONY in (self.reasoning, self.tool_format):
            return answer
        return Thinking(REASONING_FORMATS[self.reasoning], answer, is_open=self.is_open)

    def new_id(self, name: str, index: int) -> str:
        return parser_class(self.tool_format).new_id(name, index)

    def marks(self) -> frozenset[str]:
        """Special tokens for the parsers."""
        found: list[str] = []
        if self.tool_format:
            kind = parser_class(self.tool_format)
            found += (*kind.OPEN, *kind.NOISE, *kind.MARKS, kind.CLOSE)
        if self.reasoning and self.reasoning != HARMONY:
            found += REASONING_FORMATS[self.reasoning][:2]
        return frozenset(filter(None, found))


def parsers_for(
    body: ChatRequest, prompt: tuple[int, ...], tokenizer: Tokenizer, config: LimitsConfig, of_family: str
) -> AnswerParsers | None:
    """The parsers of a chat's answer; None: plain.  Raises ApiError.

    of_family: the family's format of calls, or "".
    """
    template = _template_of(body, tokenizer)
    is_joined = body.separate_reasoning is False
    reasoning = "" if is_joined else _reasoning_format(config.reasoning_parser, template)
    shows = body.include_reasoning is not False
    is_forced = bool(body.tools) and body.tool_choice not in (None, "none", "auto")
    tool_format = ""
    if body.tools and body.tool_choice != "none":
        tool_format = _tool_format(config.tool_call_parser, template, of_family, is_forced=is_forced)
    if HARMONY in (reasoning, tool_format):
        reasoning = tool_format = HARMONY
    if not shows and not reasoning and tool_format != FORCED:
        raise bad_request(
            "include_reasoning=false needs a server with a reasoning parser; leave it out, or start the "
            "server with --set front_end.reasoning_parser=auto",
            "include_reasoning",
        )
    if not reasoning and not tool_format:
        return None
    is_strict = any(tool["function"].get("strict") is True for tool in body.tools or ())
    has_strict = bool(tool_format) and not is_forced and is_strict
    if has_strict and not parser_class(tool_format).SHAPES:
        what = f"strict=true is not supported for the calls of {tool_format}; leave strict out"
        raise bad_request(f'{what}, or send tool_choice="required"', "tools")
    return AnswerParsers(
        tool_format=tool_format,
        reasoning=reasoning,
        **begun(reasoning, prompt, tokenizer, body.conversations[0]),
        tools={tool["function"]["name"]: tool["function"].get("parameters") for tool in body.tools or ()},
        shows_reasoning=shows,
        parallel=body.parallel_tool_calls is not False,
        has_strict=has_strict,
    )


def _template_of(body: ChatRequest, tokenizer: Tokenizer) -> str:
    templates = tokenizer.chat_templates
    return "" if templates is None else templates.source(body.chat_template or None, body.tools)


def _tool_format(setting: str, template: str, of_family: str, *, is_forced: bool) -> str:
    """The format of calls, or "".  is_forced: only harmony forces calls itself."""
    found = setting if setting in TOOL_FORMATS else ""
    if setting == AUTO and "tools" in template:
        found = next((name for sign, name in _TOOL_SIGNS.items() if sign in template), of_family)
    if is_forced:
        return HARMONY if found == HARMONY else FORCED
    if found:
        return found
    why = "the server has tool_call_parser=none"
    if setting == AUTO:
        why = "the chat template of this model has no known format of tool calls"
    raise bad_request(
        f"tools is not supported: {why}; leave tools out or send [] or null, or start the server with "
        f"--set front_end.tool_call_parser=NAME ({', '.join(TOOL_FORMATS)})",
        "tools",
    )


def _reasoning_format(setting: str, template: str) -> str:
    if setting != AUTO:
        return "" if setting == "none" else setting
    return next((name for sign, name in _REASONING_SIGNS.items() if sign in template), "")


def begun(reasoning: str, prompt: tuple[int, ...], tokenizer: Tokenizer, chat: ChatRequest) -> dict[str, Any]:
    """State of the reasoning at the prompt's end; marks in earlier messages do not count."""
    if reasoning in ("", HARMONY):
        return {}
    marks, whole = REASONING_FORMATS[reasoning], bool(chat.continue_final_message)
    tail = tokenizer.decode(list(prompt if whole else prompt[-TAIL_TOKENS:]), skip_special_tokens=False)
    ended = str([one.content for one in (chat.messages[:-1] if whole else chat.messages[-1:])])
    if marks.opening in ended or marks.closing in ended:
        tail = _after_ended(chat, tokenizer, tail)
    opened, closed = tail.rfind(marks.opening), tail.rfind(marks.closing)
    is_open = opened > closed or (marks.is_open and closed < 0)
    return {"is_open": is_open, "is_closed": closed >= 0 and not is_open}


def _after_ended(chat: ChatRequest, tokenizer: Tokenizer, unknown: str) -> str:
    """The rendered text after the messages that the answer does not continue.

    unknown: if the template fails for them alone, renders them otherwise, or adds nothing.
    """
    from moe_lora.serve.openai.preparing import rendered

    ended = chat.messages[:-1] if chat.continue_final_message else chat.messages
    fields = {"messages": ended, "add_generation_prompt": False, "continue_final_message": None}
    try:
        text, before = (rendered(one, tokenizer) for one in (chat, chat.model_copy(update=fields)))
    except ApiError:
        return unknown
    return (text[len(before) :] if text.startswith(before) else "") or unknown


def thinking_limit(
    parsers: AnswerParsers | None, num_tokens: int, tokenizer: Tokenizer | None, prompt: Sequence[int]
) -> ThinkingLimit | None:
    """The limit of the reasoning, less the prompt's part; None: the reasoning has ended.

    Raises ApiError.
    """
    parsers = reasoning_parsers(None if tokenizer is None else parsers, "thinking_token_budget")
    assert tokenizer is not None
    if parsers.is_closed:
        return None
    opening = REASONING_FORMATS[parsers.reasoning].opening
    opened = tuple(tokenizer.encode(opening, add_special_tokens=False))
    if parsers.is_open:
        num_tokens = max(0, num_tokens - _tokens_after(tuple(prompt), opened))
        opened = ()
    return ThinkingLimit(num_tokens, opened, closing_ids(parsers, tokenizer))


def _tokens_after(prompt: tuple[int, ...], mark: tuple[int, ...]) -> int:
    """Tokens behind the prompt's last mark; 0 without a mark."""
    ends = range(len(prompt), len(mark) - 1, -1)
    return next((len(prompt) - end for end in ends if prompt[end - len(mark) : end] == mark), 0)


def reasoning_parsers(parsers: AnswerParsers | None, field: str) -> AnswerParsers:
    """The parsers, with marks.  Raises ApiError for this field."""
    if parsers is None or parsers.reasoning in ("", HARMONY):
        raise bad_request(
            f"{field} needs a reasoning parser of marks; leave it out, or start the server with "
            f"--set front_end.reasoning_parser=NAME (auto, {', '.join(REASONING_FORMATS)})",
            field,
        )
    return parsers


def closing_ids(parsers: AnswerParsers, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of the mark after the reasoning."""
    closing = REASONING_FORMATS[parsers.reasoning].closing
    return tuple(tokenizer.encode(closing, add_special_tokens=False))
