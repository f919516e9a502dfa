# SPDX-License-Identifier: Apache-2.0
"""Clients' use of a front end, and refusals (docs/guides/limits.md)."""

from __future__ import annotations

import functools
import ipaddress
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message

from moe_lora.config import LimitsConfig

from .http_errors import NOT_JSON, ApiError, bad_request

REFUSALS = (
    "admin",
    "body_size",
    "body_time",
    "bodies",
    "check_time",
    "choices",
    "client_bodies",
    "client_connections",
    "client_queue",
    "connections",
    "header_time",
    "http",
    "json_depth",
    "key",
    "key_requests",
    "key_tokens",
    "queue",
    "queue_time",
    "request_tokens",
    "timeout",
    "unread",
    "write_time",
)
"""Reasons for refusals in the metric."""
RETRY_S = 1
"""Retry-After for limits that may be free again at any moment."""


LEAST_QUEUED_TOKENS = 1024
"""Least tokens per waiting choice."""
LONGEST_RETRY_S = 60
SMALL_BODY_BYTES = 1 << 16
"""Limit for requests without generation."""
UNCOUNTED_BYTES = 1 << 14
"""Uncounted bytes of each body: large bodies never keep out small bodies."""
JSON_MEDIA = re.compile(r"\s*application/(?:json|[^/;]+\+json)\s*(?:;.*)?", re.IGNORECASE)
"""Content types of bodies: browsers send forms without permission."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def client_of(scope: Mapping[str, Any]) -> str:
    """A request's client: its tenant, else its address.

    Behind a trusted proxy, the address in the header.
    """
    caller = scope.get("state", {}).get("caller")
    if caller is not None and caller.tenant:
        return f"tenant {caller.tenant}"
    address = scope.get("client")
    return client_at(address[0] if address else None)


@functools.lru_cache(maxsize=4096)
def client_at(host: str | None) -> str:
    """The client at an address: an IPv6 /64 is one client.  None: over a Unix socket."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or "local"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Quota:
    """An amount for all clients, with a limit per client."""

    def __init__(self, most: int, most_per_client: int) -> None:
        self.most = most
        self.most_per_client = most_per_client
        self.in_all = 0
        self._of_client: Counter[str] = Counter()

    def of_client(self, client: str) -> int:
        return self._of_client.get(client, 0)

    def exceeded(self, client: str, amount: int) -> Literal["all", "client"] | None:
        """The limit that a further amount would exceed."""
        if self.in_all + amount > self.most:
            return "all"
        return "client" if self._of_client.get(client, 0) + amount > self.most_per_client else None

    def take(self, client: str, amount: int) -> None:
        self.in_all += amount
        self._of_client[client] += amount

    def give_back(self, client: str, amount: int) -> None:
        self.in_all -= amount
        self._of_client[client] -= amount
        if not self._of_client[client]:
            del self._of_client[client]


@dataclass(frozen=True, eq=False, kw_only=True)
class Waiting:
    """A choice before the first token.

    tenant: orders choices by `priority` (lower goes first), and gives the share.
    """

    client: str
    tokens: int
    tenant: str = ""
    share: float = 1.0
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens for the queue's count."""
        return max(self.tokens, LEAST_QUEUED_TOKENS)


class Limits:
    """The limits of one front end.  count: gets each refusal's reason."""

    def __init__(self, config: LimitsConfig, count: Callable[[str], None] = lambda reason: None) -> None:
        self.config = config
        self.count = count
        self.connections = Quota(config.max_connections, config.max_connections_per_client)
        self.bodies = Quota(config.max_bodies_bytes, config.max_bodies_bytes_per_client)
        self.queue = Quota(config.max_queued_tokens, config.max_queued_tokens_per_client)
        self._begun_tokens, self._queued_since_s = 0, 0.0
        self._waiting: dict[str, dict[Waiting, int]] = {}
        self._proxies = [ipaddress.ip_network(one) for one in config.trusted_proxies]

    def change(self, config: LimitsConfig) -> None:
        """Set new limits; current use stays counted."""
        self.config = config
        for quota, most, most_per_client in (
            (self.connections, config.max_connections, config.max_connections_per_client),
            (self.bodies, config.max_bodies_bytes, config.max_bodies_bytes_per_client),
            (self.queue, config.max_queued_tokens, config.max_queued_tokens_per_client),
        ):
            quota.most, quota.most_per_client = most, most_per_client

    def is_proxy(self, host: str) -> bool:
        """True for a trusted proxy's address."""
        if not self._proxies:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    def refusal(self, reason: str, error: ApiError) -> ApiError:
        """Count the refusal; returns its error."""
        self.count(reason)
        return error

    def body_too_large(self, most_bytes: int) -> ApiError:
        what = f"the body has more than {most_bytes} bytes, which is all that is taken here"
        return self.refusal("body_size", ApiError(413, f"{what}; send less at once", closes=True))

    def take_body(self, client: str, num_bytes: int) -> None:
        """Count received bytes.  Raises ApiError beyond the limit."""
        whose = self.bodies.exceeded(client, num_bytes)
        if whose == "all":
            what = "too many bytes of requests are being received at once; try again later"
            raise self.refusal("bodies", ApiError(503, what, retry_s=RETRY_S, closes=True))
        if whose == "client":
            what = f"more than {self.bodies.most_per_client} bytes of requests at once; send fewer at a time"
            raise self.refusal("client_bodies", ApiError(429, what, retry_s=RETRY_S, closes=True))
        self.bodies.take(client, num_bytes)

    def enter_queue(self, choices: Sequence[Waiting], timeout_s: float | None = None) -> None:
        """Count a request's choices before their first token, until `leave_queue`.

        A request counts at most a client's limit.  timeout_s: None: unlimited.  Raises ApiError for too many
        tokens beside waiting requests: 429 for the client's, 503 for all clients'; 429 if the first choice
        would not start within timeout_s.
        """
        who, whole = choices[0], sum(one.num_tokens for one in choices)
        most = min(whole, self.queue.most_per_client)
        counted = {one: one.num_tokens * most // whole or 1 for one in choices}
        whose = self.queue.exceeded(who.client, sum(counted.values()))
        if whose == "all" and self.queue.in_all:
            what = "the requests of all clients that wait have too many tokens; try again later"
            retry_s = self._queue_s(self.queue.in_all)
            raise self.refusal("queue", ApiError(503, what, retry_s=retry_s))
        if whose == "client" and self.queue.of_client(who.client):
            most, retry_s = self.queue.most_per_client, self._queue_s(self.queue.of_client(who.client))
            what = f"your requests that wait have more than {most} tokens; send the next when some have begun"
            raise self.refusal("client_queue", ApiError(429, what, retry_s=retry_s))
        wait_s = 0.0 if timeout_s is None else self._wait_s(self._ahead(who))
        if timeout_s is not None and wait_s > timeout_s:
            what = f"what goes before it takes about {wait_s:.0f} s, its timeout leaves {timeout_s:.0f}"
            retry_s = _retry_s(wait_s - timeout_s)
            raise self.refusal("queue_time", ApiError(429, f"{what}; send it again later", retry_s=retry_s))
        if not self.queue.in_all:
            self._begun_tokens, self._queued_since_s = 0, time.monotonic()
        self.queue.take(who.client, sum(counted.values()))
        self._waiting.setdefault(who.tenant, {}).update(counted)

    def leave_queue(self, who: Waiting, *, begun: bool) -> None:
        """Uncount a choice at its first token or end."""
        waiting = self._waiting.get(who.tenant, {})
        if who not in waiting:
            return
        self.queue.give_back(who.client, waiting.pop(who))
        if not waiting:
            del self._waiting[who.tenant]
        if begun:
            self._begun_tokens += who.num_tokens

    def _ahead(self, who: Waiting) -> float:
        """Tokens ahead: the tenant's by priority, at most as many of other tenants by shares."""
        own = self._waiting.get(who.tenant, ())
        num_own = sum(one.num_tokens for one in own if one.priority <= who.priority)
        found = float(num_own)
        for tenant, waiting in self._waiting.items():
            if tenant != who.tenant:
                share = next(iter(waiting)).share / who.share
                found += min(sum(one.num_tokens for one in waiting), num_own * share)
        return found

    def _queue_s(self, num_tokens: int) -> int:
        if not self._begun_tokens:
            return RETRY_S
        return _retry_s(num_tokens / 2 / self._begun_tokens * (time.monotonic() - self._queued_since_s))

    def _wait_s(self, num_tokens: float) -> float:
        """Expected seconds until these tokens start, at the rate since the queue was empty.

        0 if fewer have started: the rate is below the capacity.
        """
        if self._begun_tokens < num_tokens or not num_tokens:
            return 0.0
        return num_tokens / self._begun_tokens * (time.monotonic() - self._queued_since_s)


def _retry_s(wait_s: float) -> int:
    return round(min(max(RETRY_S, wait_s), LONGEST_RETRY_S))


@asynccontextmanager
async def body_of(request: Request, limits: Limits, most_bytes: int) -> AsyncIterator[bytearray]:
    """The whole JSON body; bytes beyond `UNCOUNTED_BYTES` count for the client until the exit.

    Raises ApiError: 413 for more than `most_bytes`; 429 and 503 beyond the client's or all clients' bytes;
    400 for another media type.
    """
    is_json = JSON_MEDIA.fullmatch(request.headers.get("content-type", ""))
    client, taken, body = client_of(request.scope), 0, bytearray()

    def take(num_bytes: int) -> None:
        nonlocal taken
        if num_bytes > most_bytes:
            raise limits.body_too_large(most_bytes)
        counted = num_bytes - UNCOUNTED_BYTES
        if counted > taken:
            limits.take_body(client, counted - taken)
            taken = counted

    try:
        said = request.headers.get("content-length", "0")
        take(int(said) if said.isdecimal() else 0)
        async for piece in request.stream():
            if piece and not is_json:
                raise bad_request(NOT_JSON)
            take(len(body) + len(piece))
            body += piece
        yield body
    except ClientDisconnect:
        raise bad_request("the connection ended before the body did") from None
    finally:
        limits.bodies.give_back(client, taken)


def bounded_route(limits: Limits) -> type[APIRoute]:
    """Routes with limited bodies."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def bounded(request: Request) -> Response:
                async with body_of(request, limits, SMALL_BODY_BYTES) as body:
                    pieces = [bytes(body)]

                async def receive() -> Message:
                    if not pieces:
                        return await request.receive()
                    return {"type": "http.request", "body": pieces.pop(), "more_body": False}

                return await handle(Request(request.scope, receive))

            return bounded

    return BoundedRoute
