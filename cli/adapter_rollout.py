# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters rollout`, `promote`, `rollback` and `drop`: an alias moves to another adapter."""

from __future__ import annotations

from typing import Any

import click

from .administrator import call, server_options
from .errors import user_errors

TIMEOUT_S = 600.0
"""A rollout loads the adapter on all instances."""


class Share(click.ParamType):
    """A share of the requests: 5% or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            found = 0.0
        if not 0 < found <= 1:
            self.fail(f"{value!r} is no share; give one above 0% and up to 100%, as 5% or 0.05", param, ctx)
        return found


def _step(url: str, api_key: str | None, name: str, step: str, body: Any = None) -> None:
    from urllib.parse import quote

    card = call(url, api_key, "POST", f"/v1/aliases/{quote(name, safe='')}/{step}", TIMEOUT_S, body)
    rows = ", ".join(f"{one['adapter']} {one['share']:.4g}" for one in card["targets"])
    click.echo(f"{name}: {rows} ({card['stage']})")
    if step == "rollout" and len(card["targets"]) == 1:
        click.echo("The server forgets this alias when its last process ends; roll out again after a start.")


@click.command()
@click.argument("name")
@click.option("--to", required=True, help="Loaded adapter, or version of the registry's NAME, as v8.")
@click.option("--share", type=Share(), help="Share of the requests, as 5%; left out for a first adapter.")
@server_options
@user_errors
def rollout(name: str, to: str, share: float | None, url: str, api_key: str | None) -> None:
    """Send a share of the requests for NAME to an adapter of a running `moe-lora serve`.

    The requests of a `user` stay with an adapter, also when the share rises.
    """
    _step(url, api_key, name, "rollout", {"to": to, "share": share})


@click.command()
@click.argument("name")
@server_options
@user_errors
def promote(name: str, url: str, api_key: str | None) -> None:
    """Send every request for NAME to the adapter under rollout; the former adapter stays loaded."""
    _step(url, api_key, name, "promote")


@click.command()
@click.argument("name")
@server_options
@user_errors
def rollback(name: str, url: str, api_key: str | None) -> None:
    """Undo the last rollout of NAME, also after its promotion; running requests end unchanged."""
    _step(url, api_key, name, "rollback")


@click.command()
@click.argument("name")
@server_options
@user_errors
def drop(name: str, url: str, api_key: str | None) -> None:
    """Keep the former adapter of NAME no longer, after a promotion or a rollback: it may leave memory."""
    _step(url, api_key, name, "drop")
