# SPDX-License-Identifier: Apache-2.0
"""Translates vLLM's options on `serve`'s command line."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from moe_lora.config.cluster import SECTIONS
from moe_lora.config.settings import former_settings, settings_of

from .options import VariadicCommand, expand
from .vllm_option import ANY, MODEL, VllmOption
from .vllm_options import VLLM_OPTIONS, by_name

_NUMBER = re.compile(r"-\.?\d")
_LEVEL = re.compile(r"-O\d")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_POWERS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SWITCH = {"true": "true", "1": "true", "false": "false", "0": "false"}
SET = "--set"
_NEEDED = {
    "--enable-expert-parallel": ("--tensor-parallel", "--set engine.tensor_parallel"),
    "--enable-auto-tool-choice": ("--tool-call-parser", "--set front_end.tool_call_parser"),
}
"""Flag → option with its value, by our names."""
NOTES = "moe_lora.vllm_notes"
"""Key of log lines in a context's `meta`."""


class Place(NamedTuple):
    """A setting of a section.  reason: of its removal, else empty."""

    section: str
    name: str
    kinds: tuple[Any, ...]
    reason: str = ""

    @property
    def is_list(self) -> bool:
        return any(kind in self.kinds for kind in (tuple[str, ...], tuple[int, ...]))

    def words(self, values: Sequence[str]) -> str:
        """The option --set with these values, quoted."""
        text = values[-1]
        if self.is_list:
            numbers = tuple[int, ...] in self.kinds
            text = f"[{', '.join(values)}]" if numbers else json.dumps(list(values), ensure_ascii=False)
        return f"--set {shlex.quote(f'{self.section}.{self.name}={text}')}"


@functools.cache
def former_options() -> dict[str, list[Place]]:
    """Name with dashes → places of settings without an option, and of former settings."""
    found: dict[str, list[Place]] = {}
    for section, kind in SECTIONS.items():
        for name, one in settings_of(kind).items():
            if one.rule.in_file and not one.rule.option:
                dashed = name.replace("_", "-")
                names = {f"--{dashed}", one.rule.former or f"--{dashed}"}
                for option in names | ({f"--no-{dashed}"} if bool in one.kinds else set()):
                    found.setdefault(option, []).append(Place(section, name, one.kinds))
    for section, kind in SECTIONS.items():
        for name, reason in former_settings(kind).items():
            found.setdefault("--" + name.replace("_", "-"), [Place(section, name, (), reason)])
    return found


def new_place(option: str, values: Sequence[str]) -> str:
    """The current place of an option's setting, with given values."""
    places = former_options()[option]
    if places[0].reason:
        return f"{option} is no setting any more: {places[0].reason}"
    if bool in places[0].kinds:
        values = values or ["false" if option.startswith("--no-") else "true"]
    shown = " or ".join(place.words(values or ["VALUE"]) for place in places)
    return f"{option} is a setting of the file now: {shown}"


def _count(text: str) -> list[str]:
    found = _COUNT.fullmatch(text)
    if found is None:
        return [text]
    number = float(found[1]) * _POWERS[found[2]]
    if number != int(number):
        raise ValueError(f"{text!r} is no whole number; give one such as 8192, 8k or 8K")
    return [str(int(number))]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number") from error


def _origins(text: str) -> list[str]:
    """The text, if a JSON list of texts."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(
            f"{text!r} is not a JSON list of texts; give one such as '[\"https://app.example.com\"]'"
        )
    return [text]


CONVERTERS: dict[str, Callable[[str], list[str]]] = {
    "": lambda text: [text],
    "count": _count,
    "origins": _origins,
    "gib_to_mb": lambda text: [f"{_number(text) * 2**30 / 1e6:.6f}"],
    "bytes_to_gb": lambda text: [f"{_number(_count(text)[0]) / 1e9:.9f}"],
}
"""Convert a value of vLLM's option.  Raise ValueError."""


def _places(name: str) -> list[Place]:
    """Settings of the file under an option's name."""
    return former_options().get(name, []) if name.startswith("--") else []


class VllmWords:
    """A command line with vLLM's options translated to ours.

    Raises UsageError for unsupported values, and for options that are settings of the file.
    """

    def __init__(self, args: Sequence[str], own: Mapping[str, click.Option]) -> None:
        self.words: list[str] = []
        self.notes: list[str] = []
        self._own = own
        self._table = by_name()
        self._given: dict[str, tuple[str, str]] = {}
        """Our option, or --set and place → name as given, and value."""
        self._moved: dict[str, list[str]] = {}
        """Option of a file's setting → values as given."""
        self._found: dict[str, tuple[VllmOption, str, str]] = {}
        """vLLM's option → row, name as given, last value."""
        self._left = [self._spelled(word) for word in args]
        self._model_dir = ""
        while self._left and self._left[0] != "--":
            self._read(self._left.pop(0))
        if self._moved:
            raise click.UsageError("\n".join(new_place(*one) for one in self._moved.items()))
        last = [self._found.pop(name) for name in _NEEDED if name in self._found]
        for option, name, value in (*self._found.values(), *last):
            self._add(option, name, value)
        self.words += self._left

    def _spelled(self, word: str) -> str:
        """The word with dashes in its name."""
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value if name.startswith("--") else word

    def _read(self, word: str) -> None:
        name, equals, value = word.partition("=")
        option, is_off = self._option(name)
        if _LEVEL.fullmatch(word):
            option, equals, value = self._table["-O"], "=", word[2:]
        if option is None and name not in self._own and (places := _places(name)):
            self._moved.setdefault(name, []).extend([value] if equals else self._values_of(places[0]))
        elif option is None:
            self._pass_on(word, name, equals, value)
        elif option.takes == "flag":
            self._read_flag(option, name, equals, value, is_off=is_off)
        elif option.takes == "values":
            values = [value] if equals else self._values(name)
            if option.name == "--api-key" and self._is_model_dir(values):
                self._left.insert(0, values.pop())
            for one in values:
                self._add(option, name, one)
        else:
            self._set(option, name, value if equals else self._value(name))

    def _option(self, name: str) -> tuple[VllmOption | None, bool]:
        """The table's row for a name, and True for an off flag."""
        if name in self._own and name not in self._table:
            return None, False
        positive = self._table.get("--" + name[5:]) if name.startswith("--no-") else None
        if positive is not None and positive.takes == "flag":
            return positive, True
        for known in (name, name.partition(".")[0]):
            if known in self._table:
                return self._table[known], False
        if not name.startswith("--") or len(name) < 4 or _places(name):
            return None, False
        # As in argparse, an unambiguous start is enough.
        starts = [one for one in {*self._table, *self._own} if one.startswith(name)]
        return (self._table.get(starts[0]), False) if len(starts) == 1 else (None, False)

    def _pass_on(self, word: str, name: str, equals: str, value: str) -> None:
        """Copy a word outside the table; `_given` notes single values."""
        self.words.append(word)
        option = self._own.get(name)
        if name == SET and (equals or self._left):
            value = value if equals else self._left.pop(0)
            self.words[-1:] = [SET, value]
            self._note_set(name, value, "")
            return
        if not word.startswith("-"):
            self._model_dir = word
        if option is None or option.is_flag:
            return
        if not equals and self._left:
            value = self._left.pop(0)
            self.words.append(value)
        if not option.multiple:
            self._note_given(name, name, value, "")

    def _read_flag(self, option: VllmOption, name: str, equals: str, value: str, *, is_off: bool) -> None:
        if not equals and self._left and self._is_word(option, self._left[0]):
            value = self._left.pop(0)
        if self._is_word(option, value):
            self._set(option, name, value)
            return
        if not equals and self._left and self._left[0].lower() in ("true", "false"):
            equals, value = "=", self._left.pop(0)
        state = "false" if is_off else "true"
        if equals:
            if is_off or value.lower() not in _SWITCH:
                raise click.UsageError(f"{name}={value}: give {option.name} or --no-{option.name[2:]} alone")
            state = _SWITCH[value.lower()]
        self._set(option, name, state)

    def _is_word(self, option: VllmOption, value: str) -> bool:
        """True for a flag's further value."""
        return value in option.words and value not in _SWITCH

    def _set(self, option: VllmOption, name: str, value: str) -> None:
        self._found.pop(option.name, None)
        self._found[option.name] = (option, name, value)

    def _add_flag(self, option: VllmOption, state: str) -> None:
        shown = option.name if state == "true" else f"--no-{option.name[2:]}"
        if state not in option.words and state in _SWITCH:
            raise click.UsageError(f"{shown} can't be had here: {option.text}")
        tensor = self._needed(shown, _NEEDED.get(shown, ()))
        self._add_words(option, shown, option.words[state].replace("{tensor}", tensor))
        if not option.words[state]:
            self._note(option, shown, "" if state == "true" else shown)

    def _needed(self, name: str, options: Sequence[str]) -> str:
        """A needed option's value, or "1".  Raises UsageError beside a file."""
        values = [self._given[one][1] for one in options if one in self._given]
        if options and not values and "--config" in self._given:
            raise click.UsageError(f"{name} with --config needs {options[0]}; give both, or leave both out")
        return values[-1] if values else "1"

    def _value(self, name: str) -> str:
        if not self._left or (self._left[0].startswith("-") and not _NUMBER.match(self._left[0])):
            raise click.UsageError(f"Option {name!r} requires an argument.")
        return self._left.pop(0)

    def _values(self, name: str) -> list[str]:
        found = [self._value(name)]
        while self._left and not self._left[0].startswith("-"):
            found.append(self._left.pop(0))
        return found

    def _is_model_dir(self, keys: Sequence[str]) -> bool:
        """True if a folder ends a list of keys, and no other word gives a model."""
        given = {*self._found, *(word.partition("=")[0] for word in self._left)}
        return len(keys) > 1 and not self._model_dir and "--model" not in given and os.path.isdir(keys[-1])

    def _values_of(self, place: Place) -> list[str]:
        """The values after a setting's option."""
        if bool in place.kinds or not self._left or self._left[0].startswith("--"):
            return []
        return self._values("") if place.is_list else [self._left.pop(0)]

    def _add(self, option: VllmOption, name: str, value: str) -> None:
        """Add our words for an option and a value ("true" or "false")."""
        if option.takes == "flag":
            self._add_flag(option, value)
            return
        key = value if value in option.words else value.replace(" ", "")
        _, _, model_dir = self._found.get("--model", ("", "", self._model_dir))
        if MODEL in option.words and value == model_dir:
            key = MODEL
        words = option.words.get(key, option.words.get(ANY))
        if words is None:
            allowed = [one for one in option.words if one]
            hint = f"; {' or '.join(allowed)} can be given" if allowed else ""
            raise click.UsageError(f"{name}={value!r} can't be had here{hint}: {option.text}")
        try:
            values = CONVERTERS[option.convert](value)
        except ValueError as error:
            raise click.UsageError(f"{name}: {error}") from error
        for one in values:
            self._add_words(option, name, words, one)
        if not words and not option.own:
            self._note(option, name, f"{name} {value}")

    def _note(self, option: VllmOption, name: str, neutral: str) -> None:
        """Add a line for the log.  neutral: the given neutral words."""
        if option.is_unused or not neutral:
            self.notes.append(f"{name} has no effect here: {option.text}")
        else:
            self.notes.append(f"{neutral} changes nothing here")

    def _add_words(self, option: VllmOption, name: str, words: str, value: str = "") -> None:
        if words == "{}":
            self.words.append(value)
            return
        ours, _, rest = words.partition(" ")
        if not ours:
            return
        filled = rest.replace("{}", value)
        self.words += [ours, filled] if rest else [ours]
        own = self._own.get(ours)
        if ours == SET:
            self._note_set(name, filled, option.text)
        elif own is not None and rest and not own.multiple:
            self._note_given(ours, name, filled, option.text)

    def _note_set(self, name: str, filled: str, way_out: str) -> None:
        """As `_note_given`, for --set."""
        place, _, value = filled.partition("=")
        self._note_given(f"{SET} {place}", name, value, way_out)

    def _note_given(self, ours: str, name: str, value: str, way_out: str) -> None:
        """Raises UsageError for two names with different values."""
        other, before = self._given.setdefault(ours, (name, value))
        if other != name and before != value:
            raise click.UsageError(
                f"{other} {before} and {name} {value} both mean {ours}; give one of them"
                + (f" ({way_out})" if way_out else "")
            )


class VllmCommand(VariadicCommand):
    """A command with vLLM's options beside its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name: one for one in self.params if isinstance(one, click.Option) for name in one.opts}
        found = VllmWords(expand(args, self.variadic), own)
        ctx.meta[NOTES] = list(dict.fromkeys(found.notes))
        return click.Command.parse_args(self, ctx, found.words)


def show_vllm_options(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Print the table and end the command."""
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    formatter.write_text("Options of vLLM, and their effect in moe-lora serve.")
    for heading, options in VLLM_OPTIONS.items():
        with formatter.section(heading):
            formatter.write_dl([(" ".join(one.names), one.here().replace("`", "")) for one in options])
    click.echo(formatter.getvalue().rstrip("\n"))
    ctx.exit()
