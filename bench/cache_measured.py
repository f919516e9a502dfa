"""The measured cells of bench_cache: a small model, real swaps between two arenas in memory.

Every policy answers the same requests at the same times; all of a cell in one run, one after the other.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_lora.api import LLM
from moe_lora.core.request import EngineStats, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.workload.conversations import DialogueShape, TurnRequest, dialogues
from moe_lora.workload.popularity import zipf

from .random_model import QUICK, TINY, ModelSize, write_adapters, write_model

# Lengths and pauses of the simulated applications, divided by about 4 and 15: a turn takes as long here.
SHAPES = {
    "chatbots": DialogueShape(
        prefix_tokens=16,
        turns=5,
        question_tokens=48,
        answer_tokens=16,
        think_s=2.0,
        spread=0.8,
        max_tokens=768,
    ),
    "translations": DialogueShape(
        prefix_tokens=64, turns=1, question_tokens=16, answer_tokens=8, think_s=1.0, max_tokens=256
    ),
    "agents": DialogueShape(
        prefix_tokens=192, turns=10, question_tokens=32, answer_tokens=8, think_s=0.7, max_tokens=1024
    ),
}
ZIPF_S = 1.0
WARM_SHARE = 0.25
SHARES_OF_CAPACITY = (0.5, 1.2)
TIME_UNIT_S = 4.0
"""FastLibra's, since time runs 15 times faster here."""
STATIC_SHARES = (0.2, 0.4)


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """load_gb_per_s: what copies are slowed to, so that an adapter takes a few steps, as over PCIe."""

    size: ModelSize
    num_adapters: int
    arena_mb: float
    host_arena_mb: float
    duration_s: float
    num_calibration: int = 48
    load_gb_per_s: float = 0.2
    eager: bool = False
    applications: tuple[str, ...] = tuple(SHAPES)


FULL_PLAN = MeasuredPlan(size=QUICK, num_adapters=40, arena_mb=14.0, host_arena_mb=64.0, duration_s=14.0)
TINY_PLAN = MeasuredPlan(
    size=TINY,
    num_adapters=6,
    arena_mb=0.8,
    host_arena_mb=2.0,
    duration_s=0.7,
    num_calibration=8,
    eager=True,
    applications=("translations",),
)


@dataclass(eq=False)
class Answered:
    """One request's stamps and tokens."""

    sent_s: float
    output_tokens: int
    stamps_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last: TokenOutput | None = None


def run_measured(
    plan: MeasuredPlan, policies: Sequence[str], folder: Path
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config, result) of each application, rate and policy.

    Rates are shares of the throughput that the first policy reaches when all requests come at once.
    """
    model = write_model(folder / "model", plan.size)
    adapters = dict(write_adapters(folder, plan.size, model, plan.num_adapters, experts=False))
    for application in plan.applications:
        shape = SHAPES[application]
        names = zipf(list(adapters), ZIPF_S)
        flood = dialogues(shape, names, rate_per_s=plan.num_calibration / 2, duration_s=30.0)
        at_once = [(0.0, request) for request in flood[: plan.num_calibration]]
        with _engine(plan, model, adapters, {"cache_policy": policies[0]}) as llm:
            capacity = len(at_once) / max(a.stamps_s[-1] for a in _replay(llm, at_once))
        for share in SHARES_OF_CAPACITY:
            rate = share * capacity
            requests = dialogues(shape, names, rate_per_s=rate, duration_s=plan.duration_s)
            timed = [(request.arrival_s, request) for request in requests]
            first: list[Answered] | None = None
            for policy in policies:
                results = {
                    name: _measure(plan, model, adapters, settings, timed)
                    for name, settings in _settings(policy, plan).items()
                }
                best = min(results, key=lambda name: results[name][0]["ttft_ms"])
                result, answers = results[best]
                first = first or answers
                result["same_answers"] = _agreement(first, answers)
                result["settings"] = {name: found["ttft_ms"] for name, (found, _) in results.items()}
                yield _config(plan, application, share, rate, policy, best), result


def _settings(policy: str, plan: MeasuredPlan) -> dict[str, dict[str, Any]]:
    """Engine settings by what a policy's setting is called."""
    if policy == "static":
        return {
            f"{share:g}": {"cache_policy": policy, "kv_cache_gb": (1 - share) * plan.arena_mb / 1e3}
            for share in STATIC_SHARES
        }
    if policy.startswith("fastlibra"):
        return {f"{TIME_UNIT_S:g}": {"cache_policy": policy, "swap_time_unit_s": TIME_UNIT_S}}
    return {"": {"cache_policy": policy}}


def _config(
    plan: MeasuredPlan, application: str, share: float, rate: float, policy: str, setting: str
) -> dict[str, Any]:
    return {
        "part": "measured",
        "model": plan.size.describe(),
        "num_adapters": plan.num_adapters,
        "arena_mb": plan.arena_mb,
        "host_arena_mb": plan.host_arena_mb,
        "load_gb_per_s": plan.load_gb_per_s,
        "application": application,
        "share_of_capacity": share,
        "rate_per_s": rate,
        "policy": policy,
        "setting": setting,
    }


def _engine(plan: MeasuredPlan, model: Path, adapters: dict[str, str], settings: dict[str, Any]) -> LLM:
    return LLM(
        str(model),
        adapters,
        dtype="float32",
        device="cpu",
        arena_mb=plan.arena_mb,
        host_arena_mb=plan.host_arena_mb,
        load_gb_per_s=plan.load_gb_per_s,
        max_loras=plan.num_adapters,
        max_model_len=max(shape.max_tokens for shape in SHAPES.values()),
        max_num_batched_tokens=512,
        max_num_seqs=32,
        eager=plan.eager,
        **settings,
    )


def _measure(
    plan: MeasuredPlan,
    model: Path,
    adapters: dict[str, str],
    settings: dict[str, Any],
    timed: Sequence[tuple[float, TurnRequest]],
) -> tuple[dict[str, Any], list[Answered]]:
    with _engine(plan, model, adapters, settings) as llm:
        samples: list[EngineStats] = []
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(llm, samples, stop))
        sampler.start()
        try:
            answers = _replay(llm, timed)
        finally:
            stop.set()
            sampler.join()
        stats = llm.stats()
    judged = answers[int(WARM_SHARE * len(answers)) :]
    return _figures(judged, stats, samples[int(WARM_SHARE * len(samples)) :]), answers


def _sample(llm: LLM, samples: list[EngineStats], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        samples.append(llm.stats())


def _replay(llm: LLM, timed: Sequence[tuple[float, TurnRequest]]) -> list[Answered]:
    """Send each request at its time, whatever came before; all answers."""
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
    """A vocabulary's token for one of a plan's, equal for equal ones, as if drawn at random."""
    return (number * 2654435761 >> 7) % vocab_size


def _agreement(first: Sequence[Answered], second: Sequence[Answered]) -> float:
    """Share of the requests whose tokens are all the same."""
    return float(np.mean([one.tokens == other.tokens for one, other in zip(first, second, strict=True)]))


def _figures(
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
