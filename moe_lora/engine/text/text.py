# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back.

Formats older than tokenizer.json need transformers' AutoTokenizer, with torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.families.schema.config_json import text_config

from .tokenizer_files import (
    CONFIG,
    OLDER_FORMATS,
    TOKENIZER,
    UNCHANGED_CHAT,
    ChatSettings,
    check_text_files,
    default_special_tokens,
    read_json,
    read_special_tokens,
)

if TYPE_CHECKING:
    import tokenizers

    from moe_lora.config import EngineConfig
    from moe_lora.core.request import ModelInfo, SamplingParams

    from .chat_template import ChatTemplates

LONG_TEXT_CHARS = 2000
"""Longer texts go to a separate thread."""
logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
LONG_WINDOW_TOKENS = 32
MOST_CUTS = 8
_PLAIN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_BYTES = {chr(one): one for one in _PLAIN}
_BYTES |= {chr(256 + place): one for place, one in enumerate(one for one in range(256) if one not in _PLAIN)}
"""Characters of byte-level vocabularies -> bytes, as in GPT-2."""


class Tokenizer:
    """Text to token ids and back, with special tokens and chat templates.

    decode: by default without special tokens; unknown ids give no text.  special_tokens: name -> text
    ("eos_token": "</s>").
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        folder: Path | None = None,
        chat: ChatSettings = UNCHANGED_CHAT,
    ) -> None:
        self.folder, self.chat = folder, chat
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.decode: Callable[..., str] = backend.decode
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids = () if eos_id is None else (eos_id,)
        sources = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self.chat_templates: ChatTemplates | None = None
        if sources:
            from .chat_template import ChatTemplates

            self.chat_templates = ChatTemplates(sources, self.special_tokens, folder, chat.variables())

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __reduce__(self) -> Any:
        """Another process reads the files again, once."""
        if self.folder is not None:
            return _kept_tokenizer, (self.folder, self.chat)
        made = partial(
            Tokenizer,
            chat=self.chat,
            special_tokens=self.special_tokens,
            chat_template=None if self.chat_templates is None else self.chat_templates.sources,
        )
        return made, (self.backend,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT_CHARS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` keeps Python's lock for the whole text.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """Tokens before another token, and the length of their text."""
        ids = self.encode("a", add_special_tokens=False)
        return ids, len(self.decode(ids, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """The token's text behind other text: decoders strip a leading space at a text's start."""
        ids, num_chars = self._anchor
        return self.decode([*ids, token_id], skip_special_tokens=False)[num_chars:]

    def part_bytes(self, token_id: int) -> bytes:
        """The bytes of a token with a part of a character, by its name in the vocabulary."""
        name = self.backend.id_to_token(token_id) or ""
        if name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:-1])
        if _BYTES.keys() >= {*name}:
            return bytes(map(_BYTES.__getitem__, name))
        return REPLACEMENT.encode()

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, also after a space if the first token then differs (as in vLLM)."""
        found = []
        for word in words:
            alone, spaced = (
                tuple(self.encode(start + word.lstrip(), add_special_tokens=False)) for start in ("", " ")
            )
            found.append(alone)
            if len(alone) == len(spaced) and alone[:1] != spaced[:1]:
                found.append(spaced)
        return tuple(filter(None, found))

    def with_chat(self, special_tokens: Mapping[str, str], templates: Mapping[str, str]) -> Tokenizer:
        """The same vocabulary with other special tokens and, unless empty, chat templates."""
        kept = {} if self.chat_templates is None else self.chat_templates.sources
        return Tokenizer(
            self.backend,
            special_tokens={**self.special_tokens, **special_tokens},
            chat_template=templates or kept,
            chat=self.chat,
        )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The conversation in the model's chat format; encode without special tokens.

        Raises ValueError.
        """
        if self.chat_templates is None:
            raise ValueError(
                "the base model has no chat template; use /v1/completions with a plain prompt, or start the "
                "server with --adapter-chat-template for adapters that bring a chat template"
            )
        return self.chat_templates.render(messages, **options)


def with_end_tokens(sampling: SamplingParams, tokenizer: Tokenizer | None, info: ModelInfo) -> SamplingParams:
    """The parameters with the tokenizer's end tokens, unless ignored."""
    if tokenizer is None or sampling.ignore_eos:
        return sampling
    known = {*info.eos_token_ids, *sampling.stop_token_ids}
    more = tuple(i for i in tokenizer.eos_token_ids if i not in known and i < info.vocab_size)
    return replace(sampling, stop_token_ids=sampling.stop_token_ids + more) if more else sampling


def load_tokenizer(model_dir: str | Path, chat: ChatSettings = UNCHANGED_CHAT) -> Tokenizer | None:
    """The tokenizer of a model directory; None without tokenizer files.

    Raises ConfigError for unreadable files.
    """
    folder = Path(model_dir)
    config = read_json(folder / CONFIG)
    templates, special = chat.templates(folder, config), read_special_tokens(folder, config)
    try:
        backend = _load_backend(folder)
    except Exception as error:
        raise ConfigError(f"the tokenizer in {folder} can't be read: {error}") from error
    if backend is None:
        return None
    return Tokenizer(
        backend,
        special_tokens={**default_special_tokens(folder, config, templates, backend), **special},
        chat_template=templates,
        folder=folder.resolve(),
        chat=chat,
    )


@lru_cache(maxsize=2)
def _kept_tokenizer(folder: Path, chat: ChatSettings) -> Tokenizer | None:
    return load_tokenizer(folder, chat)


def _load_backend(folder: Path) -> tokenizers.Tokenizer | None:
    if (folder / TOKENIZER).is_file():
        from tokenizers import Tokenizer as Backend

        return Backend.from_file(str(folder / TOKENIZER))
    if not any((folder / name).is_file() for name in OLDER_FORMATS):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer


def served_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """As `load_tokenizer`; logs a size other than the model's vocabulary.

    Raises ConfigError also for a wrong kind of file beside the tokenizer (`check_text_files`).
    """
    folder = Path(config.model_dir)
    check_text_files(folder, ("generation_config.json", "merges.txt"))
    tokenizer = load_tokenizer(folder, ChatSettings(config.chat_template, config.chat_template_kwargs))
    if tokenizer is not None and (folder / "config.json").is_file():
        _log_vocabulary(tokenizer.vocab_size, text_config(read_config(folder)).get("vocab_size"))
    return tokenizer


def _log_vocabulary(num_tokens: int, vocab_size: object) -> None:
    if not isinstance(vocab_size, int) or num_tokens == vocab_size:
        return
    if num_tokens < vocab_size:
        logger.info(
            "the tokenizer has %d tokens, the model's vocabulary %d: ids from %d on have no text and leave "
            "none in an answer; that is usual for a padded vocabulary",
            *(num_tokens, vocab_size, num_tokens),
        )
        return
    logger.warning(
        "the tokenizer has %d tokens, more than the model's vocabulary of %d: prompts with ids from %d on "
        "are refused; give the tokenizer of this model",
        *(num_tokens, vocab_size, vocab_size),
    )


class IncrementalDetokenizer:
    """push(t1) + push(t2) + ... + flush() == decode([t1, t2, ...]), never splitting a character.

    With byte fallback, complete characters before an incomplete one stay.

    A token's text can depend on the left neighbour, so a window of the last tokens is decoded.
    prompt_token_ids: keep the first token's leading space, which decoders strip at a text's start.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._special_ids = tokenizer.special_ids
        self._window = [t for t in prompt_token_ids[-CONTEXT_TOKENS:] if t not in self._special_ids]
        while (given := self._decode(self._window)).endswith(REPLACEMENT):
            del self._window[0]  # it may be inside a character
        self._given = given
        self._num_given = len(self._window)

    def push(self, token_id: int) -> str:
        """The certain text; "" for an incomplete character."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._given) or text.endswith(REPLACEMENT):
            if len(self._window) <= LONG_WINDOW_TOKENS:
                return ""
            if self._decode([token_id]):
                return self._shorten(text)
            self._window.pop()  # an id without a text of its own
            return ""
        return self._advance(text, len(self._window))

    def flush(self) -> str:
        """The rest, complete or not."""
        text = self._decode(self._window)
        return self._advance(text, len(self._window)) if len(text) > len(self._given) else ""

    def _advance(self, text: str, end: int) -> str:
        """Return the new part of `text`, the window's first `end` tokens."""
        new = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = end - self._num_given
        self._given = self._decode(self._window[: self._num_given])
        return new

    def _shorten(self, text: str) -> str:
        """The part of a run of invalid bytes that later tokens cannot change.

        If the texts of two halves add up to the whole, no character spans the cut.
        """
        last = len(self._window) - 1
        for end in range(last, max(self._num_given, last - MOST_CUTS), -1):
            head = self._decode(self._window[:end])
            tail = self._decode(self._window[end:])
            if len(head) > len(self._given) and tail and head + tail == text:
                return self._advance(head, end)
        return ""


class StopMatcher:
    """Cuts a stream of text before the stop string completed first.

    A tail that may start a stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str, *, searches: bool = True) -> tuple[str, str | None]:
        """(released text, the stop string at its end or None; no push may follow).

        searches: False passes over stop strings that end in this text.
        """
        first = len(self._held) + 1  # least end of a stop string
        text = self._held + text
        self._held = ""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if searches and (at := text.find(stop, max(0, first - len(stop)))) >= 0
        ]
        if found:
            _, at, stop = min(found)
            return text[:at], stop
        # Places that begin no stop string are released: each is tried once, beside the held one.
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop):
                text, self._held = text[:start], tail
                break
        return text, None

    def flush(self) -> str:
        """The held-back text without a stop string."""
        held, self._held = self._held, ""
        return held


class TextDelta(msgspec.Struct, frozen=True):
    """num_tokens: pushed, up to the end of a stop string.  stop: abort the request."""

    text: str
    num_tokens: int
    stop: str | None = None


class TextStream:
    """Text of one request, ended by stop strings.

    min_tokens: first position of a stop string's end, as for stop ids.
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
            piece, stop = self._matcher.push(piece, searches=self._num_tokens >= self._min_tokens)
            text += piece
            if stop is not None:
                return TextDelta(text, used, stop)
        return TextDelta(text, len(token_ids))

    def flush(self) -> TextDelta:
        """The rest, after the last token."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return TextDelta(rest, 0)
        rest, stop = self._matcher.push(rest)
        return TextDelta(rest + self._matcher.flush() if stop is None else rest, 0, stop)
