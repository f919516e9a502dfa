"""What is asked of a server: traces, arrivals, adapter popularity, and the plan made of them."""

from __future__ import annotations

from moe_lora.workload.popularity.functions import (
    Invocations,
    functions_popularity,
    map_adapters,
    map_identities,
    mapped_popularity,
    read_invocations,
    with_invocations,
)
from moe_lora.workload.popularity.named import POPULARITY_NAMES, parse_popularity
from moe_lora.workload.popularity.popularity import (
    AdapterChoice,
    Popularity,
    from_weights,
    read_counts,
    uniform,
    zipf,
)
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import FORMATS, detect_format, iter_trace, read_trace

from .arrivals import cut_duration, gamma_arrivals, original_arrivals
from .replay_plan import PlannedRequest, make_plan
from .statistics import LengthStatistics, TraceStatistics, trace_statistics

__all__ = [
    "FORMATS",
    "POPULARITY_NAMES",
    "AdapterChoice",
    "Invocations",
    "LengthStatistics",
    "PlannedRequest",
    "Popularity",
    "Trace",
    "TraceRequest",
    "TraceStatistics",
    "cut_duration",
    "detect_format",
    "from_weights",
    "functions_popularity",
    "gamma_arrivals",
    "iter_trace",
    "make_plan",
    "map_adapters",
    "map_identities",
    "mapped_popularity",
    "original_arrivals",
    "parse_popularity",
    "read_counts",
    "read_invocations",
    "read_trace",
    "trace_statistics",
    "uniform",
    "with_invocations",
    "zipf",
]
