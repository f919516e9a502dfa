# SPDX-License-Identifier: Apache-2.0
"""Calls drawn by schemathesis from a server's OpenAPI document, valid and invalid.

    python -m bench.hostile.openapi_calls PORT NUM_CALLS

Prints a line of JSON per call: the text of its request, a character per byte.  Run before the attack: drawing
a call takes more processor time than answering.  Deterministic.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

NUM_A_TURN = 4
"""Calls of one operation before the next."""


def draw(document: dict[str, Any], found: Callable[[bytes], None], goes_on: Callable[[], bool]) -> None:
    """Calls `found` with requests of each operation in turn, until `goes_on` returns False."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [schema[path][method] for path, methods in document["paths"].items() for method in methods]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    cases = [one.as_strategy(generation_mode=mode) for one, mode in itertools.product(operations, modes)]
    for turn in itertools.count():
        for some in cases:
            if not goes_on():
                return
            try:
                _draw_some(some, turn, found, goes_on)
            except Unsatisfiable:
                continue  # an operation without inputs: no call can be invalid


def _draw_some(cases: Any, turn: int, found: Callable[[bytes], None], goes_on: Callable[[], bool]) -> None:
    @seed(turn)
    @settings(
        max_examples=NUM_A_TURN,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def one(case: Any) -> None:
        if goes_on() and (request := request_of(case)) is not None:
            found(request)

    one()


def request_of(case: Any) -> bytes | None:
    """The case as sent; None for a header that this client can't write."""
    try:
        made = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
        body = made.body if isinstance(made.body, bytes) else str(made.body or "").encode()
        headers = {**made.headers, "Host": "localhost", "Connection": "close"}
        if body or made.method != "GET":
            headers["Content-Length"] = str(len(body))
        lines = [f"{case.method} {made.path_url} HTTP/1.1"]
        lines += [f"{key}: {_text(value)}" for key, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
    except (requests.RequestException, UnicodeError):
        return None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def main(port: int, num_calls: int) -> None:
    with urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=60) as answer:
        document = json.load(answer)
    found: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        draw(document, found.append, lambda: len(found) < num_calls)
    for request in found:
        print(json.dumps(request.decode("latin-1")))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
