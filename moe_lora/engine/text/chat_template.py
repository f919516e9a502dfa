# SPDX-License-Identifier: Apache-2.0
"""Chat templates of Hugging Face checkpoints, rendered by transformers' own function.

A template for parts gets a text as a part, and a template for texts gets parts as lines.  A template without
developers gets their messages as system messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from moe_lora.core.errors import FieldError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
DEFAULT, WITH_TOOLS = "default", "tool_use"
MAX_ERROR_CHARS = 1000
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Parameters of `apply_chat_template`: a template never sees them."""
Place = Callable[[Any], list[Message]]
"""A content -> a conversation around it."""
TEXT, PARTS = "text", "parts"
_LEADING = ("system", "developer")
_FIRST, _SECOND = "developer at the start", "developer behind system"
"""Roles of probes."""
USUAL_ROLES = ("user", "system", "assistant", "tool", "developer")
MAX_PROBES = 64
"""Most kept pairs of a role and variable names; a further pair replaces the oldest of an unusual role."""
MAX_UNUSUAL_ROLES = 4
"""Unusual roles of a chat whose contents get the fit form."""
MAX_PLACES = 2
"""Probed conversations of an unusual role, and of a usual role with a chat's variables."""
_CONTENTS = ("qzxv", "wkjy")
_MARK = "zxkq"
"""A key of a probed part.  A template that prints whole parts shows the key: in JSON between double quotes,
else as Python.
"""


class ContentForms:
    """The forms of content that fit a template, by role.  render: ValueError for a failure."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._fit: dict[tuple[str, ...], frozenset[str]] = {}

    def fit(self, role: str, variables: Mapping[str, Any]) -> frozenset[str]:
        """The forms that fit for this role; empty: unknown.

        variables: used for a usual role, if the template fails without them.
        """
        found = self._kept((role,), {})
        if found or not variables or role not in (*USUAL_ROLES, _FIRST, _SECOND):
            return found
        return self._kept((role, *sorted(variables)), variables)

    def fitted(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[Message]:
        """The messages, with content in the only fit form, and the fit role of developers."""
        named = dict.fromkeys(role for one in messages if isinstance(role := one.get("role"), str))
        unusual = [role for role in named if role not in USUAL_ROLES]
        roles = (*USUAL_ROLES, *unusual[:MAX_UNUSUAL_ROLES])
        if "developer" in named:
            messages = self._started(messages, variables)
        return [self._fitted(one, variables) if one.get("role") in roles else one for one in messages]

    def _started(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Sequence[Message]:
        """Leading developers' messages unread in their place are one system message with the others."""
        num = next((at for at, one in enumerate(messages) if one.get("role") not in _LEADING), len(messages))
        lead = [{**one, "role": "system"} for one in messages[:num]]
        if not any(one.get("role") == "developer" for one in messages[:num]):
            return messages
        if self.fit(_SECOND if num > 1 else _FIRST, variables) or not self._reads_system(variables):
            return messages
        return [*joined_system(lead), *messages[num:]]

    def _reads_system(self, variables: Mapping[str, Any]) -> bool:
        return bool(self.fit("system", {} if self.fit("user", {}) else variables))

    def _fitted(self, message: Message, variables: Mapping[str, Any]) -> Message:
        content, role = message.get("content"), message["role"]
        if role == "developer" and not self.fit(role, variables) and self._reads_system(variables):
            role = "system"
            message = {**message, "role": role}
        if isinstance(content, str) and self.fit(role, variables) == {PARTS}:
            return {**message, "content": [_text_part(content)]}
        if isinstance(content, list) and self.fit(role, variables) == {TEXT} and all(map(_is_text, content)):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _kept(self, key: tuple[str, ...], variables: Mapping[str, Any]) -> frozenset[str]:
        fit = self._fit.get(key)
        if fit is None:
            fit = self._probed(key[0], variables)
            if len(self._fit) >= MAX_PROBES:
                oldest = next(one for one in list(self._fit) if len(one) > 1 or one[0] not in USUAL_ROLES)
                self._fit.pop(oldest, None)
            self._fit[key] = fit
        return fit

    def _probed(self, role: str, variables: Mapping[str, Any]) -> frozenset[str]:
        other = TEXT if role == "user" or self.fit("user", variables) != {PARTS} else PARTS
        is_usual = role in USUAL_ROLES and not variables
        for place in islice(_places(role, _in_form(other, "x")), None if is_usual else MAX_PLACES):
            fit = frozenset(form for form in (TEXT, PARTS) if self._reads(place, form, variables))
            if fit:
                return fit
        return frozenset()

    def _reads(self, place: Place, form: str, variables: Mapping[str, Any]) -> bool:
        try:
            first, second = (self._render(place(_in_form(form, one)), **variables) for one in _CONTENTS)
        except ValueError:
            return False
        return first != second and _MARK not in first.casefold().replace(f'"{_MARK}"', "")


def _in_form(form: str, text: str) -> str | list[dict[str, str]]:
    return text if form == TEXT else [{_MARK: "x", "type": "text", "text": text}]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def joined_system(messages: Sequence[Message]) -> list[Message]:
    """The messages, with leading system messages of text joined."""
    num = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    contents = [one.get("content") for one in messages[:num]]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [_text_part(one)])]
    if num < 2 or not all(map(_is_text, parts)):
        return list(messages)
    text = "\n\n".join(part["text"] for part in parts)
    return [{"role": "system", "content": text}, *messages[num:]]


def _text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _places(role: str, other: Any) -> Iterator[Place]:
    if role in (_FIRST, _SECOND):
        head = [{"role": "system", "content": other}] if role == _SECOND else []
        yield lambda content: [
            *head,
            {"role": "developer", "content": content},
            {"role": "user", "content": other},
        ]
        return
    user, assistant = {"role": "user", "content": other}, {"role": "assistant", "content": other}
    if role == "user":
        for roles in (("user",), ("user", "assistant", "user"), ("system", "user")):
            yield lambda content, roles=roles: [{"role": one, "content": content} for one in roles]  # type: ignore[misc]
        return
    call = {"id": "callid123", "type": "function", "function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "content": other, "tool_calls": [call]}
    message = {"role": role, **({"tool_call_id": "callid123", "name": "f"} if role == "tool" else {})}
    openings: list[list[dict[str, Any]]] = [[], [user], [user, assistant], [user, calls]]
    start = {"system": 0, "tool": 3}.get(role, 1)
    for head in openings[start:] + openings[:start]:
        for tail in ([user], []):
            yield lambda content, head=head, tail=tail: [*head, {**message, "content": content}, *tail]  # type: ignore[misc]


class ChatTemplates:
    """A folder's chat templates by name, and special tokens (name -> text).

    usual: variables of chats that don't set them.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        folder: Path | None = None,
        usual: Mapping[str, Any] | None = None,
    ) -> None:
        self.sources = dict(sources)
        self._usual = usual or {}
        self._folder = folder
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, _Template] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()

    def compile(self) -> None:
        """Compile every template and probe the usual roles; logs broken templates."""
        for name in self.sources:
            with suppress(ValueError):
                self._get(name).forms.fitted([{"role": one, "content": ""} for one in USUAL_ROLES], {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        name: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        name: None: "tool_use" with tools, else "default".  variables: for the template.  Raises ValueError
        with the cause.
        """
        extra = {**self._usual, **(variables or {})}
        if reserved := sorted(extra.keys() & RESERVED):
            what = f"chat_template_kwargs may not set {', '.join(reserved)}; leave them out"
            raise FieldError("chat_template_kwargs", what)
        if continue_final_message and add_generation_prompt:
            raise FieldError(
                "continue_final_message",
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True. "
                "Leave add_generation_prompt out, or send false",
            )
        template = self._get(self._chosen(name, extra.get("tools")))
        return template.render(
            template.forms.fitted(messages, extra),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **extra,
        )

    def source(self, name: str | None, tools: Any = None) -> str:
        """The template's source, chosen as in `render`."""
        return self.sources[self._chosen(name, tools)]

    def reads(self, name: str | None, tools: Any = None) -> frozenset[str]:
        """Variables that the template reads, chosen as in `render`."""
        chosen = self._chosen(name, tools)
        if chosen not in self._names:
            self._names[chosen] = undeclared_names(self.sources[chosen])
        return self._names[chosen]

    def _chosen(self, name: str | None, tools: Any) -> str:
        names = ", ".join(sorted(self.sources))
        if name is not None:
            if name not in self.sources:
                raise FieldError(
                    "chat_template",
                    f"chat_template={name[:100]!r} must be a name of the model's chat templates ({names}); "
                    "leave it out for the default one",
                )
            return name
        if tools is not None and WITH_TOOLS in self.sources:
            return WITH_TOOLS
        if DEFAULT not in self.sources:
            raise ValueError(
                f"the model has several chat templates and no default; choose chat_template from {names}"
            )
        return DEFAULT

    def _get(self, name: str) -> _Template:
        with self._lock:
            template = self._compiled.get(name)
            if template is None:
                template = _Template(self.sources[name], name, self._special_tokens)
                self._compiled[name] = template
                if template.problem is not None:
                    logger.warning(
                        "%s: %s; chats get status 400", self._folder or "the model", template.problem
                    )
        if template.problem is not None:
            raise ValueError(template.problem)
        return template


def undeclared_names(source: str) -> frozenset[str]:
    """Variables of a template without its own value; empty for invalid Jinja."""
    from jinja2.meta import find_undeclared_variables

    try:
        return frozenset(find_undeclared_variables(_compiled(source).environment.parse(source)))
    except Exception:  # `_Template` logs the cause
        return frozenset()


def _compiled(source: str) -> Any:
    from transformers.utils import chat_template_utils

    functions: Any = chat_template_utils
    return functions._compile_jinja_template(source)


class _Template:
    """problem: the compiler's error, or None."""

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        # The import takes a second.
        from transformers.utils import chat_template_utils

        self._title = "the chat template" if name == DEFAULT else f"the chat template {name!r}"
        # Any: versions of transformers differ.
        functions: Any = chat_template_utils
        self._render = partial(functions.render_jinja_template, chat_template=source, **special_tokens)
        self._normalize: Any = getattr(functions, "_normalize_chat_messages", list)
        self.problem = self._problem_of(source)
        self.forms = ContentForms(self.render)

    def _problem_of(self, source: str) -> str | None:
        try:
            _compiled(source)
        except Exception as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f"line {line}: "
            return f"{self._title} is not valid Jinja and can't be used: {where}{error}"
        return None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Raises ValueError for any failure: templates are foreign code."""
        from jinja2 import TemplateError

        try:
            rendered, _ = self._render(conversations=[self._normalize(messages)], **variables)
        except Exception as error:
            what = str(error)[:MAX_ERROR_CHARS]
            if type(error) is TemplateError:
                raise ValueError(f"{self._title} refuses the request: {what}") from error
            raise ValueError(f"{self._title} fails: {type(error).__name__}: {what}") from error
        return rendered[0]
