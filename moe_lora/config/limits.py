# SPDX-License-Identifier: Apache-2.0
"""What clients may have of a front end: connections, bytes, tokens, time (docs/guides/limits.md)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from moe_lora.core.errors import ConfigError

from .settings import Settings, setting

UNKNOWN_FIELDS = ("warn", "error")


def _check_proxies(place: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(
                f"{place}: {address!r} is no address or network ({error}); give one such as 10.0.0.5 or "
                "10.0.0.0/8"
            ) from error


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Settings):
    """What one client, and all together, may have of one front end; each of several counts its own.

    A client is an address (IPv6: its /64).
    """

    SECTION: ClassVar[str] = "front_end"

    trusted_proxies: tuple[str, ...] = setting(
        (), check=_check_proxies, former="--trusted-proxy", metavar="ADDRESS", unset="none"
    )
    """A proxy (address or network) whose X-Forwarded-For says which client it speaks for; may be given
    several times. Its own connections have no limit but that of all."""
    max_connections: int = setting(16384, least=1)
    """Connections open at once. More are answered with 503. Fewer where the limit on open files leaves no
    room for them."""
    max_connections_per_client: int = setting(1024, least=1)
    """Of one client; more are answered with 429."""
    idle_timeout_s: float = setting(3900.0, above=0)
    """After a request its connection is kept for so long without another. Whoever closes first may do so
    while a request is on its way, which the client sees as a reset: so clients and proxies (Envoy: an hour)
    close first."""
    header_timeout_s: float = setting(20.0, above=0)
    """From a request's first byte to the end of its headers; then 408. A new connection on which no first
    byte comes for so long is closed, unless it is a trusted proxy's."""
    body_timeout_s: float = setting(60.0, above=0)
    """From there to the end of its body; then 408."""
    write_timeout_s: float = setting(30.0, above=0)
    """A client that reads nothing of what waits for it is ended after so long, and its requests with it."""
    max_unread_steps: int = setting(
        4096, least=1, fixed="4096 steps are more than a client of any use leaves unread"
    )
    """Steps of an answer that wait because its client does not read; then its request ends."""
    max_header_bytes: int = setting(1 << 16, least=1024)
    """Of a request's first line and headers, and of trailers; then 400."""
    max_body_bytes: int = setting(2 << 20, least=1024)
    """Of a request that generates; larger ones are answered with 413. Other bodies have at most 64 KiB."""
    max_bodies_bytes: int = setting(64 << 20, least=1024)
    """Of all bodies that are being received or checked, without the first 16 KiB of each; more are answered
    with 503."""
    max_bodies_bytes_per_client: int = setting(16 << 20, least=1024)
    """Of those of one client; more are answered with 429."""
    max_json_depth: int = setting(32, least=4, fixed="no request needs more than 32 levels")
    """Lists and objects in each other; then 400."""
    check_timeout_s: float = setting(20.0, above=0, fixed="20 s serve all bodies that the limits allow")
    """Bodies from 16 KiB on are checked, and their texts tokenized, one after another in a process of their
    own, clients by turns. One that waits for longer is answered with 503."""
    max_choices: int = setting(128, least=1)
    """Of one request: prompts times n; then 400."""
    max_request_tokens: int = setting(1 << 20, least=1)
    """Of one request: its choices' prompts and the longest answers allowed together (at most 4 096 tokens of
    an answer without max_tokens), each token counted again for every other one whose log probability is
    asked for; then 400. One choice without these may always have the model's whole context."""
    unknown_fields: str = setting("warn", choices=UNKNOWN_FIELDS)
    """Unknown fields of a request. warn: the server ignores them, logs each name once, and lists them in the
    header X-Ignored-Fields. error: 400. Fields that would change the answer are a 400 in both cases."""
    max_queued_tokens: int = setting(1 << 23, least=1)
    """Of all choices that wait for their first token: prompts and answers, counted likewise, at least 1 024
    each; more are answered with 503."""
    max_queued_tokens_per_client: int = setting(1 << 21, least=1)
    """Of those of one client; more are answered with 429. One choice may always wait."""
