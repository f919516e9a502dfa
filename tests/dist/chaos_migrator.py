# SPDX-License-Identifier: Apache-2.0
"""Requests that are told to move, by POST /v1/migrate, while parts of the cluster are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx

_PAUSE_S = 0.3
_CALL_S = 120.0
_NUM_REQUESTS = 3


class Migrator:
    """Orders moves between two instances drawn from `rng`, by tokens and with KV in turn, until `stop`.

    moved: requests that were moved so, by kind.  complaints: orders that were not answered as they should.
    """

    def __init__(self, url: str, num_instances: int, rng: random.Random) -> None:
        self.moved: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._url, self._rng = url, rng
        self._instances = [f"instance-{number}" for number in range(num_instances)]
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        number = 0
        while not self._stopping:
            await asyncio.sleep(self._rng.random() * _PAUSE_S)
            source, target = self._rng.sample(self._instances, 2)
            await self._order(source, target, ("tokens", "kv")[number % 2])
            number += 1

    async def _order(self, source: str, target: str, kind: str) -> None:
        body = {"source": source, "target": target, "kind": kind, "num_requests": _NUM_REQUESTS}
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=_CALL_S, trust_env=False) as http:
                response = await http.post("/v1/migrate", json=body)
        except httpx.TimeoutException:
            self.complaints.append(f"no answer to an order to move within {_CALL_S:.0f} s")
        except httpx.TransportError:  # of a front end that was killed
            return
        else:
            if response.status_code == 200:
                self.moved[kind] += response.json()["moved"]
            # One that has just started knows none; one with as many connections as it may have takes no more.
            elif response.status_code != 503 and "is none of the instances" not in response.text:
                self.complaints.append(
                    f"an order to move was answered {response.status_code}: {response.text}"
                )
