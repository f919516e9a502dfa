# SPDX-License-Identifier: Apache-2.0
"""`moe-lora drain`, `undrain` and `restart`: instances of a running server out of use and back."""

from __future__ import annotations

import time

import click

from .administrator import call, call_instance, server_options
from .errors import user_errors

TIMEOUT_S = 30.0
_LOOK_S = 0.2


@click.command()
@click.argument("instance")
@server_options
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time until the last request has ended or moved.",
)
@user_errors
def drain(instance: str, url: str, api_key: str | None, wait_s: float) -> None:
    """Give INSTANCE of a running `moe-lora serve` no new requests, and wait until it has none.

    Those that it has go on at other instances; those that can't move end where they are.  It stays drained,
    also when it is started again, until `moe-lora undrain`.
    """
    card = call_instance(url, api_key, instance, "drain", TIMEOUT_S)
    end_s = time.monotonic() + wait_s
    # Of one that is silent it is not known how many it has.
    while (left := card["requests_running"] + card["requests_waiting"]) or card["silent"]:
        if time.monotonic() >= end_s:
            break
        time.sleep(_LOOK_S)
        listed = call(url, api_key, "GET", "/v1/instances", TIMEOUT_S)["data"]
        found = next((one for one in listed if one["id"] == instance), None)
        if found is None:
            raise ValueError(f"{instance} was drained, but the server does not list it any more")
        card = found
    if card["silent"]:
        raise ValueError(
            f"{instance} is drained, but does not get on after --wait-s {wait_s:g}, so it may have requests "
            "that can't go on elsewhere; end its process, which is started again"
        )
    if left:
        raise ValueError(
            f"{instance} is drained, but has {left} requests after --wait-s {wait_s:g}; they go on there"
        )
    click.echo(f"{instance} is drained and has no requests")


@click.command()
@click.argument("instance")
@server_options
@user_errors
def undrain(instance: str, url: str, api_key: str | None) -> None:
    """Give INSTANCE of a running `moe-lora serve`, which was drained, requests again."""
    call_instance(url, api_key, instance, "undrain", TIMEOUT_S)
    click.echo(f"{instance} takes requests")


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
