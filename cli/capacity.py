# SPDX-License-Identifier: Apache-2.0
"""`moe-lora capacity`: show or change how many adapters a running LoRA Server holds."""

from __future__ import annotations

import click

from .administrator import call, server_options
from .errors import user_errors

TIMEOUT_S = 30.0


@click.command()
@click.argument("adapters", type=click.IntRange(min=1), required=False)
@server_options
@user_errors
def capacity(adapters: int | None, url: str, api_key: str | None) -> None:
    """Show the capacity of the LoRA Server behind a running `moe-lora serve`, or set it to ADAPTERS.

    Running requests are served to the end; a server that is started again has its configured capacity.
    """
    if adapters is None:
        state = call(url, api_key, "GET", "/v1/lora_server", TIMEOUT_S)
    else:
        body = {"capacity": adapters}
        state = call(url, api_key, "POST", "/v1/lora_server/capacity", TIMEOUT_S, body)
    limit = "unknown" if state["max_capacity"] is None else state["max_capacity"]
    click.echo(f"capacity {state['capacity']} (at most {limit}), resident {state['num_resident']}")
    click.echo(f"leases   {state['num_leases']} held, {state['num_waiting']} waited for")
