# SPDX-License-Identifier: Apache-2.0
"""dLoRA's proactive placement: adapters to preload (dLoRA, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .placement_problem import Placed, Server, Table


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of servers for adapters and requests."""

    free_bytes: Mapping[Server, float]
    adapter_bytes: Mapping[str, float]
    request_bytes: float = 1.0
    """KV of a request; does not change the placement."""
    max_adapters: int | None = None
    """Per device; None: limited by memory."""


def preload(loads: Mapping[str, float], memory: DeviceMemory) -> dict[str, list[Server]]:
    """Adapter -> servers to preload on; none without load.

    The adapter of lowest burst tolerance gets servers of most free memory, until the lowest would fall.
    Raises ValueError for a load that is no number >= 0.
    """
    bad = next((name for name, load in loads.items() if not 0 <= load < math.inf), None)
    if bad is not None:
        raise ValueError(f"the load of adapter {bad!r} is {loads[bad]}; it must be a number >= 0")
    names = sorted(name for name, load in loads.items() if load > 0)
    servers = list(memory.free_bytes)
    if not names or not servers:
        return {name: [] for name in loads}
    size = np.array([memory.adapter_bytes[name] for name in names])
    weight = np.array([loads[name] for name in names]) * memory.request_bytes
    free = np.array([memory.free_bytes[server] for server in servers], dtype=float)
    slots = len(names) if memory.max_adapters is None else memory.max_adapters
    there = np.zeros((len(names), len(servers)), dtype=bool)
    tolerance = np.zeros(len(names))
    while True:
        adapter = int(tolerance.argmin())
        fits = ~there[adapter] & (free >= size[adapter]) & (there.sum(axis=0) < slots)
        if not fits.any():
            break
        server = int(np.where(fits, free, -1.0).argmax())
        there[adapter, server] = True
        free[server] -= size[adapter]
        after = there @ free / weight
        if after.min() < tolerance[adapter] * (1 - 1e-12):
            there[adapter, server] = False
            break
        tolerance = after
    found: dict[str, list[Server]] = {name: [] for name in loads}
    for adapter, name in enumerate(names):
        found[name] = [server for server, is_there in zip(servers, there[adapter], strict=True) if is_there]
    return found


def place_by_burst_tolerance(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Placed | None = None,
) -> Table:
    """`place_and_preload` with ranks as bytes, and room for all twice."""
    if not servers:
        raise ValueError("there are no servers; give at least one")
    memory = DeviceMemory(
        free_bytes=dict.fromkeys(servers, 2.0 * sum(adapters.values())),
        adapter_bytes={name: float(rank) for name, rank in adapters.items()},
    )
    return place_and_preload(adapters, demand, memory)[0]


def place_and_preload(
    adapters: Iterable[str], demand: Mapping[str, float], memory: DeviceMemory
) -> tuple[Table, dict[Server, list[str]]]:
    """`preload` as a table of equal shares, and adapters by server, heaviest first.

    Without demand adapters count alike.  Further adapters go to the server of fewest.
    """
    servers = list(memory.free_bytes)
    loads = {name: float(demand.get(name, 0.0)) for name in adapters}
    if not any(loads.values()):
        loads = dict.fromkeys(adapters, 1.0)
    found = preload(loads, memory)
    preloaded: dict[Server, list[str]] = {server: [] for server in servers}
    for name in sorted(found, key=lambda name: (-loads[name], name)):
        for server in found[name]:
            preloaded[server].append(name)
    num_held = {server: len(names) for server, names in preloaded.items()}
    for name in sorted(adapters):
        if not found[name]:
            server = min(servers, key=num_held.__getitem__)
            found[name] = [server]
            num_held[server] += 1
    table = {name: [(server, 1.0 / len(row)) for server in row] for name, row in found.items()}
    return table, preloaded
