# SPDX-License-Identifier: Apache-2.0
"""`moe-lora undrain`: bring a drained instance back into use."""

from __future__ import annotations

import click

from .administrator import call_instance, server_options
from .drain import TIMEOUT_S
from .errors import user_errors


@click.command()
@click.argument("instance")
@server_options
@user_errors
def undrain(instance: str, url: str, api_key: str | None) -> None:
    """Give INSTANCE of a running `moe-lora serve`, which was drained, requests again."""
    call_instance(url, api_key, instance, "undrain", TIMEOUT_S)
    click.echo(f"{instance} takes requests")
