# SPDX-License-Identifier: Apache-2.0
"""Reports of several engines merged into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from moe_lora.core.request import AdapterInfo, AdapterResidency, EngineStats, FleetStats, InstanceStats

SUMMED_GAUGES = (
    "num_running",
    "num_waiting",
    "num_deferred",
    "num_background",
    "device_bytes",
    "device_kv_bytes",
    "device_kv_invalid_bytes",
    "device_adapter_bytes",
    "host_bytes",
    "host_kv_bytes",
    "host_adapter_bytes",
    "pool_adapters",
    "pool_bytes",
    "merge_kept_bytes",
)
NAMES = ("running_adapters", "waiting_adapters", "resident_adapters")
OTHERS = ("kv_usage", "step_counts")
COUNTERS = tuple({one.name for one in fields(EngineStats)} - {*SUMMED_GAUGES, *NAMES, *OTHERS})
BEST_FIRST: tuple[AdapterResidency, ...] = ("device", "remote", "host", "peer", "disk", "unavailable")


def add_counters(parts: Iterable[EngineStats]) -> EngineStats:
    """Sums of counters, without gauges."""
    return EngineStats(**_counters(list(parts)))


def merge_stats(
    live: Sequence[EngineStats], past: Iterable[EngineStats], instances: Iterable[InstanceStats]
) -> FleetStats:
    """See `FleetStats`.  past: of ended processes, so that no sum falls."""
    names: dict[str, Any] = {
        field: tuple(sorted(set(chain.from_iterable(getattr(stats, field) for stats in live))))
        for field in NAMES
    }
    return FleetStats(
        instances=tuple(instances),
        kv_usage=sum(stats.kv_usage for stats in live) / len(live) if live else 0.0,
        **_sums(live, SUMMED_GAUGES),
        **_counters([*live, *past]),
        **names,
    )


def merge_adapters(lists: Iterable[Iterable[AdapterInfo]]) -> list[AdapterInfo]:
    """One entry per name: sums of requests and pages, the best residency, the latest version and use."""
    merged: dict[str, AdapterInfo] = {}
    for info in chain.from_iterable(lists):
        other = merged.get(info.name)
        if other is not None:
            newer = max(info, other, key=lambda one: one.version)
            best = min(info, other, key=lambda one: BEST_FIRST.index(one.residency))
            info = replace(
                newer,
                residency=best.residency,
                problem=best.problem,
                num_pages=info.num_pages + other.num_pages,
                idle_s=min((s for s in (info.idle_s, other.idle_s) if s is not None), default=None),
                num_running=info.num_running + other.num_running,
                num_waiting=info.num_waiting + other.num_waiting,
            )
        merged[info.name] = info
    return list(merged.values())


def _sums(stats: Sequence[EngineStats], fields: Iterable[str]) -> dict[str, Any]:
    return {field: sum(getattr(one, field) for one in stats) for field in fields}


def _counters(stats: Sequence[EngineStats]) -> dict[str, Any]:
    counts = zip(EngineStats().step_counts, *(one.step_counts for one in stats), strict=True)
    return {**_sums(stats, COUNTERS), "step_counts": tuple(map(sum, counts))}
