# SPDX-License-Identifier: Apache-2.0
"""Clients that stream other adapters' answers beside an adapter in trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx

from .demo_server import DemoServer

NEIGHBOURS = ("upper", "reverse", "double")


def body_of(model: str) -> dict:
    return {"model": model, "prompt": "hello=", "max_tokens": 20, "temperature": 0}


def ask(server: DemoServer, model: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body_of(model), trust_env=False)


def stream(server: DemoServer, model: str) -> tuple[int, str]:
    """Status and text of a streamed answer.  After an error the text is its message."""
    body = body_of(model) | {"stream": True}
    where = f"{server.url}/v1/completions"
    with httpx.stream("POST", where, json=body, trust_env=False) as answer:
        if answer.status_code != 200:
            return answer.status_code, json.loads(answer.read())["error"]["message"]
        *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    found = [json.loads(event) for event in events]
    errors = [event["error"]["message"] for event in found if "error" in event]
    text = "".join(choice["text"] for event in found for choice in event.get("choices", []))
    if errors or last != "[DONE]":
        return 200, f"error in the stream: {errors or last!r} after {text!r}"
    return 200, text


class Client(threading.Thread):
    """Repeats its work until `stop`."""

    def __init__(self, work: Callable[[], tuple[int, str]]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.answers: list[tuple[int, str]] = []
        self.over = False
        self.start()

    def run(self) -> None:
        while not self.over:
            try:
                self.answers.append(self._work())
            except httpx.TransportError as error:
                self.answers.append((0, repr(error)))

    def stop(self) -> list[tuple[int, str]]:
        self.over = True
        self.join()
        return self.answers


class Neighbours:
    """One client for each neighbour.  `stop` fails on any error and on any other text."""

    def __init__(self, server: DemoServer) -> None:
        self._right = {name: ask(server, name).json()["choices"][0]["text"] for name in NEIGHBOURS}
        self._clients = {
            name: Client(lambda name=name: stream(server, name))  # type: ignore[misc]
            for name in NEIGHBOURS
        }

    def num_answers(self) -> int:
        """The least number of answers of a client."""
        return min(len(client.answers) for client in self._clients.values())

    def stop(self) -> None:
        for name, client in self._clients.items():
            answers, right = client.stop(), (200, self._right[name])
            assert answers, f"{name} was never asked"
            assert set(answers) == {right}, (name, [one for one in answers if one != right][:2])
