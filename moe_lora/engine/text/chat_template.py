"""Chat templates as Hugging Face checkpoints bring them: Jinja, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """A template's source with the special tokens (name -> text) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
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
        return environment.from_string(self._source)

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
