"""Many request records to one flat dictionary, with the keys of `vllm bench serve` and a few more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .latency import RequestTiming, SloTargets, avg_latency_ms
from .records import RequestRecord

PERCENTILES = (50, 90, 95, 99)
ATTAINED_SHARE = 0.9  # an adapter attains its SLO if more than this share of its requests meets it


def summarize(records: Sequence[RequestRecord], duration_s: float, slo: SloTargets) -> dict[str, Any]:
    """Counts, rates per second, latencies in ms, SLO attainment; null where nothing was there to measure.

    duration_s: from the run's start to the end of its last request.  Failed requests miss the SLO;
    interrupted ones are counted in `interrupted` and nowhere else.
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


def _latencies(timings: Sequence[RequestTiming]) -> dict[str, list[float]]:
    return {
        "ttft_ms": [timing.ttft_ms for timing in timings],
        "tpot_ms": _present(timing.tpot_ms for timing in timings),
        "itl_ms": [itl for timing in timings for itl in timing.itl_ms],
        "e2el_ms": [timing.e2el_ms for timing in timings],
        "tpt_ms": [timing.tpt_ms for timing in timings],
        "decode_ttft_ms": _present(timing.decode_ttft_ms for timing in timings),
    }


def statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """mean_, median_, std_ (population) and pNN_ of the values under that name; None without values."""
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


def max_concurrent(timings: Sequence[RequestTiming]) -> int:
    """The most requests under way at one moment."""
    events = [(timing.sent_s, 1) for timing in timings] + [(timing.end_s, -1) for timing in timings]
    under_way = most = 0
    for _, step in sorted(events):
        under_way += step
        most = max(most, under_way)
    return most


def attainment_by_adapter(
    records: Iterable[RequestRecord], met: Callable[[RequestTiming], bool]
) -> dict[str, float]:
    """Share of each adapter's requests that met the SLO; requests to the base model are left out."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        if record.adapter is not None and not record.interrupted:
            outcomes[record.adapter].append(record.timing is not None and met(record.timing))
    return {adapter: sum(values) / len(values) for adapter, values in sorted(outcomes.items())}


def _attained(shares: dict[str, float]) -> float | None:
    if not shares:
        return None
    return sum(share > ATTAINED_SHARE for share in shares.values()) / len(shares)


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
