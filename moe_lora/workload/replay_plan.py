# SPDX-License-Identifier: Apache-2.0
"""Replay plans: times, adapters and lengths of requests, from a trace and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_lora.config.plan import WorkloadOptions
from moe_lora.workload.popularity.popularity import Popularity
from moe_lora.workload.traces.records import Trace, TraceRequest

from .arrivals import (
    FloatArray,
    busiest_stretch,
    cut_duration,
    gamma_arrivals,
    gamma_arrivals_until,
    original_arrivals,
)
from .prompts import PromptRow, choose_rows, cut_text


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send.

    arrival_s: seconds after the start.  adapter: None: the base model.  prompt_tokens: length of a random
    prompt, or an estimate for `prompt`.  output_tokens: most tokens to generate.  answer: exact expected
    text, if known.
    """

    index: int
    arrival_s: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None
    answer: str | None = None
    hash_ids: tuple[int, ...] = ()


def make_plan(
    trace: Trace,
    options: WorkloadOptions,
    popularity: Popularity | None = None,
    rows: Sequence[PromptRow] | None = None,
) -> list[PlannedRequest]:
    """The requests to send, sorted by arrival.  Deterministic.

    popularity: for requests without an adapter in the trace; None: the base model.  rows: a data set of
    prompts to send instead (`prompts.choose_rows`).
    Raises ValueError for a trace without times and no rate, or an empty plan.
    """
    if options.busiest and options.duration_s is not None and trace.has_arrival_times:
        stretch = busiest_stretch([request.arrival_s for request in trace.requests], options.duration_s)
        trace = replace(trace, requests=trace.requests[stretch])
    arrival_rng, adapter_rng = (np.random.default_rng((options.seed, stream)) for stream in (0, 1))
    arrivals = _arrivals(trace, options, arrival_rng)
    if len(arrivals) == 0:
        raise ValueError(f"no request arrives within duration_s={options.duration_s}; choose a longer one")
    drawn = popularity.draw(_shares(arrivals), adapter_rng) if popularity else [None] * len(arrivals)
    plan = [
        _planned(index, float(arrival_s), drawn[index], trace.requests[index % len(trace.requests)], options)
        for index, arrival_s in enumerate(arrivals)
    ]
    return plan if rows is None else _with_rows(plan, rows, options)


def _arrivals(trace: Trace, options: WorkloadOptions, rng: np.random.Generator) -> FloatArray:
    if options.arrivals == "trace":
        if not trace.has_arrival_times:
            raise ValueError(f"{trace.path}: format {trace.format} has no arrival times; give --request-rate")
        recorded = [request.arrival_s for request in trace.requests[: options.num_requests]]
        times = original_arrivals(recorded, options.request_rate_per_s)
        return times if options.duration_s is None else cut_duration(times, options.duration_s)
    assert options.request_rate_per_s is not None
    if options.duration_s is not None:
        times = gamma_arrivals_until(options.duration_s, options.request_rate_per_s, options.burstiness, rng)
        return times[: options.num_requests]
    num_requests = options.num_requests or len(trace.requests)
    return gamma_arrivals(num_requests, options.request_rate_per_s, options.burstiness, rng)


def _shares(arrivals: FloatArray) -> FloatArray:
    return arrivals / arrivals[-1] if arrivals[-1] > 0 else np.zeros_like(arrivals)


def _planned(
    index: int, arrival_s: float, drawn: str | None, source: TraceRequest, options: WorkloadOptions
) -> PlannedRequest:
    if options.prompts == "text" and source.prompt is None:
        raise ValueError("the trace holds no prompt texts; use random prompts or a --prompts file")
    prompt_tokens = min(source.prompt_tokens, options.max_prompt_tokens or source.prompt_tokens)
    prompt = source.prompt if options.prompts == "text" else None
    return PlannedRequest(
        index=index,
        arrival_s=arrival_s,
        adapter=source.adapter or drawn,
        prompt_tokens=prompt_tokens,
        output_tokens=min(source.output_tokens, options.max_output_tokens or source.output_tokens),
        prompt=None if prompt is None else cut_text(prompt, prompt_tokens, source.prompt_tokens),
        hash_ids=source.hash_ids,
    )


def _with_rows(
    plan: list[PlannedRequest], rows: Sequence[PromptRow], options: WorkloadOptions
) -> list[PlannedRequest]:
    chosen = choose_rows([(request.adapter, request.prompt_tokens) for request in plan], rows)
    planned = []
    for request, row in zip(plan, chosen, strict=True):
        output_tokens = request.output_tokens
        if row.answer is not None:
            # Room for the whole answer (a token is at least one byte): the model ends the answer.
            output_tokens = options.max_output_tokens or len(row.answer.encode()) + 16
        planned.append(
            replace(
                request,
                prompt=row.prompt,
                answer=row.answer,
                output_tokens=output_tokens,
                prompt_tokens=row.prompt_tokens,
                hash_ids=(),
            )
        )
    return planned
