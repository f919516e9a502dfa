# SPDX-License-Identifier: Apache-2.0
"""Keys, rates and rights of HTTP callers (docs/guides/tenants.md)."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from glob import escape
from math import ceil
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_lora.config import FrontEndConfig
from moe_lora.core.address import parse_address
from moe_lora.core.errors import ConfigError

from .http_errors import MESSAGES, ApiError, JsonResponse

if TYPE_CHECKING:
    from .api_keys import AdminKeys, ApiKey, KeyRing

OPEN = frozenset({"/health", "/live", "/ready", "/version", "/ping", "/liveness"})
"""Paths without a key; the answers reveal no data of clients."""
_EMBEDDING = {"/v1/embeddings", "/v2/embed", "/pooling", "/invocations"}
_CHAT = "/v1/chat/completions"
_CHATS = {_CHAT, f"{_CHAT}/batch", f"{_CHAT}/tokens", "/v1/responses", *MESSAGES}
_TOKENS = {"/inference/v1/generate", "/generate", "/v1/score"}
GENERATING = frozenset({"/v1/completions", *_CHATS, *_EMBEDDING, *_TOKENS})
STATUS = frozenset({"/metrics", "/load", "/", "/docs", "/openapi.json"})
"""Further paths without a key if `admin_key_digests` are the only keys."""
_RENDERED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_TOKENIZING = {
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/tokenizer_info"),
    *(f"{path}/render" for path in _RENDERED),
}
_OWN = {"/inference/v1/abort_requests", "/abort_requests", "/v1/files", "/v1/batches"}
_PAUSES = {"/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation", "/abort_request"}
_FACTS = {
    *("/server_info", "/get_world_size", "/get_weight_version"),
    *("/model_info", "/get_model_info", "/get_server_info"),
}
_FOR_ALL = GENERATING | _TOKENIZING | _OWN | _PAUSES | _FACTS | {"/", "/docs", "/openapi.json", "/v1/models"}
_BELOW = ("/v1/models/", "/v1/responses/", "/v1/files/", "/v1/batches/")
"""Paths, or prefixes, for every key; other paths need an administrator."""
_PERIOD_S = 60.0


class Allowance:
    """An allowance per minute; saves up to one minute's worth."""

    def __init__(self, what: str, per_minute: float) -> None:
        self.what = what
        self.per_minute = per_minute
        self._left = per_minute
        self._held = 0.0
        self._at_s = time.monotonic()

    def change(self, per_minute: float) -> None:
        """Set a new rate; the rest and all holds stay."""
        self.wait_s()
        self.per_minute = per_minute

    def wait_s(self, amount: float = 1.0) -> float:
        """Seconds until the amount is free; counts at most a minute's worth."""
        now_s = time.monotonic()
        self._left = min(self.per_minute, self._left + (now_s - self._at_s) * self.per_minute / _PERIOD_S)
        self._at_s = now_s
        return max(0.0, (min(amount, self.per_minute) - self._left) * _PERIOD_S / self.per_minute)

    def take(self, amount: float) -> None:
        """Spend an amount; the balance may become negative."""
        self._left -= amount

    def hold(self, amount: float) -> None:
        """Spend the most that may be needed, until `settle`."""
        self._left -= amount
        self._held += amount

    def settle(self, held: float, taken: float) -> None:
        self._held -= held
        self._left += held - taken

    def refusal(self, amount: float = 1.0) -> ApiError | None:
        """The error for a request of this amount; None: admitted."""
        wait_s = self.wait_s(amount)
        if not wait_s:
            return None
        missing = min(amount, self.per_minute) - (self._left + self._held)
        wait_s = max(missing * _PERIOD_S / self.per_minute, min(wait_s, _PERIOD_S))
        rate = f"this key may have {self.per_minute:g} {self.what} a minute"
        return ApiError(429, f"{rate}; wait {wait_s:.1f} s", retry_s=ceil(wait_s))


class Reservation:
    """Tokens held during a request."""

    def __init__(self, allowance: Allowance, num_tokens: int) -> None:
        self._allowance = allowance
        self._held = num_tokens
        self._spent = 0
        allowance.hold(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Count tokens; a negative number returns tokens."""
        self._spent += num_tokens

    def settle(self) -> None:
        """Return unspent tokens, or take the excess."""
        self._allowance.settle(self._held, self._spent)


class Caller:
    """Sender of a request.

    key, tenant: None and "" without keys.  owner: the tenant in engines.  tokens: None: unlimited.
    """

    background = False
    """True: requests run in steps without others, and in no queue here."""

    def __init__(self, key: ApiKey | None = None, tokens: Allowance | None = None, *, is_admin: bool) -> None:
        self.key = key
        self.is_admin = is_admin
        self.tokens = tokens
        self.tenant = self.owner = "" if key is None else key.tenant
        self.share = 1.0 if key is None else key.share

    def may_use(self, adapter: str | None) -> bool:
        return adapter is None or self.key is None or self.key.may_use(adapter)

    def with_right(self, *adapters: str) -> Caller:
        found = copy(self)
        if self.key is not None:
            found.key = replace(self.key, adapters=(*self.key.adapters, *map(escape, adapters)))
        return found


@contextmanager
def reserved(allowance: Allowance, num_tokens: int) -> Iterator[Reservation]:
    """Hold tokens during a request."""
    found = Reservation(allowance, num_tokens)
    try:
        yield found
    finally:
        found.settle()


ANYONE, NO_ADMIN = Caller(is_admin=True), Caller(is_admin=False)
"""Callers without keys; NO_ADMIN beside an address for administrators."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    found: Caller = scope["state"]["caller"]
    return found


def checked_keys(config: FrontEndConfig) -> KeyRing | AdminKeys | None:
    """The keys of a front end, or None.

    Raises ConfigError for unreadable keys and TLS files.
    """
    if config.tls_cert is not None and config.tls_key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tls_cert={config.tls_cert} and tls_key={config.tls_key} can't be used ({error}); give a "
                "certificate and its private key, both in PEM and without a password"
            ) from error
    if not config.admin_key_digests and config.api_keys is None:
        return None
    from .api_keys import AdminKeys, KeyRing

    admins = AdminKeys(config.admin_key_digests) if config.admin_key_digests else None
    return admins if config.api_keys is None else KeyRing(config.api_keys, admins)


class Access:
    """Passes permitted requests to `app`, with the caller in the scope."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing | AdminKeys | None,
        address: str | None,
        count: Callable[[str], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._count = count
        self._admin_address = None if address is None else parse_address("admin_address", address)
        self._requests: dict[str, Allowance] = {}
        self._tokens: dict[str, Allowance] = {}
        """By key; kept after a removal: a restored key gets no second allowance."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        refusal = self._admit(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            reason, error = refusal
            self._count(reason)
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else error.headers
            await JsonResponse(error.body_for(scope["path"]), error.status, headers)(scope, receive, send)

    def _admit(self, scope: Scope) -> tuple[str, ApiError] | None:
        path = _path(scope)
        is_admins = path not in _FOR_ALL and not path.startswith(_BELOW)
        at_admins = self._came_to_admins(scope)
        if is_admins and not at_admins:
            return "admin", _not_found(scope)
        if self._keys is None:
            scope.setdefault("state", {})["caller"] = ANYONE if at_admins else NO_ADMIN
            return None
        if self._keys.opens_status and path in STATUS:
            return None
        key = self._keys.find(_bearer(scope))
        if key is None:
            what = "no valid API key was sent; send one as Authorization: Bearer KEY, or as x-api-key: KEY"
            return "key", ApiError(401, what) if _is_served({**scope, "path": path}) else _not_found(scope)
        if is_admins and not key.admin:
            what = f"{scope['method']} {path} needs the key of an administrator"
            return "admin", ApiError(403, what) if _is_served(scope) else _not_found(scope)
        tokens = allowance_of(self._tokens, key.id, "tokens", key.tokens_per_minute)
        if scope["path"] in GENERATING:
            requests = allowance_of(self._requests, key.id, "requests", key.requests_per_minute)
            for reason, allowance in (("key_requests", requests), ("key_tokens", tokens)):
                error = None if allowance is None else allowance.refusal()
                if error is not None:
                    return reason, error
            if requests is not None:
                requests.take(1)
        scope.setdefault("state", {})["caller"] = Caller(key, tokens, is_admin=key.admin)
        return None

    def _came_to_admins(self, scope: Scope) -> bool:
        if self._admin_address is None:
            return True
        _, port = scope.get("server") or (None, None)
        return port == (self._admin_address.port or None)


def _path(scope: Scope) -> str:
    """The path without final slashes, as in the router."""
    path: str = scope["path"]
    return path.rstrip("/") or "/"


def _is_served(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _not_found(scope: Scope) -> ApiError:
    return ApiError(404, f"Not Found ({scope['method']} {scope['path']})")


def _bearer(scope: Scope) -> str:
    """The request's key; `Authorization` precedes Anthropic's `x-api-key`."""
    other = ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, text = value.decode("latin-1").partition(" ")
            return text.strip() if kind.lower() == "bearer" else ""
        if name == b"x-api-key":
            other = value.decode("latin-1").strip()
    return other


def allowance_of(
    kept: dict[str, Allowance], key: str, what: str, per_minute: float | None
) -> Allowance | None:
    """The key's allowance; None: unlimited."""
    if per_minute is None:
        return None
    found = kept.get(key)
    if found is None:
        found = kept[key] = Allowance(what, per_minute)
    elif found.per_minute != per_minute:  # never a new object: requests hold this allowance
        found.change(per_minute)
    return found
