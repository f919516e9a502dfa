# SPDX-License-Identifier: Apache-2.0
"""`moe-lora restart`: start instances again, one after the other."""

from __future__ import annotations

import click

from .administrator import call, call_instance, server_options
from .drain import TIMEOUT_S
from .errors import user_errors

_DRAIN_MOST_S = 3600.0


@click.command()
@click.argument("instances", nargs=-1, metavar="[INSTANCE]...")
@server_options
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=300.0,
    show_default=True,
    help="Time for each process to take part, at first and after its restart.",
)
@click.option(
    "--lora-server", is_flag=True, help="Restart the ranks of the LoRA Server, and only named instances."
)
@user_errors
def restart(
    instances: tuple[str, ...], url: str, api_key: str | None, limit_s: float, lora_server: bool
) -> None:
    """Start the instances of a running `moe-lora serve` again, one after the other, without a failed request.

    Each is drained first, for up to the server's drain_s; what it has then goes on at others.  Without names
    all instances are.  It ends with the first that does not come back.
    """
    if lora_server:
        # The server says how many ranks there are; each has limit_s.
        path = f"/v1/lora_server/restart?limit_s={limit_s:g}"
        state = call(url, api_key, "POST", path, _DRAIN_MOST_S + limit_s)
        click.echo(f"the LoRA Server's {len(state['ranks'])} ranks were started again")
        if not instances:
            return
    listed = call(url, api_key, "GET", "/v1/instances", TIMEOUT_S)["data"]
    for name in instances or [one["id"] for one in listed]:
        call_instance(url, api_key, name, f"restart?limit_s={limit_s:g}", limit_s + _DRAIN_MOST_S)
        click.echo(f"{name} was started again and takes part")
