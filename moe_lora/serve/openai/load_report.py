# SPDX-License-Identifier: Apache-2.0
"""The engine's load in an answer's header, as ORCA's report."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import Request

from moe_lora.core.errors import MoeLoraError
from moe_lora.serve.access import caller_of

from .endpoints import LOAD_FORMAT

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

REPORT = "endpoint-load-metrics"
FORMATS = ("TEXT", "JSON")
NAMES = {"kv_usage": "kv_cache_usage_perc", "num_waiting": "num_requests_waiting"}
"""Names of `EngineStats` fields."""
FRESH_S = 1.0
"""Age of figures until the next call."""
WAIT_S = 0.1
"""Longest wait for figures; later there is no report."""

logger = logging.getLogger(__name__)


class LoadReport:
    """The load of all instances, read once a second."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._figures: Mapping[str, float] = {}
        self._read_s = -FRESH_S
        self._reading: asyncio.Task[None] | None = None
        self._waits_until_s = 0.0
        self._has_logged = False

    async def header(self, given: str) -> dict[str, str]:
        """The header in the given format; empty for an unknown format, or without figures."""
        form = given.upper()
        if form not in FORMATS:
            if not self._has_logged:
                self._has_logged = True
                what = "%s: %.50r is not allowed, and such requests get no report; allowed are %s"
                logger.warning(what, LOAD_FORMAT, given, ", ".join(FORMATS))
            return {}
        figures = await self._current_figures()
        if not figures:
            return {}
        if form == "JSON":
            return {REPORT: f"JSON {json.dumps({'named_metrics': figures})}"}
        return {REPORT: "TEXT " + ", ".join(f"named_metrics.{name}={num}" for name, num in figures.items())}

    async def _current_figures(self) -> Mapping[str, float]:
        now_s = time.monotonic()
        if now_s < self._read_s + FRESH_S:
            return self._figures
        if self._reading is None:
            self._reading, self._waits_until_s = asyncio.create_task(self._read()), now_s + WAIT_S
        done, _ = await asyncio.wait({self._reading}, timeout=self._waits_until_s - now_s)
        return self._figures if done else {}

    async def _read(self) -> None:
        self._figures = {}
        try:
            with suppress(MoeLoraError):
                stats = await self._frontend.client.stats()
                self._figures = {name: float(getattr(stats, field)) for field, name in NAMES.items()}
        finally:
            self._read_s, self._reading = time.monotonic(), None


async def load_header(request: Request, frontend: Frontend) -> dict[str, str]:
    """The header with the recent load, if the caller may read /metrics."""
    if not caller_of(request.scope).is_admin:
        return {}
    if frontend.load_report is None:
        frontend.load_report = LoadReport(frontend)
    return await frontend.load_report.header(request.headers[LOAD_FORMAT])
