# SPDX-License-Identifier: Apache-2.0
"""Options of commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import click

from moe_lora.config.settings import MISSING, Setting, meanings, settings_of

FORMATS = ("azure", "burstgpt", "mooncake", "sharegpt", "lmsys", "vllm", "own", "bailian")
"""Keys of `workload.FORMATS`, without its import."""

FORMAT = click.option("--format", type=click.Choice(FORMATS), help="The trace's format.  [default: detected]")
ZIPF = click.option("--zipf", type=float, help="Popularity ~ 1 / place**ZIPF; 0: uniform.  [default: 1.2]")
POPULARITY = click.option(
    "--popularity",
    metavar="NAME|FILE",
    help="Popularity of another shape than --zipf, e.g. uniform, long-tail, loraserve:shifting, "
    "functions:10:TRACE.csv; or counts: CSV adapter,count or JSON.",
)
COMMANDLINE = click.core.ParameterSource.COMMANDLINE
_SEPARATOR = "__"


class VariadicCommand(click.Command):
    """Reads `--name a b c` as `--name a --name b --name c` for the names in `variadic`.

    Declare the options with `multiple=True`.  A list ends at the next word with a dash: put arguments without
    a name first.
    """

    def __init__(
        self, *args: Any, variadic: Sequence[str] = (), headings: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.variadic, self.headings = tuple(variadic), tuple(headings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand(args, self.variadic))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click, under headings, the command's headings first."""
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self.headings}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                heading = getattr(param, "heading", self.headings[-1] if self.headings else "Options")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if not records:
                continue
            with formatter.section(heading):
                formatter.write_dl(records)


class HeadedOption(click.Option):
    """An option under a heading of --help."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click, without ranges; errors state ranges."""
        found = super().get_help_record(ctx)
        return found and (found[0], self.help or "")


def headed(heading: str, *names: str, **attributes: Any) -> Callable[[Any], Any]:
    """`click.option` under the heading."""
    return click.option(*names, cls=HeadedOption, heading=heading, **attributes)


_FOLDER = click.Path(exists=True, file_okay=False)
_MODEL = (
    click.argument("model_dir", type=_FOLDER, required=False),
    headed(
        "Model",
        "--served-model-name",
        metavar="NAME...",
        multiple=True,
        help="Names of the base model in requests.  [default: the folder's]",
    ),
    headed(
        "Adapters",
        "--lora-modules",
        multiple=True,
        metavar="NAME=PATH...",
        help="Serve these PEFT adapters; or JSON as in vLLM.",
    ),
    headed(
        "Adapters",
        "--lora-dir",
        multiple=True,
        type=_FOLDER,
        metavar="FOLDER...",
        help="Serve every PEFT adapter below, by folder name.",
    ),
    headed(
        "Adapters", "--skip-bad-adapters", is_flag=True, help="Start without adapters that can't be served."
    ),
    headed(
        "More", "--config", "config_file", metavar="FILE", help="Read settings from a file; options override."
    ),
    headed(
        "More",
        "--set",
        "further_settings",
        metavar="SECTION.NAME=VALUE",
        multiple=True,
        help="Give any setting of `moe-lora settings`.",
    ),
)


def model_options(command: Any) -> Any:
    """MODEL_DIR and options of model, adapters and settings file."""
    for option in reversed(_MODEL):
        command = option(command)
    return command


def expand(args: Sequence[str], variadic: Sequence[str]) -> list[str]:
    """The arguments, with the name before each value."""
    expanded: list[str] = []
    name: str | None = None
    for word in args:
        if word.startswith("-"):
            name = word if word in variadic else None
        elif name is not None and expanded[-1] != name:
            expanded.append(name)
        expanded.append(word)
    return expanded


def read_files(options: Mapping[str, Any]) -> list[str | None]:
    """Options that may name a file to read."""
    names = ("trace", "functions", "adapter_counts", "prompts", "hardware")
    return [*map(options.get, names), (options["popularity"] or "").rpartition(":")[2]]


def refuse_given(names: Container[str], reason: str) -> None:
    """Raises UsageError for given parameters of these names."""
    context = click.get_current_context()
    here = [one for one in context.command.params if one.name in names]
    given = [one for one in here if context.get_parameter_source(one.name or "") is COMMANDLINE]
    if given:
        shown = " and ".join(one.get_error_hint(context).strip("'[]") for one in given)
        raise click.UsageError(reason.format(shown))


class WholeNumbers(click.ParamType):
    """Whole numbers, separated by commas; sorted, without doubles."""

    name = "n,n,..."

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = sorted({int(word) for word in value.split(",")})
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers, as 8,16,32", param, ctx)
        if numbers[0] < self._least or numbers[-1] > self._most:
            self.fail(f"{value!r} has a number outside {self._least} to {self._most}", param, ctx)
        return tuple(numbers)


class SettingOption(HeadedOption):
    """The option of a setting; default=None: without a default."""

    def __init__(self, kind: Any, name: str, one: Setting, *, default: Any) -> None:
        rule, attributes = one.rule, {"type": _type(one), "metavar": _metavar(one)}
        if default is MISSING:
            attributes, default = {**attributes, "required": True}, None
        if bool in one.kinds:
            attributes = {"is_flag": True, "flag_value": not one.default}
        elif tuple[str, ...] in one.kinds:
            attributes |= {"multiple": True}
        names = [option_of(one), name]
        heading = rule.group or kind.GROUP or "Options"
        super().__init__(names, heading=heading, default=default, **attributes)
        self._kind, self._setting = kind, one

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        self.help = help_of(self._kind, self._setting)
        return super().get_help_record(ctx)


def option_of(one: Setting) -> str:
    """The option of a setting, with dashes."""
    return one.rule.option or "--" + one.name.replace("_", "-")


def _metavar(one: Setting) -> str | None:
    """The value in the help; None for click's."""
    if one.rule.metavar or bool in one.kinds or one.rule.choices:
        return one.rule.metavar or None
    if one.rule.path:
        return "FOLDER" if one.rule.path == "folder" else "FILE"
    return "N" if int in one.kinds else "X" if float in one.kinds else "TEXT"


def help_of(kind: Any, one: Setting) -> str:
    """The setting's first sentence, and its default."""
    text = first_sentence(meanings(kind)[one.name])
    shown = one.rule.unset or one.default
    if shown is MISSING:
        return f"{text}  [required]"
    return text if shown in (None, "", "none", False, True) else f"{text}  [default: {shown}]"


def first_sentence(text: str) -> str:
    return re.split(r"\.\s+", text)[0].rstrip(".") + "."


def _type(one: Setting) -> Any:
    rule = one.rule
    if rule.choices:
        return click.Choice(rule.choices)
    if rule.path == "folder":
        return click.Path(exists=True, file_okay=False)
    if rule.words:
        return _NumberOrWord(one)
    if int in one.kinds:
        least, most = (None if bound is None else int(bound) for bound in (rule.least, rule.most))
        return int if least is None else click.IntRange(least, most)
    return float if float in one.kinds else str


class _NumberOrWord(click.ParamType):
    """A whole number, or one of the setting's words."""

    name = "number"

    def __init__(self, one: Setting) -> None:
        self._setting = one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._setting.rule.words or isinstance(value, int):
            return value
        allowed = f"{self._setting.allowed()}, or {', '.join(self._setting.rule.words)}"
        try:
            number = int(value)
            self._setting.check(self._setting.name, number)
        except ValueError:
            self.fail(f"{value!r} is not a whole number, {allowed}", param, ctx)
        return number


def section_options(**sections: Any) -> Callable[[click.Command], click.Command]:
    """A decorator: adds options of these sections, by default None."""

    def add(command: click.Command) -> click.Command:
        for section, kind in sections.items():
            names = [name for name, one in settings_of(kind).items() if one.rule.option]
            command.params += _options(kind, names, prefix=f"{section}{_SEPARATOR}", defaults=False)
        return command

    return add


def setting_options(kind: Any, *names: str) -> Callable[[click.Command], click.Command]:
    """A decorator: adds options of these settings, or of all."""

    def add(command: click.Command) -> click.Command:
        chosen = names or [name for name, one in settings_of(kind).items() if one.rule.option]
        command.params += _options(kind, chosen, defaults=True)
        return command

    return add


def _options(kind: Any, names: Sequence[str], *, prefix: str = "", defaults: bool) -> list[SettingOption]:
    return [
        SettingOption(kind, prefix + name, one, default=one.default if defaults else None)
        for name, one in settings_of(kind).items()
        if name in names
    ]


def sections_of(
    options: dict[str, Any], kinds: dict[str, Any], *, absolute: bool
) -> dict[str, dict[str, Any]]:
    """The given options, removed from `options`, as sections of a file.

    absolute: makes paths absolute: a file's paths start at its folder.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key in [key for key in options if _SEPARATOR in key]:
        value, (section, name) = options.pop(key), key.split(_SEPARATOR)
        if value is None or value == ():
            continue
        if absolute:
            value = settings_of(kinds[section])[name].rule.placed(value, os.path.abspath)
        sections.setdefault(section, {})[name] = value
    return sections
