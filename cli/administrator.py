# SPDX-License-Identifier: Apache-2.0
"""Calls of a running server that are an administrator's, for commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def server_options(command: Command) -> Command:
    """Options that say which server, and with which key: `url` and `api_key`."""
    command = click.option(
        "--api-key", envvar="OPENAI_API_KEY", help="Administrator's key, sent as bearer token."
    )(command)
    return click.option(
        "--url",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="The server's URL, or the path of its socket for administrators.",
    )(command)


def call(
    url: str, api_key: str | None, method: str, path: str, timeout_s: float, body: Any = None
) -> dict[str, Any]:
    """The server's answer.  Raises ValueError for what it refuses, or if it is not there."""
    import httpx

    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        transport, base_url = None, url
        if url.startswith("/"):
            transport, base_url = httpx.HTTPTransport(uds=url), "http://localhost"
        with httpx.Client(base_url=base_url, transport=transport, timeout=timeout_s, headers=headers) as http:
            answer = http.request(method, path, json=body)
        found: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"no moe-lora server answers at {url}: {error}; give its --url") from error
    if answer.is_error:
        raise ValueError(found["error"]["message"])
    return found


def call_instance(url: str, api_key: str | None, name: str, what: str, timeout_s: float) -> dict[str, Any]:
    """As `call`, of one instance: drain, undrain or restart it."""
    from urllib.parse import quote

    return call(url, api_key, "POST", f"/v1/instances/{quote(name, safe='')}/{what}", timeout_s)
