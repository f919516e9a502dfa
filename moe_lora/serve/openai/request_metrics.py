# SPDX-License-Identifier: Apache-2.0
"""vLLM's `metrics` of a request, beside the usage."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from .generation import Delta, Generation


class MeasuredGeneration(Generation):
    """A generation with first and last token times."""

    _first_s: float | None = None
    _last_s = 0.0

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        async with super().deltas() as deltas:
            yield self._noted(deltas)

    async def _noted(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            if delta.token_ids:
                self._last_s = time.monotonic()
                self._first_s = self._first_s or self._last_s
            yield delta

    def beside_usage(self) -> dict[str, Any]:
        """Milliseconds as in vLLM: TTFT starts after the queue."""
        num = self._completion_tokens.total()
        if self._first_s is None or not self._timings:
            return {"metrics": {}}
        first = 1e3 * max(one.adapter_load_s + one.kv_load_s + one.prefill_s for one in self._timings)
        decode = 1e3 * (self._last_s - self._first_s)
        found = {
            "time_to_first_token_ms": first,
            "generation_time_ms": decode,
            "queue_time_ms": 1e3 * max(one.queue_s for one in self._timings),
        }
        if num > 1:
            found["mean_itl_ms"] = decode / (num - 1)
        if first + decode > 0:
            found["tokens_per_second"] = 1e3 * num / (first + decode)
        return {"metrics": {name: round(value, 3) for name, value in found.items()}}
