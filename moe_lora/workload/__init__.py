"""What is asked of a server: traces, arrivals, adapter popularity, and the plan made of them."""

from __future__ import annotations

from .arrivals import cut_duration, gamma_arrivals, original_arrivals, poisson_arrivals
from .plan import PlannedRequest, WorkloadOptions, make_plan
from .popularity import Popularity, read_counts, uniform, zipf
from .records import Trace, TraceRequest
from .traces import FORMATS, detect_format, iter_trace, read_trace

__all__ = [
    "FORMATS",
    "PlannedRequest",
    "Popularity",
    "Trace",
    "TraceRequest",
    "WorkloadOptions",
    "cut_duration",
    "detect_format",
    "gamma_arrivals",
    "iter_trace",
    "make_plan",
    "original_arrivals",
    "poisson_arrivals",
    "read_counts",
    "read_trace",
    "uniform",
    "zipf",
]
