# SPDX-License-Identifier: Apache-2.0
"""Kinds of options: several values after one name (`--lora-modules a b c`), groups, whole numbers, loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

FORMATS = ("azure", "burstgpt", "mooncake", "sharegpt", "lmsys", "vllm", "own")
"""Keys of `workload.FORMATS`, which are not imported for a --help."""

FORMAT = click.option("--format", type=click.Choice(FORMATS), help="The trace's format.  [default: detected]")
ZIPF = click.option("--zipf", type=float, help="Popularity ~ 1 / place**ZIPF; 0: uniform.  [default: 1.2]")
POPULARITY = click.option(
    "--popularity",
    metavar="NAME|FILE",
    help="Popularity of another shape than --zipf, e.g. uniform, long-tail, loraserve:shifting, "
    "functions:10:TRACE.csv; or counts: CSV adapter,count or JSON.",
)


class VariadicCommand(click.Command):
    """A command in which `--name a b c` means `--name a --name b --name c` for the names in `variadic`.

    The options themselves are declared with `multiple=True`. Such a list ends at the next word that begins
    with a dash, so arguments without a name go before it.
    """

    def __init__(
        self, *args: Any, variadic: Sequence[str] = (), headings: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.variadic, self.headings = tuple(variadic), tuple(headings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand(args, self.variadic))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click, under the options' headings, those of the command first and in its order."""
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
    """An option that --help lists under a heading."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click, without ranges; an error states the range."""
        found = super().get_help_record(ctx)
        return found and (found[0], self.help or "")


def headed(heading: str, *names: str, **attributes: Any) -> Callable[[Any], Any]:
    """`click.option`, listed under the heading."""
    return click.option(*names, cls=HeadedOption, heading=heading, **attributes)


def expand(args: Sequence[str], variadic: Sequence[str]) -> list[str]:
    """The arguments with the name repeated before each further value."""
    expanded: list[str] = []
    name: str | None = None
    for word in args:
        if word.startswith("-"):
            name = word if word in variadic else None
        elif name is not None and expanded[-1] != name:
            expanded.append(name)
        expanded.append(word)
    return expanded


class WholeNumbers(click.ParamType):
    """Whole numbers between least and most, separated by commas; sorted, each once."""

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
