# SPDX-License-Identifier: Apache-2.0
"""Measurement reports.  `replay` needs httpx and `html` matplotlib: import them by name."""

from __future__ import annotations

from .latency import ClientTiming, RequestRecord, SloTargets, avg_latency_ms
from .results import append_result, environment, read_results, write_json
from .run_file import summarize

__all__ = [
    "ClientTiming",
    "RequestRecord",
    "SloTargets",
    "append_result",
    "avg_latency_ms",
    "environment",
    "read_results",
    "summarize",
    "write_json",
]
