"""Identities of a trace (functions, models) mapped to the adapters there are, as dLoRA does it.

Identities, most frequent first, go to the adapters round robin in blocks of `skewness`.
Source: dLoRA section 7.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .popularity import Popularity, from_weights
from moe_lora.workload.traces.records import Trace


def map_identities(counts: Mapping[str, int], adapters: Sequence[str], skewness: int = 1) -> dict[str, int]:
    """Index of each identity's adapter: (place // skewness) mod number of adapters, by falling count.

    skewness: identities per block of the round robin; the larger, the more uneven the adapters' load.
    """
    if skewness < 1:
        raise ValueError(f"skewness={skewness} is not allowed; choose a whole number >= 1")
    if not adapters:
        raise ValueError("no adapter to map to; name at least one")
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: place // skewness % len(adapters) for place, name in enumerate(ranked)}


def mapped_popularity(counts: Mapping[str, int], adapters: Sequence[str], skewness: int = 1) -> Popularity:
    """Each adapter's share of the counts of the identities mapped to it."""
    weights = [0] * len(adapters)
    for name, index in map_identities(counts, adapters, skewness).items():
        weights[index] += counts[name]
    return from_weights(adapters, weights)


def map_adapters(trace: Trace, adapters: Sequence[str], skewness: int = 1) -> Trace:
    """The trace with its own adapter names replaced by those they map to; unnamed requests stay so.

    Raises ValueError if the trace names no adapter.
    """
    counts = Counter(request.adapter for request in trace.requests if request.adapter is not None)
    if not counts:
        raise ValueError(f"{trace.path}: the trace names no adapter to map; choose a popularity instead")
    mapping = map_identities(counts, adapters, skewness)
    requests = tuple(
        request if request.adapter is None else replace(request, adapter=adapters[mapping[request.adapter]])
        for request in trace.requests
    )
    return replace(trace, requests=requests)
