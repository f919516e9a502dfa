# SPDX-License-Identifier: Apache-2.0
"""One table of a page: `python -m bench.pages.table NAME` prints the text between the block's comments."""

from __future__ import annotations

from importlib import import_module

import click

from . import TABLES


def table(name: str) -> str:
    """The lines of a block.  Raises KeyError for an unknown name, RecordError for an invalid record."""
    module, function = TABLES[name].split(":")
    return str(getattr(import_module(f"{__package__}.{module}"), function)()).strip("\n")


@click.command()
@click.argument("name", type=click.Choice(sorted(TABLES)))
def main(name: str) -> None:
    """Print a table."""
    click.echo(table(name))


if __name__ == "__main__":
    main()
