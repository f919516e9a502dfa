# SPDX-License-Identifier: Apache-2.0
"""Text from tokens in a stream: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .text import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
LONG_WINDOW_TOKENS = 32


class IncrementalDetokenizer:
    """push(t1) + push(t2) + ... + flush() == decode([t1, t2, ...]), never splitting a character.

    A token's text can depend on the left neighbour (a leading space, a character across tokens), so a
    window of the last tokens is decoded and the new part returned.  prompt_token_ids: keep the first
    token's leading space, which decoders strip at a text's start.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._special_ids = tokenizer.special_ids
        self._window = [t for t in prompt_token_ids[-CONTEXT_TOKENS:] if t not in self._special_ids]
        self._given = self._decode(self._window)
        if self._given.endswith(REPLACEMENT):
            self._window, self._given = [], ""
        self._num_given = len(self._window)

    def push(self, token_id: int) -> str:
        """The certain text; "" for an incomplete character."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._given) or text.endswith(REPLACEMENT):
            return self._shorten(text) if len(self._window) > LONG_WINDOW_TOKENS else ""
        return self._advance(text, len(self._window))

    def flush(self) -> str:
        """The rest, complete or not."""
        text = self._decode(self._window)
        return self._advance(text, len(self._window)) if len(text) > len(self._given) else ""

    def _advance(self, text: str, end: int) -> str:
        """Return `text`, the first `end` tokens of the window, without earlier returned text."""
        new = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = end - self._num_given
        self._given = self._decode(self._window[: self._num_given])
        return new

    def _shorten(self, text: str) -> str:
        """Return the part of an endless run of invalid bytes that later tokens cannot change.

        If the texts of two halves add up to the text of the whole, no character spans the cut.
        """
        for end in range(len(self._window) - 1, self._num_given, -1):
            head = self._decode(self._window[:end])
            tail = self._decode(self._window[end:])
            if len(head) > len(self._given) and tail and head + tail == text:
                return self._advance(head, end)
        return ""


class StopMatcher:
    """Cuts a stream of text before the stop string completed first.

    A tail that may start a stop string is held back.  The result does not depend on the pieces of the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(released text, True at a stop string; no push may follow)."""
        text = self._held + text
        self._held = ""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text, False

    def flush(self) -> str:
        """The held-back text without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` at the end of `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextDelta(msgspec.Struct, frozen=True):
    """text: released.  num_tokens: pushed tokens up to the end of a stop string (else all).  stopped: a
    stop string was met; abort the request in the engine.
    """

    text: str
    num_tokens: int
    stopped: bool = False


class TextStream:
    """Text of one request: tokens in, text out, ended by stop strings.

    min_tokens: first position of stop strings, as in the engine for stop ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text made certain by these tokens."""
        pieces = map(self._detokenizer.push, token_ids)
        if self._matcher is None:
            return TextDelta("".join(pieces), len(token_ids))
        text = ""
        for used, piece in enumerate(pieces, 1):
            self._num_tokens += 1
            stopped = False
            if self._num_tokens >= self._min_tokens:
                piece, stopped = self._matcher.push(piece)
            text += piece
            if stopped:
                return TextDelta(text, used, stopped=True)
        return TextDelta(text, len(token_ids))

    def flush(self) -> TextDelta:
        """The rest, after the last token."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return TextDelta(rest, 0)
        rest, stopped = self._matcher.push(rest)
        return TextDelta(rest if stopped else rest + self._matcher.flush(), 0, stopped)
