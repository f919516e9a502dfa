# SPDX-License-Identifier: Apache-2.0
"""Text files beside an adapter, compared with the base model's.

An adapter changes no embedding, so a tokenizer with other tokens is never used.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import confined

from .tokenizer_files import (
    ADDED_TOKENS,
    CONFIG,
    OLDER_FORMATS,
    TEXT_FILES,
    TOKENIZER,
    check_text_files,
    read_chat_templates,
    read_json,
    read_special_tokens,
)

if TYPE_CHECKING:
    from .text import Tokenizer

logger = logging.getLogger(__name__)

MAX_DIGITS = 20
NUM_NAMED = 4
"""Tokens named in a message."""
OPTION = "--adapter-chat-template"


@dataclass(frozen=True, kw_only=True)
class AdapterText:
    """Differences between an adapter's text files and the base model's.

    eos_tokens: the adapter's and the base's, if different.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    eos_tokens: tuple[str, str | None] | None
    vocabulary: str | None

    def remark(self, *, used: bool) -> str | None:
        """The differences and the effect in a line; None without a difference.  used: with the option."""
        found = ["a chat template"] if self.templates else []
        if self.eos_tokens is not None:
            own, base = self.eos_tokens
            found.append(f"eos_token {own!r} (the base model's is {base!r})")
        if self.vocabulary is not None:
            named = [f"another tokenizer ({self.vocabulary})", *found]
            return (
                f"its folder has {' and '.join(named)}; all is ignored, and the base model's files are used, "
                "because tokens of another vocabulary have no embedding"
            )
        if not found:
            return None
        effect = f"ignored without {OPTION}, and the base model's files are used"
        return f"its folder has {' and '.join(found)}: {f'used ({OPTION})' if used else effect}"


def read_adapter_text(folder: Path, base: Path, root: str | None = None) -> AdapterText | None:
    """The differences; None without text files.  root: the files must lie there, links followed.

    Raises ConfigError.
    """
    present = [name for name in TEXT_FILES if (folder / name).exists()]
    if not present:
        return None
    for name in present:
        _check_confined(folder / name, root)
    check_text_files(folder)
    config, base_config = read_json(folder / CONFIG), read_json(base / CONFIG)
    templates, special = read_chat_templates(folder, config), read_special_tokens(folder, config)
    own, usual = special.get("eos_token"), read_special_tokens(base, base_config).get("eos_token")
    return AdapterText(
        templates={} if templates == read_chat_templates(base, base_config) else templates,
        special_tokens=special,
        eos_tokens=None if own in (None, usual) else (str(own), usual),
        vocabulary=_vocabulary_difference(folder, base, own),
    )


def text_remark(folder: Path, base: Path, *, used: bool, root: str | None = None) -> str | None:
    """`AdapterText.remark` of a folder, or the error."""
    try:
        text = read_adapter_text(folder, base, root)
    except (ConfigError, OSError) as error:
        return f"its text files can't be read: {error}"
    return None if text is None else text.remark(used=used)


def log_adapter_text(name: str, folder: str, base: str, *, used: bool, root: str | None = None) -> None:
    """Log the remark, if any."""
    if remark := text_remark(Path(folder), Path(base), used=used, root=root):
        logger.warning("adapter %s: %s", name, remark)


@lru_cache(maxsize=256)
def with_adapter_text(
    tokenizer: Tokenizer, folder: str, version: int, root: str | None, name: str = ""
) -> Tokenizer:
    """The tokenizer with the adapter's chat template and end token, if usable.

    version, name: of the adapter; a new version or name is read anew.  Raises ConfigError.
    """
    if tokenizer.folder is None:
        return tokenizer
    text = read_adapter_text(Path(folder), tokenizer.folder, root)
    if text is None or text.remark(used=True) is None or text.vocabulary is not None:
        return tokenizer
    return tokenizer.with_chat(text.special_tokens, text.templates)


def _check_confined(path: Path, root: str | None) -> None:
    for one in (path, *path.glob("*")) if path.is_dir() else (path,):
        if not confined(str(one), root):
            raise ConfigError(f"{path.name} is not in the server's adapter_root")


def _vocabulary_difference(folder: Path, base: Path, eos: str | None) -> str | None:
    for name in OLDER_FORMATS:
        if (folder / name).is_file() and _digest(folder / name) != _digest(base / name):
            return f"another {name}"
    known = _tokens(_digest(base / TOKENIZER), base / TOKENIZER)
    own = known
    if (folder / TOKENIZER).is_file():
        if not (base / TOKENIZER).is_file():
            return f"a {TOKENIZER}, a file that the base model has not"
        own = _tokens(_digest(folder / TOKENIZER), folder / TOKENIZER)
    further = {**_added_tokens(folder), **({} if eos is None else {eos: own.get(eos, -1)})}
    if further.items() <= own.items() and (own is known or own == known):
        return None
    own = {**own, **further}
    more = sorted((token for token in own if token not in known), key=lambda token: own[token])
    if not more:
        return "fewer tokens" if len(own) < len(known) else "other ids for the same tokens"
    shown = ", ".join(map(repr, more[:NUM_NAMED])) + (" …" if len(more) > NUM_NAMED else "")
    return f"{len(more)} more token{'s' * (len(more) > 1)} ({shown})"


def _added_tokens(folder: Path) -> dict[str, int]:
    found = dict(read_json(folder / ADDED_TOKENS))
    given = read_json(folder / CONFIG).get("added_tokens_decoder") or {}
    if not isinstance(given, dict) or not all(one.isdecimal() and len(one) < MAX_DIGITS for one in given):
        raise ConfigError(f"{folder / CONFIG}: added_tokens_decoder must map token ids to tokens")
    for number, entry in given.items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            found[entry["content"]] = int(number)
    if any(type(one) is not int for one in found.values()):
        raise ConfigError(f"{folder / ADDED_TOKENS} must map tokens to token ids")
    return found


NUM_KEPT = 4
_kept: dict[str, dict[str, int]] = {}


def _tokens(digest: str, path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json.  Equal files are read once."""
    if digest not in _kept:
        if len(_kept) >= NUM_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[digest] = _read_tokens(path)
    return _kept[digest]


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def _read_tokens(path: Path) -> dict[str, int]:
    """Without a tokenizer: one of 10 MB stopped all threads for more than a second."""
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Vocabulary)
    except (msgspec.MsgspecError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    given = found.model.vocab
    tokens = given if isinstance(given, dict) else {token: place for place, (token, _) in enumerate(given)}
    return {**tokens, **{one.content: one.id for one in found.added_tokens}}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
