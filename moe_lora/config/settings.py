# SPDX-License-Identifier: Apache-2.0
"""What a setting is: a field of a frozen dataclass that states type, default, range, option and meaning once.

    @dataclass(frozen=True, kw_only=True)
    class EngineConfig(Settings):
        max_loras: int = setting(64, least=1, option="--max-loras")
        \"\"\"Adapters resident on the device at once.  What follows the first sentence is for the docs.\"\"\"

From that come the command's option (`cli.options`), what a section of the cluster file may hold
(`read_section`), the checks when one is made in Python, and the row of a table in the docs (`tables`).
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from moe_lora.core.errors import ConfigError

MAX_COUNT = 2**31 - 1
WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
    tuple[int, ...]: "a list of whole numbers",
    tuple[str, ...]: "a list of texts",
}
"""Types of values as users are told of them."""
_TYPES: dict[Any, Any] = {
    **{int: Integral, float: Real, bool: bool, types.NoneType: types.NoneType, str: (str, os.PathLike)},
    **dict.fromkeys((tuple[int, ...], tuple[str, ...]), (tuple, list)),
}


class Rule:
    """What a setting may be beside its type, and where users find it.

    option: of `moe-lora serve`, with its dashes; "" for a setting of the file alone.  former: another option
    that named the setting once.  words: what a number may be instead.  least, most: bounds
    that are allowed; above: one that is not.  path: "folder" (one that is there, as an option) or "place";
    in a file of settings it starts at that file's folder.  no_path: pattern of values of a path's setting
    that are no paths.  check: called with name and value, raises
    ConfigError.  unset: what holds, in words, where the option is not given, and what None stands for.
    group: heading of the option in --help, if not that of the class.  in_file: whether it may stand in a
    file.  fixed: reason for one value on all servers; code in Python sets another for comparisons and tests,
    and no file does.  policy: the setting and value of the policy that the setting is a parameter of.
    """

    option: str = ""
    former: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    path: str = ""
    no_path: str = ""
    metavar: str = ""
    group: str = ""
    check: Callable[[str, Any], Any] | None = None
    unset: str = ""
    in_file: bool = True
    fixed: str = ""
    policy: str = ""

    def __init__(self, **given: Any) -> None:
        assert set(given) <= set(Rule.__annotations__), given
        vars(self).update(given)
        if self.fixed:
            self.in_file = False

    def placed(self, value: Any, place: Callable[[str], str]) -> Any:
        """The value, or what `place` makes of a path."""
        is_path = self.path and value and isinstance(value, str) and not re.fullmatch(self.no_path, value)
        return place(value) if is_path else value


class Setting(typing.NamedTuple):
    """A field of a settings class with its rule; kinds: the types its values may have."""

    name: str
    kinds: tuple[Any, ...]
    default: Any
    rule: Rule

    def allowed(self) -> str:
        """What a number may be, in words; empty if any."""
        rule = self.rule
        if rule.above is not None:
            return (
                "positive and finite"
                if rule.most is None
                else f"above {rule.above:g} and at most {rule.most:g}"
            )
        if rule.least is None:
            return ""
        return f"{rule.least:g} or more" if rule.most is None else f"between {rule.least:g} and {rule.most:g}"

    def check(self, place: str, value: Any) -> None:
        """Raise ConfigError, naming `place`, for a value that is not allowed."""
        kinds: Any = tuple(_TYPES.get(kind, object) for kind in self.kinds)
        if value is None and types.NoneType in self.kinds:
            return
        if value is None or not isinstance(value, kinds):
            raise self.wrong_kind(place, value)
        rule, allowed = self.rule, self.allowed()
        if rule.words and isinstance(value, str):
            if value not in rule.words:
                raise ConfigError(
                    f"{place}={value!r} must be a number, {allowed}, or {', '.join(rule.words)}"
                )
            return
        if rule.choices and value not in rule.choices:
            raise ConfigError(f"{place}={value!r} is not known; choose one of {', '.join(rule.choices)}")
        if allowed:
            low = value > rule.above if rule.above is not None else value >= rule.least
            if (
                isinstance(value, bool)
                or not (low and math.isfinite(value))
                or (rule.most is not None and value > rule.most)
            ):
                raise ConfigError(f"{place}={value} must be {allowed}")
            if value > MAX_COUNT and (isinstance(value, int) or self.name.endswith("_s")):
                raise ConfigError(f"{place}={value} is too large; choose at most {MAX_COUNT}")
        if rule.check is not None:
            rule.check(place, value)

    def read(self, place: str, value: Any) -> Any:
        """The value as the field's type has it, checked.  Raises ConfigError."""
        for kind in self.kinds:
            found = _as_kind(kind, place, value)
            if found is not MISSING:
                self.check(place, found)
                return found
        raise self.wrong_kind(place, value)

    def wrong_kind(self, place: str, value: Any) -> ConfigError:
        names = " or ".join(WORDS.get(kind, "a mapping of names to values") for kind in self.kinds)
        return ConfigError(f"{place}={value!r} must be {names}")


class Settings:
    """What a dataclass of settings is made from: each value given is checked against its rule."""

    SECTION: ClassVar[str] = ""
    """What stands before a setting's name in errors."""
    GROUP: ClassVar[str] = ""
    """Heading of the options in --help."""
    OPENED_BY: ClassVar[str] = ""
    """The setting without whose option, or a section in the file, the others' options have no meaning."""
    GONE: ClassVar[Mapping[str, str]] = {}
    """Name of a former setting → reason for its end."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for one in settings_of(kind).values():
            value = getattr(self, one.name)
            if isinstance(value, Real) and type(value) not in (bool, int, float):
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, one.name, value)
            one.check(f"{self.SECTION}.{one.name}".lstrip("."), value)


def setting(default: Any = MISSING, **rule: Any) -> Any:
    """A field of a `Settings` class; keywords are those of `Rule`.  Without a default it must be given."""
    return field(default=default, metadata={"rule": Rule(**rule)})


@functools.cache
def settings_of(kind: Any) -> dict[str, Setting]:
    """The settings of a class by name, in the order of their definition."""
    hints = typing.get_type_hints(kind)
    return {
        one.name: Setting(
            name=one.name,
            kinds=typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,),
            default=one.default,
            rule=one.metadata.get("rule", Rule()),
        )
        for one in fields(kind)
        for hint in (hints[one.name],)
    }


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """The string below each field, of a class and those it is made from, on one line."""
    found: dict[str, str] = {}
    for one in reversed([one for one in kind.__mro__ if is_dataclass(one)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                assert isinstance(node.target, ast.Name)
                found[node.target.id] = " ".join(str(text.value.value).split())
    return found


def read_section(kind: Any, section: str, given: Any) -> dict[str, Any]:
    """Keyword arguments of a settings class, from a section of a file.  Raises ConfigError."""
    values, settings = mapping_of(section, given), settings_of(kind)
    check_section(kind, section, values)
    return {name: settings[name].read(f"{section}.{name}", value) for name, value in values.items()}


def check_section(kind: Any, section: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for names that a section of a file can't have."""
    former = former_settings(kind)
    for name in given:
        if name in former:
            raise ConfigError(f"{section}.{name} is no setting any more: {former[name]}")
    check_names(section, given, [name for name, one in settings_of(kind).items() if one.rule.in_file])


def former_settings(kind: Any) -> dict[str, str]:
    """Name → reason, of settings that a section of a file had."""
    fixed = {name: one.rule.fixed for name, one in settings_of(kind).items() if one.rule.fixed}
    return {**getattr(kind, "GONE", {}), **fixed}


def _as_kind(kind: Any, place: str, value: Any) -> Any:
    """The value as that type; MISSING if it is none."""
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        right = isinstance(value, (list, tuple)) and all(type(one) is item for one in value)
        return tuple(value) if right else MISSING
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return kind(**read_section(kind, place, value))
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else MISSING


def mapping_of(section: str, given: Any) -> dict[str, Any]:
    """The section, empty if there is nothing in it.  Raises ConfigError."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{section} must be a mapping of names to values, not {type(given).__name__}")
    return given


def check_names(section: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raises ConfigError for a name that is none of the allowed ones; it names the nearest."""
    allowed = tuple(allowed)
    for name in given:
        if name not in allowed:
            place = f"{section}.{name}".lstrip(".")
            near = difflib.get_close_matches(str(name), allowed, n=1)
            asked = f"did you mean {near[0]}?  " if near else ""
            raise ConfigError(f"{place} is not a setting; {asked}allowed are {', '.join(allowed)}")


def text_of(place: str, value: Any) -> str:
    """A text that is not empty.  Raises ConfigError."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}={value!r} must be a text that is not empty")
    return value
