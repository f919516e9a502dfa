# SPDX-License-Identifier: Apache-2.0
"""The tokenizer at a server's start: names wrong files, and compares its size with the vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path

from moe_lora.core.errors import ConfigError
from moe_lora.core.hf_config import read_config
from moe_lora.core.wrong_files import HEAD_BYTES, content_of

from .text import OLDER_FORMATS, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_BINARY = ("tokenizer.model", "spiece.model")
_TEXTS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja", "chat_template.json", "merges.txt"),
    *(name for name in OLDER_FORMATS if name not in _BINARY),
)


def served_tokenizer(model_dir: str | Path) -> Tokenizer | None:
    """As `load_tokenizer`, with a line in the log if the tokenizer's size is not the model's vocabulary.

    Raises ConfigError, with the kind of the file, also for a file beside the tokenizer that is a pointer of
    Git LFS, a web page or empty.
    """
    folder = Path(model_dir)
    _check_files(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None and (folder / "config.json").is_file():
        _log_vocabulary(tokenizer.vocab_size, read_config(folder).get("vocab_size"))
    return tokenizer


def _check_files(folder: Path) -> None:
    paths = [folder / name for name in (*_TEXTS, *_BINARY)]
    for path in (*paths, *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if path.suffix == ".jinja" and not head.strip():
            continue  # an empty template
        found = content_of(head, is_text=path.name not in _BINARY)
        if found is not None:
            raise ConfigError(f"{path} is {found}")


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
