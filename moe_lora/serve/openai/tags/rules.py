# SPDX-License-Identifier: Apache-2.0
"""Lark rules of an answer with tags.

Outside of tags the answer is any text with any but hidden special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_TEXT = "TEXT: /(.|\\n)*/"


class Tag(NamedTuple):
    """content: a rule; None: any text up to the end.  is_open: the answer may end before the end."""

    begin: str
    content: str | None
    end: str
    is_open: bool = False


class TagRules:
    """Rules and their inner grammars.  marks: text -> id of special tokens.

    hidden: marks outside of free text; parsers drop these marks, even inside a trigger.  inner: kind and
    value of inner_0, inner_1, …
    """

    def __init__(self, marks: Mapping[str, int], hidden: Collection[str] = ()) -> None:
        self._marks, self._hidden = marks, frozenset(hidden)
        longest_first = sorted(marks, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if marks else None
        self._rules: list[str] = []
        self.inner: list[tuple[str, Any]] = []
        self.num_entries = 0
        self._names: dict[tuple[str, str], str] = {}

    def lark(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules, _TEXT))

    def rule(self, expression: str, options: str = "", *, kind: str = "rule") -> str:
        """A new rule's name.  kind: the name's prefix; upper case makes a terminal."""
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def within(self, kind: str, value: Any) -> str:
        """An inner grammar, as in `structured_outputs`."""
        key = kind, json.dumps(value)  # the order of an object's keys counts
        if key not in self._names:
            self._names[key] = f"@inner_{len(self.inner)}"
            self.inner.append((kind, value))
        return self._names[key]

    def literal(self, text: str) -> str:
        """This text; special tokens may be spelled."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"(<[{self._marks[part]}]> | {_quoted(part)})" if part in self._marks else _quoted(part)
            for part in parts
            if part
        )

    def free(self, without: Collection[str] = ()) -> str:
        """Any text, without these marks."""
        return f"{self._others(without)} TEXT"

    def until(self, end: str, without: Sequence[str] = ()) -> str:
        """Any text up to and with its first `end`, without these texts.

        Raises ValueError for an end with a mark inside.
        """
        self._check(end, "end")
        text = "TEXT"
        if without:
            inside = "|".join(re.escape(one).replace("/", "\\/") for one in without)
            text = self.rule(f"/(.|\\n)*/ & ~/(.|\\n)*({inside})(.|\\n)*/", kind="WITHOUT")
        reading = [mark for mark in self._marks if any(one in mark for one in (end, *without))]
        others = self._others(reading, text)
        ends = [self.rule(f"{text} {_quoted(end)}", "[lazy]")]
        if end in self._marks:
            ends.append(f"{text} <[{self._marks[end]}]>")
        return f"{others} ({' | '.join(ends)})"

    def opened(self, mark: str) -> str:
        """The mark, perhaps after white space."""
        gap = self.rule("/\\s*/") if mark in self._marks else ""
        spelled = self.rule(f"/\\s*/ {_quoted(mark)}", "[lazy]")
        return f"({gap} <[{self._marks[mark]}]> | {spelled})" if gap else spelled

    def triggered(
        self, tags: Sequence[Tag], triggers: Sequence[str], *, starts: bool = False, once: bool = False
    ) -> str:
        """Text with tags.  starts: begins with a tag.  once: ends after the tag.

        Raises ValueError for a tag without a trigger, and for overlapping triggers.
        """
        self._check_triggers(tags, triggers)
        bodies = [self._body(tag) for tag in tags]
        reading = [(mark, one) for mark in self._marks for one in triggers if one in mark]
        others = self._others([mark for mark, _ in reading])
        whole: list[str] = []
        cut: list[str] = []
        heads = [(one, one, self.rule(f"TEXT {_quoted(one)}", "[lazy]")) for one in triggers]
        heads += [(mark, one, f"TEXT <[{self._marks[mark]}]>") for mark, one in reading]
        for mark, trigger, head in heads:
            shown = mark[mark.index(trigger) :]
            rests = [
                (self.literal(tag.begin[len(shown) :]), body)
                for tag, body in zip(tags, bodies, strict=True)
                if tag.begin.startswith(shown)
            ]
            if rests:
                whole.append(f"{head} ({_options(f'{rest} {body[0]}' for rest, body in rests)})")
            if cuts := [f"{rest} {body[1]}" for rest, body in rests if body[1]]:
                cut.append(f"{head} ({_options(cuts)})")
        call = self.rule(_options(whole))
        last = f"{others} ({_options(['TEXT', *cut])})"
        if once and not starts:
            return f"{others} {call} | {last}"
        if not starts:
            return f"({others} {call})* {last}"
        first = _options(map(self.whole, tags))
        return f"({first})" if once else f"({first}) ({others} {call})* {last}"

    def whole(self, tag: Tag) -> str:
        """The tag, without text before."""
        return f"{self.literal(tag.begin)} {self._body(tag)[0]}"

    def _body(self, tag: Tag) -> tuple[str, str]:
        """The rules after a tag's begin: whole, and without end or ""."""
        if tag.content is None:
            return self.rule(self.until(tag.end)), ""
        return self.rule(f"{tag.content} {self.literal(tag.end)}"), tag.content if tag.is_open else ""

    def _check(self, text: str, name: str) -> None:
        inside = next((mark for mark in self._marks if mark in text and mark != text), None)
        if not text or inside is not None:
            why = "is empty" if not text else f"has text beside the special token {inside!r}"
            raise ValueError(f"the {name} {text[:64]!r} {why}; send other text, or the special token alone")

    def _check_triggers(self, tags: Sequence[Tag], triggers: Sequence[str]) -> None:
        for place, trigger in enumerate(triggers):
            self._check(trigger, "trigger")
            for other in triggers[:place]:
                if trigger in other or other in trigger:
                    raise ValueError(
                        f"the triggers {other[:64]!r} and {trigger[:64]!r} overlap; send one of them"
                    )
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                listed = ", ".join(map(repr, triggers))[:200]
                raise ValueError(
                    f"the tag {tag.begin[:64]!r} begins with no trigger; the triggers are {listed}"
                )

    def _others(self, without: Collection[str], text: str = "TEXT") -> str:
        """Texts ending with a special token, without these marks."""
        excluded = self._hidden.union(without)
        ids = sorted(token for mark, token in self._marks.items() if mark not in excluded)
        return f"({text} <[{','.join(map(str, ids))}]>)*" if ids else ""


def _options(found: Iterable[str]) -> str:
    return " | ".join(found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark has no raw one
