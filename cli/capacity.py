"""`moe-lora capacity`: show or change how many adapters a running LoRA Server holds."""

from __future__ import annotations

from typing import Any

import click

from .errors import user_errors

TIMEOUT_S = 30.0


@click.command()
@click.argument("adapters", type=click.IntRange(min=1), required=False)
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Of the server, as requests use it."
)
@user_errors
def capacity(adapters: int | None, url: str) -> None:
    """Show the capacity of the LoRA Server behind a running `moe-lora serve`, or set it to ADAPTERS.

    Running requests are served to the end; a server that is started again has its configured capacity.
    """
    state = ask(url, adapters)
    limit = "unknown" if state["max_capacity"] is None else state["max_capacity"]
    click.echo(f"capacity {state['capacity']} (at most {limit}), resident {state['num_resident']}")
    click.echo(f"leases   {state['num_leases']} held, {state['num_waiting']} waited for")


def ask(url: str, adapters: int | None) -> dict[str, Any]:
    """The server's answer.  Raises ValueError for what it refuses, or if it is not there."""
    import httpx

    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
            if adapters is None:
                answer = http.get("/v1/lora_server")
            else:
                answer = http.post("/v1/lora_server/capacity", json={"capacity": adapters})
        body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"no moe-lora server answers at {url}: {error}; give its --url") from error
    if answer.is_error:
        raise ValueError(body["error"]["message"])
    return body
