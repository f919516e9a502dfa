# SPDX-License-Identifier: Apache-2.0
"""Ordinary streams beside an attack, in their own process, with waits between tokens.

    python -m bench.hostile.ordinary PORT NUM_STREAMS ADDRESS

Prints a line of JSON per finished request: start and end (seconds of `time.monotonic`), status, wait for the
first token, time per token after that, and longest wait between two tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

MODELS = ("rot13", "reverse", "upper", "leet")
PROMPT = "the quick brown fox:"
NUM_TOKENS = 48
GIVE_UP_S = 120.0


async def request(port: int, address: str, model: str) -> dict[str, Any]:
    """One streamed completion.  status 0: the connection failed."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    body = json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    began_s, times_s, status = time.monotonic(), [], 0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            status = int((await reader.readline()).split()[1])
            async for line in reader:
                if line.startswith(b'data: {"id"'):
                    times_s.append(time.monotonic())
                elif b'"error"' in line:
                    status = 599 if status == 200 else status
        finally:
            writer.close()
    except (OSError, IndexError, asyncio.LimitOverrunError):
        status = 0
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    return {
        "began_s": began_s,
        "ended_s": time.monotonic(),
        "status": status,
        "num_tokens": len(times_s),
        "ttft_s": times_s[0] - began_s if times_s else None,
        "tpot_s": sum(gaps_s) / len(gaps_s) if gaps_s else None,
        "longest_s": max(gaps_s, default=0.0),
    }


async def stream(port: int, address: str, model: str) -> None:
    """One request after another, for ever."""
    while True:
        began_s = time.monotonic()
        try:
            found = await asyncio.wait_for(request(port, address, model), GIVE_UP_S)
        except asyncio.TimeoutError:
            found = {"began_s": began_s, "ended_s": time.monotonic(), "status": 0, "num_tokens": 0}
            found |= {"ttft_s": None, "tpot_s": None, "longest_s": GIVE_UP_S}
        print(json.dumps(found), flush=True)
        if found["status"] != 200:
            await asyncio.sleep(0.05)


async def main(port: int, num_streams: int, address: str) -> None:
    await asyncio.gather(*(stream(port, address, MODELS[n % len(MODELS)]) for n in range(num_streams)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
