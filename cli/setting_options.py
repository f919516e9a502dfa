"""Options made from settings (`moe_lora.config.settings`): type, range, help and default are stated there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import click

from moe_lora.config.settings import Setting, meanings, settings_of

_SEPARATOR = "__"


class SettingOption(click.Option):
    """The option of a setting; None, or empty, where it is not given.  Its help is made when it is shown."""

    def __init__(self, kind: Any, name: str, one: Setting) -> None:
        rule, attributes = one.rule, {"type": _type(one)}
        if bool in one.kinds:
            attributes = {"is_flag": True, "flag_value": not one.default}
        elif tuple[str, ...] in one.kinds:
            attributes |= {"multiple": True}
        super().__init__([rule.option, name], default=None, metavar=rule.metavar or None, **attributes)
        self._kind, self._setting = kind, one

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        self.help = help_of(self._kind, self._setting)
        return super().get_help_record(ctx)


def help_of(kind: Any, one: Setting) -> str:
    """The first sentence of what a setting means, and what holds without it."""
    text = re.split(r"\.\s+(?=[A-Z])", meanings(kind)[one.name])[0].rstrip(".") + "."
    shown = one.rule.unset or one.default
    return f"{text}  [default: {shown}]" if shown and not isinstance(shown, bool) else text


def _type(one: Setting) -> Any:
    rule = one.rule
    if rule.choices:
        return click.Choice(rule.choices)
    if rule.path == "folder":
        return click.Path(exists=True, file_okay=False)
    if rule.least is not None and rule.most is not None:
        return click.IntRange(int(rule.least), int(rule.most))
    return next((kind for kind in (int, float) if kind in one.kinds), str)


def section_options(**sections: Any) -> Callable[[Any], Any]:
    """A decorator that adds the options of these sections, each a settings class."""
    options = [
        SettingOption(kind, f"{section}{_SEPARATOR}{name}", one)
        for section, kind in sections.items()
        for name, one in settings_of(kind).items()
        if one.rule.option
    ]

    def add(command: click.Command) -> click.Command:
        command.params += options
        return command

    return add


def one_option(kind: Any, name: str, **attributes: Any) -> Callable[[Any], Any]:
    """A decorator that adds the option of one setting to a command that has its own default for it."""
    one = settings_of(kind)[name]
    attributes = {"show_default": True, "default": one.default, "help": help_of(kind, one), **attributes}
    return click.option(one.rule.option, type=_type(one), **attributes)


def sections_of(
    options: dict[str, Any], kinds: dict[str, Any], *, absolute: bool
) -> dict[str, dict[str, Any]]:
    """The options that were given, taken out of `options`, as sections of a cluster file.

    absolute: paths are made so, because those of a file start at its folder.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key in [key for key in options if _SEPARATOR in key]:
        value, (section, name) = options.pop(key), key.split(_SEPARATOR)
        if value is None or value == ():
            continue
        if absolute and settings_of(kinds[section])[name].rule.path:
            value = os.path.abspath(value)
        sections.setdefault(section, {})[name] = value
    return sections
