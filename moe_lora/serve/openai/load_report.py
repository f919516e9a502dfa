# SPDX-License-Identifier: Apache-2.0
"""The engine's load in a header of an answer, for gateways: ORCA's report, with vLLM's names."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import Request

from moe_lora.core.errors import EngineDeadError
from moe_lora.serve.access import caller_of
from moe_lora.serve.http_errors import bad_request

from .endpoints import LOAD_FORMAT

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

REPORT = "endpoint-load-metrics"
FORMATS = ("TEXT", "JSON")
NAMES = {"kv_usage": "kv_cache_usage_perc", "num_waiting": "num_requests_waiting"}
"""Of fields of `EngineStats`."""


async def load_header(request: Request, frontend: Frontend) -> dict[str, str]:
    """The header with the load at the request's start; none without the rights for /metrics.

    Raises ApiError for an unknown format.
    """
    given = request.headers[LOAD_FORMAT]
    form = given.upper()
    if form not in FORMATS:
        raise bad_request(f"{LOAD_FORMAT}: {given[:50]!r} is not allowed; allowed are {', '.join(FORMATS)}")
    if not caller_of(request.scope).is_admin:
        return {}
    with suppress(EngineDeadError):
        stats = await frontend.client.stats()
        values = {name: float(getattr(stats, field)) for field, name in NAMES.items()}
        if form == "JSON":
            return {REPORT: f"JSON {json.dumps({'named_metrics': values})}"}
        return {REPORT: "TEXT " + ", ".join(f"named_metrics.{name}={num}" for name, num in values.items())}
    return {}
