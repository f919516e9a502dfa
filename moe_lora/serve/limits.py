"""Who a client is, what clients have of a front end now, what is refused to them (docs/guides/limits.md)."""

from __future__ import annotations

import functools
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from moe_lora.config import LimitsConfig

from .access import caller_of
from .http_errors import ApiError

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
"""Reasons for which something is refused or ended, as the metric names them."""
RETRY_S = 1
"""Retry-After where what is taken may be free again at any moment."""


LEAST_QUEUED_TOKENS = 1024
"""What a choice that waits counts at least: it takes memory however short it is."""
LONGEST_RETRY_S = 60
_TELLING_S = 1.0
"""How fast the queue moves is told by no less."""


def client_of(scope: Mapping[str, Any]) -> str:
    """Whom an HTTP request counts for: the one place that says so.

    scope: of ASGI.  Where there are keys, the key's tenant.  Behind a trusted proxy its client is the one
    that the proxy names.
    """
    if tenant := caller_of(scope).tenant:
        return f"tenant {tenant}"
    address = scope.get("client")
    return client_at(address[0] if address else None)


@functools.lru_cache(maxsize=4096)
def client_at(host: str | None) -> str:
    """The client at an address: all of an IPv6 /64 are one.  None: over a Unix socket."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or "local"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Quota:
    """An amount of something that all clients share, and of which each may have a part."""

    def __init__(self, most: int, most_per_client: int) -> None:
        self.most = most
        self.most_per_client = most_per_client
        self.in_all = 0
        self._of_client: Counter[str] = Counter()

    @property
    def num_clients(self) -> int:
        """That have some of it."""
        return len(self._of_client)

    def of_client(self, client: str) -> int:
        return self._of_client.get(client, 0)

    def exceeded(self, client: str, amount: int) -> Literal["all", "client"] | None:
        """Whose part would be exceeded by so much more."""
        if self.in_all + amount > self.most:
            return "all"
        return "client" if self.of_client(client) + amount > self.most_per_client else None

    def take(self, client: str, amount: int) -> None:
        self.in_all += amount
        self._of_client[client] += amount

    def give_back(self, client: str, amount: int) -> None:
        self.in_all -= amount
        self._of_client[client] -= amount
        if not self._of_client[client]:
            del self._of_client[client]


class Limits:
    """The limits of one front end.  count: called with the reason of each refusal (one of REFUSALS)."""

    def __init__(self, config: LimitsConfig, count: Callable[[str], None] = lambda reason: None) -> None:
        self.config = config
        self.count = count
        self.connections = Quota(config.max_connections, config.max_connections_per_client)
        self.bodies = Quota(config.max_bodies_bytes, config.max_bodies_bytes_per_client)
        self.queue = Quota(config.max_queued_tokens, config.max_queued_tokens_per_client)
        self._left_queue_tokens, self._queued_since_s = 0, 0.0
        self._proxies = [ipaddress.ip_network(one) for one in config.trusted_proxies]

    def change(self, config: LimitsConfig) -> None:
        """Have others from now on; what was taken under those of before stays taken."""
        self.config = config
        for quota, most, most_per_client in (
            (self.connections, config.max_connections, config.max_connections_per_client),
            (self.bodies, config.max_bodies_bytes, config.max_bodies_bytes_per_client),
            (self.queue, config.max_queued_tokens, config.max_queued_tokens_per_client),
        ):
            quota.most, quota.most_per_client = most, most_per_client

    def is_proxy(self, host: str) -> bool:
        """Whether what connects from there speaks for others."""
        if not self._proxies:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    def refusal(self, reason: str, error: ApiError) -> ApiError:
        """The error, counted."""
        self.count(reason)
        return error

    def body_too_large(self, most_bytes: int) -> ApiError:
        what = f"the body has more than {most_bytes} bytes, which is all that is taken here"
        return self.refusal("body_size", ApiError(413, f"{what}; send less at once", closes=True))

    def take_body(self, client: str, num_bytes: int) -> None:
        """Count bytes of a body that is being received.  Raises ApiError if there are too many."""
        whose = self.bodies.exceeded(client, num_bytes)
        if whose == "all":
            what = "too many bytes of requests are being received at once; try again later"
            raise self.refusal("bodies", ApiError(503, what, retry_s=RETRY_S, closes=True))
        if whose == "client":
            what = f"more than {self.bodies.most_per_client} bytes of requests at once; send fewer at a time"
            raise self.refusal("client_bodies", ApiError(429, what, retry_s=RETRY_S, closes=True))
        self.bodies.take(client, num_bytes)

    def enter_queue(
        self, client: str, num_tokens: int, timeout_s: float | None = None, *, by_turns: bool = False
    ) -> int:
        """Count a choice that waits for its first token; what to give to `leave_queue`.

        timeout_s: when it has ended, if it is to be begun in the order in which it came.  by_turns: clients
        are tenants, and each has its turn whatever the others have waiting.
        Raises ApiError if too many tokens wait: 429 for its client's (who may always have one choice that
        waits), 503 for all clients'; 429 if it would not begin within timeout_s.
        """
        num_tokens = max(num_tokens, LEAST_QUEUED_TOKENS)
        whose = self.queue.exceeded(client, num_tokens)
        if whose == "all" and self.queue.in_all:
            what = "the requests of all clients that wait have too many tokens; try again later"
            raise self.refusal("queue", ApiError(503, what, retry_s=self._queue_s(self.queue.in_all)))
        if whose == "client" and self.queue.of_client(client):
            most, retry_s = self.queue.most_per_client, self._queue_s(self.queue.of_client(client))
            what = f"your requests that wait have more than {most} tokens; send the next when some have begun"
            raise self.refusal("client_queue", ApiError(429, what, retry_s=retry_s))
        ahead = self.queue.in_all
        if by_turns:
            ahead = min(ahead, self.queue.of_client(client) * self.queue.num_clients)
        wait_s = self._wait_s(ahead)
        if timeout_s is not None and wait_s > timeout_s:
            what = f"what waits before it takes about {wait_s:.0f} s, more than timeout={timeout_s:g}"
            retry_s = _retry_s(wait_s - timeout_s)
            raise self.refusal("queue_time", ApiError(429, f"{what}; send it again later", retry_s=retry_s))
        if not self.queue.in_all:
            self._left_queue_tokens, self._queued_since_s = 0, time.monotonic()
        self.queue.take(client, num_tokens)
        return num_tokens

    def leave_queue(self, client: str, num_tokens: int) -> int:
        """It has its first token, or has ended; 0."""
        self.queue.give_back(client, num_tokens)
        self._left_queue_tokens += num_tokens
        return 0

    def _queue_s(self, num_tokens: int) -> int:
        """In how many seconds about half of so many tokens will have left the queue."""
        return _retry_s(self._wait_s(num_tokens / 2))

    def _wait_s(self, num_tokens: float) -> float:
        """In how many seconds so many tokens leave the queue, as fast as those did since it was empty; 0
        while nobody can tell."""
        time_s = time.monotonic() - self._queued_since_s
        if not self._left_queue_tokens or time_s < _TELLING_S:
            return 0.0
        return num_tokens / self._left_queue_tokens * time_s


def _retry_s(wait_s: float) -> int:
    return round(min(max(RETRY_S, wait_s), LONGEST_RETRY_S))
