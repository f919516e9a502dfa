# SPDX-License-Identifier: Apache-2.0
"""`moe-lora keys`."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from .adapters import print_table
from .errors import user_errors
from .options import refuse_given

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group()
def keys() -> None:
    """Keep the file of API keys that `moe-lora serve --api-keys` reads (docs/guides/tenants.md).

    Servers look at it once a second: a key works, or no longer does, without a restart.
    """


@keys.command()
@_FILE
@click.option("--tenant", required=True, metavar="NAME", help="Tenant of requests with the key.")
@click.option(
    "--adapters",
    multiple=True,
    metavar="PATTERN",
    help="Allowed adapters, a name or a pattern (acme-*); may be given several times.  "
    "[default: the base model only]",
)
@click.option("--admin", is_flag=True, help="Allow everything: all adapters, loads, unloads, status.")
@click.option("--requests-per-minute", type=float, metavar="N", help="[default: any number]")
@click.option(
    "--tokens-per-minute", type=float, metavar="N", help="Tokens of prompts and answers.  [default: any]"
)
@click.option(
    "--share",
    type=click.FloatRange(1e-3, 1e3),
    default=1.0,
    help="Weight of the tenant among competing tenants.",
)
@user_errors
def add(file: Path, **rights: Any) -> None:
    """Make a key, write its digest into FILE, and print it: this once, it can't be found out again."""
    from moe_lora.serve.api_keys import ApiKey, add_key

    if rights["admin"]:
        refuse_given(("adapters",), "--admin allows all adapters; leave {} out, or --admin")
    click.echo(add_key(file, ApiKey(id="new", digest="", **rights)))


@keys.command(name="list")
@_FILE
@user_errors
def list_keys(file: Path) -> None:
    """Table of the keys in FILE, by the part that may be shown."""
    from moe_lora.serve.api_keys import read_keys

    heads, rows = ("id", "tenant", "may use", "requests/min", "tokens/min", "share", "made"), []
    for key in read_keys(file):
        rates = [
            "-" if rate is None else f"{rate:g}" for rate in (key.requests_per_minute, key.tokens_per_minute)
        ]
        made = datetime.fromtimestamp(key.created_s, timezone.utc).strftime("%Y-%m-%d")
        uses = "everything (admin)" if key.admin else " ".join(key.adapters) or "the base model"
        rows.append((key.id, key.tenant, uses, *rates, f"{key.share:g}", made))
    print_table(heads, rows)


@keys.command()
@_FILE
@click.argument("key_id", metavar="ID")
@user_errors
def remove(file: Path, key_id: str) -> None:
    """Take the key with this ID (see list) out of FILE."""
    from moe_lora.serve.api_keys import remove_key

    click.echo(f"removed {key_id}, of {remove_key(file, key_id).tenant}")
