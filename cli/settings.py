# SPDX-License-Identifier: Apache-2.0
"""`moe-lora settings`: each setting of `moe-lora serve`, with values, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator

import click

from .errors import input_errors


@click.command(context_settings={"max_content_width": 100})
@click.argument("section", required=False)
@input_errors
def settings(section: str | None) -> None:
    """List the settings of SECTION, or those of all sections in short.

    Give a setting as `moe-lora serve --set SECTION.NAME=VALUE`, or in the file of --config.  SECTION may be
    SECTION.NAME too.
    """
    from moe_lora.config.settings import check_names
    from moe_lora.config.tables import KINDS

    name, _, setting = (section or "").partition(".")
    if section is not None:
        check_names("", {name: None}, KINDS)
    formatter = click.get_current_context().make_formatter()
    for one, kind in KINDS.items():
        if section is None or one == name:
            rows = list(_rows(one, kind, in_short=section is None))
            if setting:
                check_names(name, {setting: None}, [place.partition(".")[2] for place, _ in rows])
                rows = [row for row in rows if row[0] == section]
            with formatter.section(one):
                formatter.write_dl(rows)
    click.echo(formatter.getvalue().strip("\n"))


def _rows(section: str, kind: type, *, in_short: bool) -> Iterator[tuple[str, str]]:
    """Place and meaning of each setting.  in_short: the meaning's first sentence."""
    from moe_lora.config.tables import rows

    from .options import first_sentence

    for name, values, default, option, meaning in rows(kind):
        also = f"; also {option}" if option else ""
        text = first_sentence(meaning) if in_short else f"{meaning}  [{values}; default: {default}{also}]"
        yield f"{section}.{name}".replace("`", ""), text.replace("`", "")
