# SPDX-License-Identifier: Apache-2.0
"""Requests sent to an engine at their times, and figures of the answers."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_lora.api import LLM
from moe_lora.core.request import EngineStats, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.workload.replay_plan import TurnRequest


@dataclass(eq=False)
class Answered:
    """One request's stamps and tokens."""

    sent_s: float
    output_tokens: int
    stamps_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last: TokenOutput | None = None


def replay(llm: LLM, timed: Sequence[tuple[float, TurnRequest]]) -> list[Answered]:
    """Send each request at its time; returns the answers."""
    vocab, start_s = llm.info.vocab_size, time.monotonic()
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    answers = []
    for arrival_s, request in timed:
        time.sleep(max(0.0, start_s + arrival_s - time.monotonic()))
        answer = Answered(time.monotonic() - start_s, len(request.answer))
        answers.append(answer)
        asked = GenerateRequest(
            request_id=str(request.index),
            prompt_token_ids=tuple(_token(number, vocab) for number in request.prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=len(request.answer), ignore_eos=True),
            adapter=request.adapter,
        )
        llm.client.submit(asked, _taker(answer, start_s, done))
    for _ in timed:
        problem = done.get()
        if problem is not None:
            raise problem
    return answers


def _taker(answer: Answered, start_s: float, done: queue.SimpleQueue[Exception | None]) -> Any:
    def take(item: TokenOutput | Exception) -> None:
        if isinstance(item, Exception):
            done.put(item)
            return
        answer.tokens += item.token_ids
        answer.stamps_s += [time.monotonic() - start_s] * len(item.token_ids)
        if item.finish_reason is not None:
            answer.last = item
            done.put(RuntimeError(item.error) if item.finish_reason == "error" else None)

    return take


def _token(number: int, vocab_size: int) -> int:
    """A vocabulary token for a plan's token, pseudo-random and equal for equal tokens."""
    return (number * 2654435761 >> 7) % vocab_size


def agreement(first: Sequence[Answered], second: Sequence[Answered]) -> float:
    """Share of requests with equal tokens."""
    return float(np.mean([one.tokens == other.tokens for one, other in zip(first, second, strict=True)]))


def figures(
    answers: Sequence[Answered], stats: EngineStats, samples: Sequence[EngineStats]
) -> dict[str, Any]:
    """The columns of the simulated part."""
    timings = [a.last.timing for a in answers if a.last is not None and a.last.timing is not None]
    ttft_s = [a.stamps_s[0] - a.sent_s for a in answers]
    tpot_s = [
        (a.stamps_s[-1] - a.stamps_s[0]) / (len(a.stamps_s) - 1) for a in answers if len(a.stamps_s) > 1
    ]
    adapters = stats.adapter_hits + stats.adapter_misses
    return {
        "num_requests": len(answers),
        "ttft_ms": _mean_ms(ttft_s),
        "p99_ttft_ms": 1e3 * float(np.percentile(ttft_s, 99)),
        "queue_ms": _mean_ms([t.queue_s for t in timings]),
        "adapter_cold_ms": _mean_ms([t.adapter_load_s for t in timings]),
        "history_cold_ms": _mean_ms([t.kv_load_s for t in timings]),
        "prefill_ms": _mean_ms([t.prefill_s for t in timings]),
        "tpot_ms": _mean_ms(tpot_s),
        "requests_per_s": len(answers) / (max(a.stamps_s[-1] for a in answers) - answers[0].sent_s),
        "adapter_hit_rate": stats.adapter_hits / max(1, adapters),
        "kv_device_hit_rate": stats.kv_device_hit_tokens / max(1, stats.kv_query_tokens),
        "kv_host_hit_rate": stats.kv_host_hit_tokens / max(1, stats.kv_query_tokens),
        "invalid_kv_share": _mean([s.device_kv_invalid_bytes / max(1, s.device_kv_bytes) for s in samples]),
        "device_usage": _mean(
            [(s.device_kv_bytes + s.device_adapter_bytes) / s.device_bytes for s in samples]
        ),
        "host_usage": _mean(
            [(s.host_kv_bytes + s.host_adapter_bytes) / max(1, s.host_bytes) for s in samples]
        ),
        "swapped_in_bytes": stats.swapped_in_bytes,
        "swapped_out_bytes": stats.swapped_out_bytes,
        "num_preemptions": stats.num_preemptions,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * _mean(seconds)
