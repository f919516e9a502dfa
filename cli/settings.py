# SPDX-License-Identifier: Apache-2.0
"""`moe-lora settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from moe_lora.config.cluster import SECTIONS
from moe_lora.config.front_end import FrontEndPlace
from moe_lora.config.settings import MISSING, WORDS, Setting, check_names, meanings, settings_of

from .errors import input_errors
from .options import first_sentence

KINDS: dict[str, Any] = {**SECTIONS, "front_ends": FrontEndPlace}
"""Section of the cluster file → settings class."""


@click.command(context_settings={"max_content_width": 100})
@click.argument("section", required=False)
@input_errors
def settings(section: str | None) -> None:
    """List the settings of SECTION, or those of all sections in short.

    Give a setting as `moe-lora serve --set SECTION.NAME=VALUE`, or in the file of --config.  SECTION may be
    SECTION.NAME too.
    """
    name, _, setting = (section or "").partition(".")
    if section is not None:
        check_names("", {name: None}, KINDS)
    formatter = click.get_current_context().make_formatter()
    for one, kind in KINDS.items():
        if section is None or one == name:
            listed = list(_described(one, kind, in_short=section is None))
            if setting:
                check_names(name, {setting: None}, [place.partition(".")[2] for place, _ in listed])
                listed = [row for row in listed if row[0] == section]
            with formatter.section(one):
                formatter.write_dl(listed)
    click.echo(formatter.getvalue().strip("\n"))


def _described(section: str, kind: type, *, in_short: bool) -> Iterator[tuple[str, str]]:
    """Place and meaning of each setting; in_short: one sentence."""
    for name, values, default, option, meaning in rows(kind):
        also = f"; also {option}" if option else ""
        text = first_sentence(meaning) if in_short else f"{meaning}  [{values}; default: {default}{also}]"
        yield f"{section}.{name}".replace("`", ""), text.replace("`", "")


def rows(kind: Any) -> Iterator[tuple[str, ...]]:
    """Name, values, default, option and meaning of settings, in Markdown."""
    for name, one in settings_of(kind).items():
        if one.rule.in_file:
            option = f"`{one.rule.option}`" if one.rule.option else ""
            yield f"`{name}`", _values(one), default_text(one), option, meanings(kind)[name]


def default_text(one: Setting) -> str:
    """A setting's default in Markdown."""
    if one.default in (None, "", MISSING):
        return one.rule.unset or ("none" if one.default is None else "must be given between hosts")
    shown = str(one.default).lower() if isinstance(one.default, bool) else one.default
    return f"`{shown:g}`" if isinstance(shown, float) else f"`{shown}`"


def _values(one: Setting) -> str:
    """Allowed values, in short."""
    rule = one.rule
    if rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices)
    words = WORDS.get(one.kinds[0], "a mapping").removeprefix("a ")
    low = (
        f" > {rule.above:g}" if rule.above is not None else "" if rule.least is None else f" ≥ {rule.least:g}"
    )
    words += low + "".join(f" or `{word}`" for word in rule.words)
    return words + ("" if rule.most is None else f", ≤ {rule.most:g}")
