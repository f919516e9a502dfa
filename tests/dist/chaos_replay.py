# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP while parts of the server are killed, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from .chaos_model import NUM_TOKENS, Question, next_question
from .chaos_publisher import ChangingQuestion, Publisher

NUM_AT_ONCE = 12
SHIFT = 25
"""After so many requests other adapters are popular."""
CHANGING_SHARE = 0.15
"""Of requests for the adapter that is replaced meanwhile."""
_PAUSE_S, _PAUSE_REFUSED_S = 0.02, 0.2
REQUEST_S = 150.0
"""A request that takes longer counts as one that hangs."""


@dataclass
class Outcomes:
    """What became of the requests.

    counts: by kind, `answered` (rightly), `refused` (503 with an error body, before or within the answer),
    `cut` (the connection broke while a front end was killed).  complaints: all else, in words.
    cuts: when the requests that were cut began and ended.
    """

    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    cuts: list[tuple[float, float]] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return sum(self.counts.values()) + len(self.complaints)

    def wrong_cuts(self, times_s: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Connections that broke when no front end was killed: when they began and ended.

        times_s: from when to when they may, on the monotonic clock.
        """
        return [
            (began_s, ended_s)
            for began_s, ended_s in self.cuts
            if not any(began_s - 1.0 <= until_s and from_s <= ended_s for from_s, until_s in times_s)
        ]


class Replay:
    """Asks `questions`, and those to the publisher's adapter, in an order drawn from `seed`, until `stop` was
    called and `least` were asked.
    """

    def __init__(
        self,
        url: str,
        questions: dict[str | None, list[Question]],
        publisher: Publisher,
        least: int,
        seed: int,
    ) -> None:
        self.publisher = publisher
        self.outcomes = Outcomes()
        self._url, self._questions, self.least = url, questions, least
        self._rng = random.Random(seed)
        self.num_asked = 0
        self._stopping = False

    def stop(self) -> None:
        """Ask no more than `least`."""
        self._stopping = True

    async def run(self) -> None:
        """Until all that were asked have ended."""
        # A connection for each request, so that front ends behind one port get them in turn.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=REQUEST_S, trust_env=False, limits=limits
        ) as http:
            await asyncio.gather(*(self._worker(http) for _ in range(NUM_AT_ONCE)))

    async def _worker(self, http: httpx.AsyncClient) -> None:
        while not self._stopping or self.num_asked < self.least:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            kind = await self._ask(http, number, self._question(number))
            await asyncio.sleep(_PAUSE_S if kind == "answered" else _PAUSE_REFUSED_S)

    def _question(self, number: int) -> Question | ChangingQuestion:
        if self._rng.random() < CHANGING_SHARE:
            return self.publisher.question(self._rng)
        return next_question(self._questions, number, self._rng, SHIFT)

    async def _ask(self, http: httpx.AsyncClient, number: int, question: Question | ChangingQuestion) -> str:
        """One request; every other one is streamed."""
        body = {
            "model": question.adapter or "base",
            "prompt": list(question.prompt),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        began_s = time.monotonic()
        try:
            asking = _streamed(http, body) if number % 2 else _whole(http, body)
            tokens, error = await asyncio.wait_for(asking, REQUEST_S)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            return self._complain(number, question, f"no end within {REQUEST_S:.0f} s")
        except httpx.TransportError:
            self.outcomes.cuts.append((began_s, time.monotonic()))
            return self._count("cut")
        except Exception as wrong:
            return self._complain(number, question, repr(wrong))
        right = question.right(began_s, time.monotonic())
        if not any(tokens == list(one[: len(tokens)] if error else one) for one in right):
            return self._complain(number, question, f"{tokens} is not {right}")
        if error is None:
            return self._count("answered")
        if error.get("code") == 404 and question.may_be_absent(began_s, time.monotonic()):
            return self._count("refused")
        if (error.get("code"), error.get("type")) != (503, "ServiceUnavailableError") or not error.get(
            "message"
        ):
            return self._complain(number, question, f"failed with {error}")
        return self._count("refused")

    def _count(self, kind: str) -> str:
        self.outcomes.counts[kind] += 1
        return kind

    def _complain(self, number: int, question: Question | ChangingQuestion, what: str) -> str:
        self.outcomes.complaints.append(f"request {number} for {question.adapter or 'base'}: {what}")
        return "wrong"


Answer = tuple[list[int], dict[str, Any] | None]
"""Tokens, and the error that ended them."""


async def _whole(http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        return [], _error(response)
    [choice] = response.json()["choices"]
    return choice["token_ids"], None


async def _streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    tokens: list[int] = []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            return [], _error(response)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return tokens, event["error"]
            tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    return tokens, None


def _error(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code, (response.status_code, error)
    return error
