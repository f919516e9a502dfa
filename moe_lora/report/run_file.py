"""The file that one replay leaves: a summary, and arrays with one entry a request in plan order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .latency import SloTargets
from .records import RequestRecord
from .results import read_json
from .summary import summarize

ARRAYS = (
    "adapters",
    "arrival_times",
    "start_times",
    "ttfts",
    "itls",
    "e2els",
    "decode_ttfts_ms",
    "input_lens",
    "output_lens",
    "errors",
    "exact",
)


def run_result(
    records: Sequence[RequestRecord],
    duration_s: float,
    slo: SloTargets,
    *,
    label: str,
    config: dict[str, Any],
    env: dict[str, Any],
    kind: str = "measured",
    stopped_early: bool = False,
) -> dict[str, Any]:
    """What `--save-result` writes: `summarize`'s keys, label, date, kind, config, env and ARRAYS.

    kind: one of `results.KINDS`.  stopped_early: the user ended the run before its plan did.
    Arrays in seconds, as vLLM's client has them, null for a request without the value.
    """
    errors = Counter(record.error for record in records if record.error is not None)
    return {
        "label": label,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kind": kind,
        "stopped_early": stopped_early,
        **summarize(records, duration_s, slo),
        "error_counts": dict(errors.most_common()),
        "config": config,
        "env": env,
        **_arrays(records),
    }


def _arrays(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    timings = [record.timing for record in records]
    return {
        "adapters": [record.adapter for record in records],
        "arrival_times": [record.arrival_s for record in records],
        "start_times": [record.sent_s for record in records],
        "ttfts": [timing and timing.ttft_ms / 1e3 for timing in timings],
        "itls": [[itl_ms / 1e3 for itl_ms in timing.itl_ms] if timing else [] for timing in timings],
        "e2els": [timing and timing.e2el_ms / 1e3 for timing in timings],
        "decode_ttfts_ms": [timing and timing.decode_ttft_ms for timing in timings],
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [timing.num_output_tokens if timing else 0 for timing in timings],
        "errors": [record.error or "" for record in records],
        "exact": [record.exact for record in records],
    }


def without_arrays(run: dict[str, Any]) -> dict[str, Any]:
    """The summary alone, for JSON lines: no arrays, no config and env (they stand beside it there)."""
    return {key: value for key, value in run.items() if key not in (*ARRAYS, "config", "env", "kind")}


def read_run(path: str | Path) -> dict[str, Any]:
    """A file written by `moe-lora replay --save-result`. Raises ValueError if it is something else."""
    run = read_json(path)
    missing = [key for key in ("label", "duration", *ARRAYS) if not isinstance(run, dict) or key not in run]
    if missing:
        raise ValueError(f"{path}: no {missing[0]!r} in it; give a file of moe-lora replay --save-result")
    return run
