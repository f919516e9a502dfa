# SPDX-License-Identifier: Apache-2.0
"""Idle connections outlive clients' pauses: no request is lost to a connection that the server closed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from urllib.parse import urlsplit

import pytest

BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """One request over an open connection; whether it was answered."""
    try:
        writer.write(REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        await reader.readexactly(length)
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    return head.startswith(b"http/1.1 200")


async def num_lost(url: str, num_connections: int, pauses_s: Sequence[float]) -> int:
    """Open the connections, send a burst over all of them before and after each pause; what got no answer."""
    place = urlsplit(url)
    pairs = await asyncio.gather(
        *(asyncio.open_connection(place.hostname, place.port) for _ in range(num_connections))
    )
    lost = 0
    try:
        for pause_s in (0.0, *pauses_s):
            await asyncio.sleep(pause_s)
            lost += (await asyncio.gather(*(ask(*pair) for pair in pairs))).count(False)
    finally:
        for _, writer in pairs:
            writer.close()
    return lost


def test_a_connection_that_was_idle_for_longer_than_clients_keep_one_still_takes_requests(demo):
    assert asyncio.run(num_lost(demo.url, 100, [5.5])) == 0


@pytest.mark.slow
def test_bursts_over_many_connections_lose_no_request(demo):
    rng = random.Random(0)  # about httpx's and uvicorn's own limit of 5 s, where both sides close
    assert asyncio.run(num_lost(demo.url, 300, [rng.uniform(4.9, 5.1) for _ in range(19)])) == 0
