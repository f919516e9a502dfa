# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's text files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_lora.core.errors import ConfigError
from moe_lora.core.request import SamplingParams
from moe_lora.core.wrong_files import HEAD_BYTES, content_of
from moe_lora.families.schema.config_json import text_config

if TYPE_CHECKING:
    import tokenizers

CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
TEMPLATE, MORE_TEMPLATES, PROCESSOR_TEMPLATE = (
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_template.json",
)
ADDED_TOKENS = "added_tokens.json"
_BINARY = ("tokenizer.model", "spiece.model")
OLDER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
TEXT_FILES = (
    *(TOKENIZER, CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS),
    *(TEMPLATE, MORE_TEMPLATES, PROCESSOR_TEMPLATE, *OLDER_FORMATS),
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_ERROR_CHARS = 300
logger = logging.getLogger(__name__)

FILE = "generation_config.json"
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that become defaults of requests."""
NEUTRAL: dict[str, Any] = {
    "diversity_penalty": 0,
    "do_sample": True,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "length_penalty": 1,
    "max_length": 20,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "typical_p": 1,
}
"""Values without an effect; of further fields: null, false, 0 and empty values."""
NO_EFFECT = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
"""Fields without an effect on tokens."""


def check_text_files(folder: Path, more: Sequence[str] = ()) -> None:
    """Raises ConfigError for a pointer of Git LFS, a web page or an empty file."""
    paths = [folder / name for name in (*TEXT_FILES, *more)]
    for path in (*paths, *sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja"))):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if path.suffix == ".jinja" and not head.strip():
            continue
        found = content_of(head, is_text=path.name not in _BINARY)
        if found is not None:
            raise ConfigError(f"{path} is {found}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} without the file.  Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text.  config: of tokenizer_config.json.

    Further names end in _token, or are keys of extra_special_tokens, else of model_specific_special_tokens.
    """
    entries = _special_entries(folder, config)
    more = [entries.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    extra = next((one for one in more if isinstance(one, dict)), {})
    entries.update(extra)
    names = [*SPECIAL_TOKENS, *(name for name in entries if name.endswith("_token")), *extra]
    texts = {name: _token_text(entries.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _special_entries(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """special_tokens_map.json comes before the config, except beside "added_tokens_decoder"."""
    legacy = {} if "added_tokens_decoder" in config else read_json(folder / SPECIAL_TOKENS_MAP)
    return {**config, **legacy}


def default_special_tokens(
    folder: Path, config: Mapping[str, Any], templates: Mapping[str, str], backend: tokenizers.Tokenizer
) -> dict[str, str]:
    """Name -> text of templates' special tokens, absent from the files.  Adds the tokens to the backend.

    A default of transformers' class, such as <s> of LlamaTokenizer, counts only if the backend encodes the
    text to the class's id.
    """
    entries = _special_entries(folder, config)
    unnamed = [name for name in SPECIAL_TOKENS if name not in entries]
    used = _used_names(unnamed, templates.values())
    if not used:
        return {}
    from transformers import AutoTokenizer

    try:
        theirs: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        _warn_of_no_default(folder, used, str(error)[:MAX_ERROR_CHARS])
        return {}
    texts = {name: str(text) for name, text in theirs.special_tokens_map.items() if text and name in used}
    found = {
        name: text
        for name, text in texts.items()
        if _adds_special(backend, text, theirs.convert_tokens_to_ids(text))
    }
    if absent := [name for name in texts if name not in found]:
        foreign = ", ".join(texts[name] for name in absent)
        _warn_of_no_default(folder, absent, f"for this vocabulary: {foreign} has another id or none")
    return found


def _adds_special(backend: tokenizers.Tokenizer, text: str, token_id: int) -> bool:
    """Make a text a special token.  True if the text alone has the id."""
    token = backend.get_added_tokens_decoder().get(token_id)
    if backend.token_to_id(text) == token_id and not (token is not None and token.special):
        backend.add_special_tokens([text])
    return backend.encode(text, add_special_tokens=False).ids == [token_id]


def _warn_of_no_default(folder: Path, names: Sequence[str], cause: str) -> None:
    logger.warning(
        "%s names no %s for the chat template, and transformers has no default (%s): empty texts are "
        "used; name the tokens in the file",
        *(folder / CONFIG, " and no ".join(names), cause),
    )


def _used_names(names: Sequence[str], sources: Iterable[str]) -> list[str]:
    """The names that are variables of a template."""
    named = [source for source in sources if any(name in source for name in names)]
    if not named:
        return []
    from .chat_template import undeclared_names

    variables = set().union(*map(undeclared_names, named))
    return [name for name in names if name in variables]


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja source; {} without a template.

    Order: the Jinja files, tokenizer_config.json, chat_template.json (for processors).  Raises ConfigError.
    """
    files = {path.name.removesuffix(".jinja"): path for path in folder.glob(f"{MORE_TEMPLATES}/*.jinja")}
    if (folder / TEMPLATE).is_file():
        files = {"default": folder / TEMPLATE, **files}
    if files:
        return {name: _text(path) for name, path in files.items()}
    for file, entries in ((CONFIG, config), (PROCESSOR_TEMPLATE, read_json(folder / PROCESSOR_TEMPLATE))):
        if (source := entries.get("chat_template")) is not None:
            return _named(source, folder / file)
    return {}


class ChatSettings(NamedTuple):
    """A chat template in place of the folder's, by path or as Jinja; in JSON, variables of all chats."""

    template: str | None = None
    template_kwargs: str | None = None

    def templates(self, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
        """As `read_chat_templates`, with this template.  Raises ConfigError."""
        given = self.template
        if given is None:
            return read_chat_templates(folder, config)
        if "{{" in given or "{%" in given:
            return {"default": given}
        if not Path(given).is_file():
            raise ConfigError(f"chat_template={given[:200]} is neither a file nor Jinja text; give its path")
        return {"default": _text(Path(given))}

    def variables(self) -> dict[str, Any]:
        """Name -> value.  Raises ConfigError for a text other than a JSON object of free names."""
        if self.template_kwargs is None:
            return {}
        from .chat_template import RESERVED

        with suppress(ValueError):
            found = json.loads(self.template_kwargs)
            if isinstance(found, dict) and RESERVED.isdisjoint(found):
                return found
        raise ConfigError(
            f"chat_template_kwargs={self.template_kwargs[:200]} must be a JSON object of variables such as "
            f'{{"enable_thinking": false}}, without {", ".join(sorted(RESERVED))}'
        )


UNCHANGED_CHAT = ChatSettings()


def _named(source: Any, path: Path) -> dict[str, str]:
    """A single source, a list of {"name", "template"}, or an object."""
    if isinstance(source, list):
        try:
            source = {entry["name"]: entry["template"] for entry in source}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f'{path}: chat_template has an entry without "name" and "template"; give both'
            ) from error
    named = source if isinstance(source, dict) else {"default": source}
    for name, text in named.items():
        if not isinstance(name, str) or not isinstance(text, str):
            what = f"the chat template {name!r} is {type(text).__name__}"
            raise ConfigError(f"{path}: {what}; give Jinja text, and a text as its name")
    return named


def read_eos_token_ids(model_dir: str | Path, *, with_generation_config: bool = True) -> tuple[int, ...]:
    """Ids that end a text by generation_config.json and config.json, or text_config.

    Raises ConfigError.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json")[0 if with_generation_config else 1 :]:
        found = read_json(path := Path(model_dir) / name)
        for part in (found, text_config(found)):
            value = part.get("eos_token_id")
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(one) is not int for one in listed):
                what = "must be a token id or a list of token ids; mend the file"
                raise ConfigError(f"{path}: eos_token_id={json.dumps(value)} {what}")
            ids += listed
    return tuple(dict.fromkeys(ids))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as UTF-8 text: {error}") from error


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def read_sampling_defaults(model_dir: str | Path) -> dict[str, int | float]:
    """The `DEFAULTED` fields of generation_config.json.

    Raises ConfigError for a value out of range.
    """
    path = Path(model_dir) / FILE
    entries = read_json(path)
    return {name: _checked(name, entries[name], path) for name in DEFAULTED if entries.get(name) is not None}


def unused_fields(model_dir: str | Path) -> dict[str, Any]:
    """Fields of generation_config.json that change tokens, but not here."""
    return {name: value for name, value in read_json(Path(model_dir) / FILE).items() if _asks(name, value)}


def log_generation_config(model_dir: str | Path) -> None:
    """Log the defaults of requests, and fields without an effect."""
    if defaults := read_sampling_defaults(model_dir):
        logger.info("generation_config.json: where a request is silent, %s", _listed(defaults))
    if unused := unused_fields(model_dir):
        logger.warning("generation_config.json: no effect here: %s", _listed(unused))


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())


def _asks(name: str, value: Any) -> bool:
    if name in DEFAULTED or name in NO_EFFECT:
        return False
    return value not in (None, NEUTRAL[name]) if name in NEUTRAL else bool(value)


def _checked(name: str, value: Any, path: Path) -> int | float:
    advice = "mend the file, or start with --generation-config none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{path}: {name}={value!r} must be a number; {advice}")
    if name == "top_k":
        if isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"{path}: top_k={value!r} must be a whole number; {advice}")
        value = 0 if value == -1 else int(value)
    try:
        SamplingParams(**{name: value})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; {advice}") from error
    return value
