# SPDX-License-Identifier: Apache-2.0
"""Options that take several values after one name (`--lora-modules a b c`), and options in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click


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
