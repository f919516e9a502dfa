# SPDX-License-Identifier: Apache-2.0
"""Replay plans: requests from a trace and options."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lora.config.plan import WorkloadOptions

from .popularity.popularity import Popularity
from .traces.formats import estimate_tokens, json_lines
from .traces.records import HASH_BLOCK_TOKENS, RowReader, Trace, TraceRequest, need, open_text

FloatArray = NDArray[np.float64]


def positive(name: str, value: float) -> float:
    """The value.  Raises ValueError unless finite and > 0."""
    need(0 < value < math.inf, name, value, "a finite number > 0")
    return float(value)


def original_arrivals(arrivals_s: Sequence[float], request_rate_per_s: float | None = None) -> FloatArray:
    """Recorded times from 0 on; with a rate, stretched to (n - 1) / last time = rate.

    Raises ValueError for a rate without distinct times.
    """
    times = np.asarray(arrivals_s, dtype=np.float64)
    times = times - times[0]
    if request_rate_per_s is None:
        return times
    rate = positive("request_rate", request_rate_per_s)
    if times[-1] == 0.0:
        raise ValueError(
            "the trace's requests all arrive at once, so its times can't be scaled to --request-rate"
        )
    return times * ((len(times) - 1) / rate / times[-1])


def gamma_arrivals(
    num_requests: int, request_rate_per_s: float, burstiness: float, rng: np.random.Generator
) -> FloatArray:
    """Cumulated Gamma(shape=burstiness, mean=1/rate) gaps; 1.0 is Poisson, less is burstier.

    `burstiness` as in vLLM's benchmark client.
    """
    rate = positive("request_rate", request_rate_per_s)
    shape = positive("burstiness", burstiness)
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), size=num_requests))


def gamma_arrivals_until(
    duration_s: float, request_rate_per_s: float, burstiness: float, rng: np.random.Generator
) -> FloatArray:
    """As `gamma_arrivals`, before duration_s; possibly empty."""
    block = math.ceil(positive("duration_s", duration_s) * positive("request_rate", request_rate_per_s)) + 16
    times = gamma_arrivals(block, request_rate_per_s, burstiness, rng)
    while times[-1] < duration_s:
        times = np.concatenate(
            [times, times[-1] + gamma_arrivals(block, request_rate_per_s, burstiness, rng)]
        )
    return cut_duration(times, duration_s)


def cut_duration(arrivals_s: FloatArray, duration_s: float) -> FloatArray:
    return arrivals_s[arrivals_s < positive("duration_s", duration_s)]


def busiest_stretch(arrivals_s: Sequence[float], duration_s: float) -> slice:
    """Indices of the most arrivals within duration_s; ties: the first."""
    times = np.asarray(arrivals_s, dtype=np.float64)
    ends = np.searchsorted(times, times + positive("duration_s", duration_s), side="left")
    first = int(np.argmax(ends - np.arange(len(times))))
    return slice(first, int(ends[first]))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt for an adapter (None: the base model).  answer: exact, if known."""

    adapter: str | None
    prompt: str
    answer: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return estimate_tokens(self.prompt)


def random_token_ids(
    index: int, prompt_tokens: int, vocab_size: int, seed: int, hash_ids: Sequence[int] = ()
) -> list[int]:
    """prompt_tokens ids below vocab_size.  Deterministic.

    With hash_ids, each 512-token block depends on its id alone: shared blocks stay shared.
    """
    if not hash_ids:
        return np.random.default_rng((seed, 2, index)).integers(0, vocab_size, prompt_tokens).tolist()
    ids: list[int] = []
    for hash_id in hash_ids:
        if len(ids) >= prompt_tokens:
            break
        ids += np.random.default_rng((seed, 3, hash_id)).integers(0, vocab_size, HASH_BLOCK_TOKENS).tolist()
    rest = max(0, prompt_tokens - len(ids))
    return (
        ids[:prompt_tokens] + np.random.default_rng((seed, 2, index)).integers(0, vocab_size, rest).tolist()
    )


def cut_text(text: str, max_tokens: int, estimated_tokens: int) -> str:
    """The text's first part, in proportion, if its estimated length is above max_tokens."""
    if estimated_tokens <= max_tokens:
        return text
    return text[: max(1, len(text) * max_tokens // estimated_tokens)]


def read_prompts(path: str | Path) -> list[PromptRow]:
    """Rows {"adapter": name or null, "prompt": text[, "answer": text]} of a JSON-lines file.

    Raises ValueError with file, line and key.
    """
    reader = RowReader(str(path))
    with open_text(path, "prompts") as file:
        lines = [*file]
    rows = []
    for row in json_lines(lines, reader):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise reader.error("prompt", "missing or no text", "non-empty text in every row")
        for key in ("adapter", "answer"):
            if not isinstance(row.get(key), (str, type(None))):
                raise reader.error(key, f"{row[key]!r:.60} is no text", "text, or left out")
        rows.append(PromptRow(row.get("adapter"), row["prompt"], row.get("answer")))
    if not rows:
        raise ValueError(f"{path}: no prompt in the file")
    return rows


def choose_rows(wanted: Sequence[tuple[str | None, int]], rows: Sequence[PromptRow]) -> list[PromptRow]:
    """For each (adapter, prompt length) a row of that adapter, by rank of length.

    Raises ValueError if an adapter has no rows.
    """
    by_adapter: dict[str | None, list[PromptRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        by_adapter[row.adapter].append(row)
    requests: dict[str | None, list[int]] = defaultdict(list)
    for index, (adapter, _) in enumerate(wanted):
        requests[adapter].append(index)
    chosen: list[PromptRow | None] = [None] * len(wanted)
    for adapter, indices in requests.items():
        own = by_adapter.get(adapter)
        if not own:
            known = ", ".join(sorted(str(name) for name in by_adapter))
            raise ValueError(f"--prompts has no row for adapter {adapter!r}; it has rows for {known}")
        indices.sort(key=lambda index: wanted[index][1])
        for place, index in enumerate(indices):
            chosen[index] = own[int((place + 0.5) * len(own) / len(indices))]
    return [row for row in chosen if row is not None]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Answer `prompt` with len(answer) tokens; both token ids."""

    index: int
    arrival_s: float
    adapter: str | None
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    tenant: str = ""
    share: float = 1.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send.

    adapter: None: the base model.  prompt_tokens: of a random prompt, or an estimate for `prompt`.
    output_tokens: most to generate.  answer: exact text, if known.
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
    """The requests to send, by arrival.  Deterministic.

    popularity: for requests without an adapter; None: the base model.  Raises ValueError for a trace without
    times and no rate, or an empty plan.
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
    most = options.max_prompt_tokens
    if most is not None:
        longest = max((row.prompt_tokens for row in rows if row.answer is not None), default=0)
        if longest > most:
            raise ValueError(
                f"a prompt of {longest} tokens has an answer, which a cut prompt loses; "
                f"give --max-prompt-tokens {longest} or more"
            )
        rows = [replace(row, prompt=cut_text(row.prompt, most, row.prompt_tokens)) for row in rows]
    chosen = choose_rows([(request.adapter, request.prompt_tokens) for request in plan], rows)
    planned = []
    for request, row in zip(plan, chosen, strict=True):
        output_tokens = request.output_tokens
        if row.answer is not None:
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
