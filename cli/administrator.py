# SPDX-License-Identifier: Apache-2.0
"""`moe-lora drain`, `undrain`, `restart`, `scale`, `capacity`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import click

from .errors import user_errors

Command = TypeVar("Command", bound=Callable[..., Any])


def server_options(command: Command) -> Command:
    """Options of the server's `url` and `api_key`."""
    command = click.option(
        "--api-key", envvar="OPENAI_API_KEY", help="Administrator's key, sent as bearer token."
    )(command)
    return click.option(
        "--url",
        default="http://127.0.0.1:8000",
        help="The server's URL, or the path of its socket for administrators.",
    )(command)


def call(
    url: str, api_key: str | None, method: str, path: str, timeout_s: float, body: Any = None
) -> dict[str, Any]:
    """The server's answer.  Raises ValueError for a refusal or an absent server."""
    import httpx

    from moe_lora.report.load_client import base_url, error_message

    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport, base = None, base_url(url)
        if url.startswith("/"):
            transport, base = httpx.HTTPTransport(uds=url), "http://localhost"
        with httpx.Client(base_url=base, transport=transport, timeout=timeout_s, headers=headers) as http:
            answer = http.request(method, path, json=body)
        found = answer.json()
        if not answer.is_error and not isinstance(found, dict):
            raise ValueError(f"{found!r:.80} is no object")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"no moe-lora server answers at {url}: {error}; give its --url") from error
    if answer.is_error:
        raise ValueError(error_message(found))
    return dict(found)


def call_instance(url: str, api_key: str | None, name: str, what: str, timeout_s: float) -> dict[str, Any]:
    """As `call`, for one instance."""
    return call(url, api_key, "POST", f"/v1/instances/{quote(name, safe='')}/{what}", timeout_s)


TIMEOUT_S = 30.0
_LOOK_S = 0.2


@click.command()
@click.argument("instance")
@server_options
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=60.0,
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
    # A silent instance's number of requests is unknown.
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
        # The server knows the ranks; each rank has limit_s.
        path = f"/v1/lora_server/restart?limit_s={limit_s:g}"
        state = call(url, api_key, "POST", path, _DRAIN_MOST_S + limit_s)
        click.echo(f"the LoRA Server's {len(state['ranks'])} ranks were started again")
        if not instances:
            return
    listed = call(url, api_key, "GET", "/v1/instances", TIMEOUT_S)["data"]
    for name in instances or [one["id"] for one in listed]:
        call_instance(url, api_key, name, f"restart?limit_s={limit_s:g}", limit_s + _DRAIN_MOST_S)
        click.echo(f"{name} was started again and takes part")


@click.command()
@click.argument("role", type=click.Choice(["instance", "lora-server"]))
@click.argument("size", metavar="N|LAYOUT")
@server_options
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=300.0,
    help="Time for new processes to take part.",
)
@user_errors
def scale(role: str, size: str, url: str, api_key: str | None, limit_s: float) -> None:
    """Have N instances in a running `moe-lora serve` with `scaling`, or another LAYOUT of its LoRA Server.

    New instances take requests once warm.  The last ones leave: requests go on at others.  Ranks of a new
    layout, such as EP4-PP1, start beside the former ones, and instances move to them between two steps.
    """
    if role == "lora-server":
        path = f"/v1/lora_server/layout?layout={quote(size)}&limit_s={limit_s:g}"
        state = call(url, api_key, "POST", path, limit_s + _DRAIN_MOST_S)
        click.echo(f"the LoRA Server has {len(state['ranks'])} ranks, and all instances are there")
        return
    number = click.IntRange(1, 4096).convert(size, None, click.get_current_context())
    path = f"/v1/instances/scale?number={number}&limit_s={limit_s:g}"
    listed = call(url, api_key, "POST", path, limit_s + _DRAIN_MOST_S)["data"]
    click.echo(f"{len(listed)} instances take part")


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
        state = call(url, api_key, "POST", "/v1/lora_server/capacity", TIMEOUT_S, {"capacity": adapters})
    limit = "unknown" if state["max_capacity"] is None else state["max_capacity"]
    click.echo(f"capacity {state['capacity']} (at most {limit}), resident {state['num_resident']}")
    click.echo(f"leases   {state['num_leases']} held, {state['num_waiting']} waited for")
