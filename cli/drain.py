# SPDX-License-Identifier: Apache-2.0
"""`moe-lora drain`: take an instance out of use."""

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
