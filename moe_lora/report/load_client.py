# SPDX-License-Identifier: Apache-2.0
"""A client for OpenAI-compatible servers that stamps each token's arrival."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


class ServerError(ValueError):
    """The server's error answer, or an unreachable server."""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Content of /v1/models; entries with a `parent` are adapters."""

    base: tuple[str, ...]
    adapters: tuple[str, ...]


@dataclass(slots=True)
class StreamedCompletion:
    """A received completion; times from time.perf_counter()."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any], now_s: float) -> None:
        """Add one chunk.  A chunk with only a finish reason moves `end_s`, but is no token."""
        if "error" in chunk:
            raise ServerError(f"error in the stream: {error_message(chunk)}")
        usage, choices = chunk.get("usage") or self.usage, chunk.get("choices") or [None]
        choice = choices[0] if isinstance(choices, list) else choices
        if not isinstance(usage, dict) or not isinstance(choice, (dict, type(None))):
            raise ServerError(f"a chunk is not of the OpenAI form: {str(chunk)[:80]}")
        self.usage = usage
        if choice is None:
            return
        text, reason = choice.get("text") or "", choice.get("finish_reason")
        if not isinstance(text, str):
            raise ServerError(f"a chunk is not of the OpenAI form: {str(chunk)[:80]}")
        if text or choice.get("token_ids") or reason is None:
            self.token_times_s.append(now_s)
        self.texts.append(text)
        self.finish_reason = reason or self.finish_reason
        self.end_s = now_s


def base_url(url: str) -> str:
    """The URL without a final slash or /v1, with http://."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def error_message(body: Any) -> str:
    """The message of an OpenAI error body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


class CompletionClient:
    """Streams from `/v1/completions`; an async context manager.

    timeout_s: for connecting and for silence between chunks.
    """

    def __init__(
        self, url: str, *, timeout_s: float, max_connections: int, api_key: str | None = None
    ) -> None:
        self.url = base_url(url)
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ServerError(f"--url {url} is no URL: {error}") from error
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # No proxy of the environment in the measurement.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=limits,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> ServedModels:
        """Raises ServerError."""
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"no server at {self.url} ({reason}); start one, or correct --url") from error
        if response.status_code != 200:
            raise ServerError(f"{self.url}/v1/models: HTTP {response.status_code}: {_body_message(response)}")
        try:
            entries = response.json()["data"]
            parents = {entry["id"]: entry.get("parent") for entry in entries}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = "the answer is no OpenAI model list"
            raise ServerError(
                f"{self.url}/v1/models: {problem}; is this an OpenAI-compatible server?"
            ) from error
        return ServedModels(
            base=tuple(name for name, parent in parents.items() if not parent),
            adapters=tuple(name for name, parent in parents.items() if parent),
        )

    async def complete(self, body: dict[str, Any]) -> StreamedCompletion:
        """POST the body (with "stream": true) and read the stream.

        Raises ServerError for an HTTP error or a broken stream.
        """
        completion = StreamedCompletion(sent_s=time.perf_counter())
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise ServerError(f"HTTP {response.status_code}: {_body_message(response)}")
                async for now_s, data in _events(response):
                    completion.take(data, now_s)
        except httpx.TimeoutException as error:
            raise ServerError(f"timeout: {type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise ServerError(f"connection: {error or type(error).__name__}") from error
        if completion.finish_reason is None:
            raise ServerError("the stream ended without a finish_reason")
        if not completion.token_times_s:
            if not completion.usage.get("completion_tokens"):
                raise ServerError("the stream ended without a token")
            completion.token_times_s.append(completion.end_s)  # a token without text
        return completion


def _body_message(response: httpx.Response) -> str:
    try:
        return error_message(response.json())
    except ValueError:
        return response.text[:200]


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """(arrival, data) of events but [DONE]."""
    rest = b""
    async for part in response.aiter_bytes():
        now_s = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            try:
                chunk = json.loads(data)
            except ValueError:
                raise ServerError(f"an event is not JSON: {data[:80]!r}") from None
            if not isinstance(chunk, dict):
                raise ServerError(f"an event is no JSON object: {data[:80]!r}")
            yield now_s, chunk
