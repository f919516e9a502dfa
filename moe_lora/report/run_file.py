# SPDX-License-Identifier: Apache-2.0
"""The file of one replay: a summary, and arrays by request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .latency import ClientTiming, RequestRecord, SloTargets, avg_latency_ms
from .results import read_json

if TYPE_CHECKING:
    from rich.table import Table


PERCENTILES = (50, 90, 95, 99)
ATTAINED_SHARE = 0.9  # an adapter attains its SLO above this share


def summarize(records: Sequence[RequestRecord], duration_s: float, slo: SloTargets) -> dict[str, Any]:
    """Counts, rates per second, latencies in ms, SLO attainment; keys as in `vllm bench serve`.

    Null without data.  duration_s: to the last request's end.  Failed requests miss the SLO; interrupted
    requests count in `interrupted` only.
    """
    done = [record for record in records if record.timing is not None]
    timings = [record.timing for record in done if record.timing is not None]
    judged = [record for record in records if not record.interrupted]
    num_input = sum(record.input_tokens for record in done)
    num_output = sum(timing.num_output_tokens for timing in timings)
    num_good = sum(slo.met_by(timing) for timing in timings)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(judged) - len(done),
        "interrupted": len(records) - len(judged),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": num_good / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": max_concurrent(timings),
    }
    for name, values in _latencies(timings).items():
        result |= statistics(name, values)
    result["avg_latency_ms"] = avg_latency_ms(timings)
    result |= statistics("queue_ms", _present(record.queue_ms for record in done))
    result |= statistics("adapter_load_ms", _present(record.adapter_load_ms for record in done))
    result |= statistics("kv_load_ms", _present(record.kv_load_ms for record in done))
    result["p99_send_delay_ms"] = _percentile([(r.sent_s - r.arrival_s) * 1e3 for r in judged], 99)
    return result | _attainment(judged, num_good, slo) | _answers(done)


def _latencies(timings: Sequence[ClientTiming]) -> dict[str, list[float]]:
    return {
        "ttft_ms": [timing.ttft_ms for timing in timings],
        "tpot_ms": _present(timing.tpot_ms for timing in timings),
        "itl_ms": [itl for timing in timings for itl in timing.itl_ms],
        "e2el_ms": [timing.e2el_ms for timing in timings],
        "tpt_ms": [timing.tpt_ms for timing in timings],
        "decode_ttft_ms": _present(timing.decode_ttft_ms for timing in timings),
    }


def statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """mean_, median_, std_ (population) and pNN_ of the values; None without values."""
    found = {
        f"mean_{name}": float(np.mean(values)) if values else None,
        f"median_{name}": _percentile(values, 50),
        f"std_{name}": float(np.std(values)) if values else None,
    }
    return found | {f"p{percentile}_{name}": _percentile(values, percentile) for percentile in PERCENTILES}


def _percentile(values: Sequence[float], percentile: float) -> float | None:
    return float(np.percentile(values, percentile)) if values else None


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def max_concurrent(timings: Sequence[ClientTiming]) -> int:
    """Most requests in flight at one moment."""
    events = [(timing.sent_s, 1) for timing in timings] + [(timing.end_s, -1) for timing in timings]
    under_way = most = 0
    for _, step in sorted(events):
        under_way += step
        most = max(most, under_way)
    return most


def attainment_by_adapter(
    records: Iterable[RequestRecord], met: Callable[[ClientTiming], bool]
) -> dict[str, float]:
    """Share of each adapter's requests within the SLO."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        if record.adapter is not None and not record.interrupted:
            outcomes[record.adapter].append(record.timing is not None and met(record.timing))
    return {adapter: sum(values) / len(values) for adapter, values in sorted(outcomes.items())}


def _attained(shares: dict[str, float]) -> float | None:
    return sum(share > ATTAINED_SHARE for share in shares.values()) / len(shares) if shares else None


def _attainment(judged: Sequence[RequestRecord], num_good: int, slo: SloTargets) -> dict[str, Any]:
    timings = [record.timing for record in judged if record.timing is not None]
    reports_decode = bool(timings) and all(timing.decode_ttft_ms is not None for timing in timings)
    decode = attainment_by_adapter(judged, slo.met_in_decode_by) if reports_decode else {}
    shares = attainment_by_adapter(judged, slo.met_by)
    return {
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        "slo_attainment": num_good / len(judged) if judged else None,
        "slo_attainment_adapters": _attained(shares),
        "slo_attainment_adapters_decode_ttft": _attained(decode),
        "num_adapters": len(shares),
    }


def _answers(done: Sequence[RequestRecord]) -> dict[str, Any]:
    checked = [record.exact for record in done if record.exact is not None]
    return {
        "checked_answers": len(checked),
        "exact_answers": sum(checked) / len(checked) if checked else None,
    }


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
    """Content of `--save-result`: `summarize`'s keys, label, date, kind, config, env and ARRAYS.

    Arrays in seconds, null if missing.
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


ARRAYS = tuple(_arrays(()))


def without_arrays(run: dict[str, Any]) -> dict[str, Any]:
    """The summary without arrays, config, env and kind."""
    return {key: value for key, value in run.items() if key not in (*ARRAYS, "config", "env", "kind")}


def read_run(path: str | Path) -> dict[str, Any]:
    """A file of `moe-lora replay --save-result`.  Raises ValueError."""
    run = read_json(path)
    missing = [key for key in ("label", "duration", *ARRAYS) if not isinstance(run, dict) or key not in run]
    if missing:
        raise ValueError(f"{path}: no {missing[0]!r} in it; give a file of moe-lora replay --save-result")
    return run


# (heading, key of the result, format)
METRICS: tuple[tuple[str, str, str], ...] = (
    ("Requests completed", "completed", "{:.0f}"),
    ("Requests failed", "failed", "{:.0f}"),
    ("Requests interrupted", "interrupted", "{:.0f}"),
    ("Duration", "duration", "{:.1f} s"),
    ("Requests per second", "request_throughput", "{:.2f}"),
    ("Requests per second within SLO (goodput)", "request_goodput", "{:.2f}"),
    ("Output tokens per second", "output_throughput", "{:.1f}"),
    ("TTFT P50", "p50_ttft_ms", "{:.1f} ms"),
    ("TTFT P95", "p95_ttft_ms", "{:.1f} ms"),
    ("Decode TTFT P95 (without prefill)", "p95_decode_ttft_ms", "{:.1f} ms"),
    ("TPOT mean", "mean_tpot_ms", "{:.2f} ms"),
    ("TPOT P95", "p95_tpot_ms", "{:.2f} ms"),
    ("ITL P99", "p99_itl_ms", "{:.2f} ms"),
    ("E2E P50", "p50_e2el_ms", "{:.1f} ms"),
    ("E2E P95", "p95_e2el_ms", "{:.1f} ms"),
    ("TPT mean (E2E / output tokens)", "mean_tpt_ms", "{:.2f} ms"),
    ("Average latency (sum E2E / sum tokens)", "avg_latency_ms", "{:.2f} ms"),
    ("Requests within SLO", "slo_attainment", "{:.1%}"),
    ("Adapters with > 90 % of requests within SLO", "slo_attainment_adapters", "{:.1%}"),
    ("  the same by decode TTFT", "slo_attainment_adapters_decode_ttft", "{:.1%}"),
    ("Exact answers", "exact_answers", "{:.1%}"),
)
_ALWAYS_SHOWN = frozenset({"completed", "failed", "slo_attainment_adapters"})


def shown(result: dict[str, Any], key: str, form: str) -> str:
    """The value as text, or a dash."""
    value = result.get(key)
    return "–" if value is None else form.format(value)


def rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(heading, a text per result) for each metric with a value."""
    found = []
    for heading, key, form in METRICS:
        absent = all(result.get(key) is None for result in results)
        if key == "interrupted":
            absent = not any(result.get(key) for result in results)
        if absent and key not in _ALWAYS_SHOWN:
            continue
        found.append((heading, [shown(result, key, form) for result in results]))
    return found


def summary_table(results: Sequence[dict[str, Any]]) -> Table:
    """One column per result."""
    from rich.table import Table
    from rich.text import Text

    goals = {f"TTFT {one['slo_ttft_s']:g} s, TPOT {one['slo_tpot_s']:g} s" for one in results}
    table = Table(
        title=f"SLO: {goals.pop() if len(goals) == 1 else 'of each run its own'}", title_justify="left"
    )
    table.add_column("")
    for result in results:
        table.add_column(Text(str(result.get("label", ""))), justify="right")
    for heading, texts in rows(results):
        table.add_row(heading, *texts)
    return table
