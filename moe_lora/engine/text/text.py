"""Text handling at an engine's front end: tokenizer files, chat templates, streaming text.

Needs the `tokenizers` library only, where the directory has a tokenizer.json; `transformers` (which pulls
in torch and takes seconds) is imported to convert older formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe_lora.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers


# Chat templates as Hugging Face checkpoints bring them: Jinja, rendered in a sandbox.


RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """A template's source with the special tokens (name -> text) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.  variables: further names for the template (enable_thinking ...).

        Raises ValueError if the template refuses the conversation, or a variable has a reserved name.
        """
        from jinja2 import TemplateError

        extra = dict(variables or {})
        reserved = sorted(extra.keys() & (RESERVED | self._special_tokens.keys()))
        if reserved:
            raise ValueError(f"chat_template_kwargs may not set {', '.join(reserved)}; leave them out")
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **extra,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template can't render these messages: {error}") from error


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON without HTML escapes, which templates expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def read_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source from chat_template.jinja, chat_template.json or tokenizer_config.json, in that order."""
    if (path := model_dir / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := model_dir / "chat_template.json").is_file():
        return json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default")
    return source


OLDER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


LONG_TEXT_CHARS = 2000
"""Texts from here on are for a thread of their own, in which other threads go on."""


class Tokenizer:
    """Text to token ids and back, with the model's special tokens and chat template.

    decode: the text of some tokens, without special ones unless told; ids not known give none.  backend: a
    `tokenizers.Tokenizer`.  special_tokens: name -> text ("eos_token": "</s>").  eos_token_ids: tokens that
    end a text by the model's own configuration.  folder: whose files it was read from.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        self.folder = folder
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.decode: Callable[..., str] = backend.decode
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

    def __reduce__(self) -> Any:
        """Another process reads the files again, once, if it is from files."""
        if self.folder is not None:
            return _kept_tokenizer, (self.folder,)
        made = partial(
            Tokenizer,
            special_tokens=self.special_tokens,
            chat_template=None if self._template is None else self._template.source,
            eos_token_ids=self.eos_token_ids,
        )
        return made, (self._backend,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` keeps Python's lock, and so every other thread, for as long as a text takes.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

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
        folder=folder.resolve(),
    )


@lru_cache(maxsize=2)
def _kept_tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder)


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
