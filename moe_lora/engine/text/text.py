"""Text handling at an engine's front end: tokenizer files, chat templates, streaming text.

Needs the `tokenizers` library only, where the directory has a tokenizer.json; `transformers` (which pulls
in torch and takes seconds) is imported to convert older formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lora.core.errors import ConfigError

from .chat_template import ChatTemplate, read_chat_template
from .detokenize import IncrementalDetokenizer, StopMatcher, TextDelta, TextStream

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "IncrementalDetokenizer",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "load_tokenizer",
    "read_eos_token_ids",
]

OLDER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, with the model's special tokens and chat template.

    backend: a `tokenizers.Tokenizer`.  special_tokens: name -> text ("eos_token": "</s>").
    eos_token_ids: tokens that end a text by the model's own configuration.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        ids = [*eos_token_ids, *([] if eos_id is None else [eos_id])]
        self.eos_token_ids = tuple(dict.fromkeys(ids))
        self._template = ChatTemplate(chat_template, self.special_tokens) if chat_template else None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; ids that the tokenizer does not know give none."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it; encode it without special tokens.

        Raises ValueError if there is no chat template or it refuses the messages.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; use /v1/completions with a plain prompt")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )


def load_tokenizer(model_dir: str | Path) -> Tokenizer | None:
    """The tokenizer of a model directory; None if it has none (prompts are token ids then).

    Raises ConfigError if there are tokenizer files that can't be read.
    """
    folder = Path(model_dir)
    config = _read_json(folder / "tokenizer_config.json")
    special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    try:
        backend = _load_backend(folder)
    except Exception as error:
        raise ConfigError(f"the tokenizer in {folder} can't be read: {error}") from error
    if backend is None:
        return None
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=read_chat_template(folder, config),
        eos_token_ids=read_eos_token_ids(folder),
    )


def read_eos_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Ids that end a text by generation_config.json and config.json; () if neither names one."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(Path(model_dir) / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _load_backend(folder: Path) -> tokenizers.Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer as Backend

        return Backend.from_file(str(folder / "tokenizer.json"))
    if not any((folder / name).is_file() for name in OLDER_FORMATS):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
