# SPDX-License-Identifier: Apache-2.0
"""The form of a message's content for a chat template: a text, or a list of parts.

Clients send both forms.  A template for texts prints a list as Python code; a template for parts loses a
text.  Every role is probed with two contents in both forms.  A form is fit if the outputs differ and
show no Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Place = Callable[[Any], list[Message]]
"""A content -> a conversation around it."""
TEXT, PARTS = "text", "parts"
USUAL_ROLES = ("user", "system", "assistant", "tool")
MAX_PROBES = 64
"""Most pairs of a role and variable names with a probe; further content stays as the client sent it."""
_CONTENTS = ("qzxv", "wkjy")
_MARK = "zxkq"
"""A key of a probed part.  A template that prints whole parts shows the key: in JSON between double quotes,
else as Python code."""


class ContentForms:
    """The fit forms by role.  render: messages, variables -> text; ValueError for a failure."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._fit: dict[tuple[str, ...], frozenset[str]] = {}

    def probe_usual_roles(self) -> None:
        for role in USUAL_ROLES:
            self.fit(role, {})

    def fit(self, role: str, variables: Mapping[str, Any]) -> frozenset[str]:
        """The fit forms in messages of this role; empty: unknown.

        variables: of the request; they count if the template fails without variables.
        """
        found = self._kept((role,), {})
        return found if found or not variables else self._kept((role, *sorted(variables)), variables)

    def fitted(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[Message]:
        """The messages, with content in the only fit form."""
        return [self._fitted(message, variables) for message in messages]

    def _fitted(self, message: Message, variables: Mapping[str, Any]) -> Message:
        content, role = message.get("content"), message.get("role")
        if not isinstance(role, str):
            return message
        if isinstance(content, str) and self.fit(role, variables) == {PARTS}:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and self.fit(role, variables) == {TEXT} and all(map(_is_text, content)):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _kept(self, key: tuple[str, ...], variables: Mapping[str, Any]) -> frozenset[str]:
        if key not in self._fit:
            if len(self._fit) >= MAX_PROBES:
                return frozenset()
            self._fit[key] = self._probed(key[0], variables)
        return self._fit[key]

    def _probed(self, role: str, variables: Mapping[str, Any]) -> frozenset[str]:
        other = TEXT if role == "user" or self.fit("user", variables) != {PARTS} else PARTS
        for place in _places(role, _in_form(other, "x")):
            fit = frozenset(form for form in (TEXT, PARTS) if self._reads(place, form, variables))
            if fit:
                return fit
        return frozenset()

    def _reads(self, place: Place, form: str, variables: Mapping[str, Any]) -> bool:
        try:
            first, second = (
                self._render(place(_in_form(form, content)), **variables) for content in _CONTENTS
            )
        except ValueError:
            return False
        return first != second and _MARK not in first.casefold().replace(f'"{_MARK}"', "")


def _in_form(form: str, text: str) -> str | list[dict[str, str]]:
    return text if form == TEXT else [{_MARK: "x", "type": "text", "text": text}]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _places(role: str, other: Any) -> Iterator[Place]:
    user, assistant = {"role": "user", "content": other}, {"role": "assistant", "content": other}
    if role == "user":
        for roles in (("user",), ("user", "assistant", "user"), ("system", "user")):
            yield lambda content, roles=roles: [  # type: ignore[misc]
                {"role": one, "content": content} for one in roles
            ]
        return
    call = {"id": "callid123", "type": "function", "function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "content": other, "tool_calls": [call]}
    answer = {"tool_call_id": "callid123", "name": "f"} if role == "tool" else {}
    openings: list[list[Message]] = [[], [user], [user, assistant], [user, calls]]
    for before in openings if role == "system" else openings[1:] + openings[:1]:
        for after in ([user], []):
            yield lambda content, before=before, after=after: [  # type: ignore[misc]
                *before,
                {"role": role, "content": content, **answer},
                *after,
            ]
