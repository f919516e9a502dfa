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
    """A proxy (address or network) whose X-Forwarded-For names the client; may be given several times. Its
    own connections count only in max_connections."""
    max_connections: int = setting(16384, least=1)
    """Open connections; more are answered with 503. The limit on open files may lower the number."""
    max_connections_per_client: int = setting(1024, least=1)
    """Open connections of one client; more are answered with 429."""
    idle_timeout_s: float = setting(3900.0, above=0)
    """Time until an idle connection closes. Clients and proxies (Envoy: an hour) should close first: a
    request on a closing connection fails with a reset."""
    header_timeout_s: float = setting(20.0, above=0)
    """Time from a request's first byte to the end of its headers; then 408. A new connection without a byte
    closes after the same time, unless a trusted proxy opened the connection."""
    body_timeout_s: float = setting(60.0, above=0)
    """Time from the end of the headers to the end of the body; then 408."""
    write_timeout_s: float = setting(30.0, above=0)
    """Time without reading after which a client's connection and requests end."""
    max_unread_steps: int = setting(
        4096, least=1, fixed="4096 steps are more than a client of any use leaves unread"
    )
    """Unread steps of an answer; then the request ends."""
    max_header_bytes: int = setting(1 << 16, least=1024)
    """Bytes of a request's first line and headers, and of trailers; then 400."""
    max_body_bytes: int = setting(2 << 20, least=1024)
    """Bytes of a generating request's body; then 413. Other bodies have at most 64 KiB."""
    max_bodies_bytes: int = setting(64 << 20, least=1024)
    """Bytes of all bodies being received or checked, without the first 16 KiB of each; then 503."""
    max_bodies_bytes_per_client: int = setting(16 << 20, least=1024)
    """The same, of one client; then 429."""
    max_json_depth: int = setting(32, least=4, fixed="no request needs more than 32 levels")
    """Nested lists and objects; then 400."""
    check_timeout_s: float = setting(20.0, above=0, fixed="20 s serve all bodies that the limits allow")
    """Time that a body from 16 KiB on may wait for its check; then 503. A separate process checks and
    tokenizes these bodies one by one, clients by turns."""
    max_choices: int = setting(128, least=1)
    """Choices of one request, prompts times n; then 400."""
    max_request_tokens: int = setting(1 << 20, least=1)
    """Tokens of one request's prompts and longest answers together; then 400. An answer without max_tokens
    counts at most 4,096 tokens. Log probabilities of other tokens count as further tokens. One choice without
    log probabilities may have the whole context."""
    unknown_fields: str = setting("warn", choices=UNKNOWN_FIELDS)
    """Unknown fields of a request. warn: the server ignores them, logs each name once, and lists them in the
    header X-Ignored-Fields. error: 400. Fields that would change the answer are a 400 in both cases."""
    max_queued_tokens: int = setting(1 << 23, least=1)
    """Tokens of all choices before their first token, at least 1,024 each; then 503."""
    max_queued_tokens_per_client: int = setting(1 << 21, least=1)
    """The same, of one client; then 429. One choice may always wait."""
