# SPDX-License-Identifier: Apache-2.0
"""Sends requests from where it runs: {url, bodies, pause_s} on stdin, [[status, answer], ...] on stdout.

key: an API key, besides.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

NUM_AT_ONCE = 4


def send(http: httpx.Client, body: dict[str, Any], pause_s: float) -> tuple[int, Any]:
    """Status, and the answer's token ids or what went wrong."""
    time.sleep(pause_s)
    response = http.post("/v1/completions", json=body)
    if response.is_success:
        return response.status_code, response.json()["choices"][0]["token_ids"]
    return response.status_code, response.json()["error"]["message"]


def main() -> None:
    work = json.load(sys.stdin)
    headers = {"Authorization": f"Bearer {work['key']}"} if "key" in work else {}
    with (
        httpx.Client(base_url=work["url"], timeout=300, trust_env=False, headers=headers) as http,
        ThreadPoolExecutor(NUM_AT_ONCE) as pool,
    ):
        pause_s = work["pause_s"]
        json.dump(list(pool.map(lambda body: send(http, body, pause_s), work["bodies"])), sys.stdout)


if __name__ == "__main__":
    main()
