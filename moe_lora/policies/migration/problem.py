# SPDX-License-Identifier: Apache-2.0
"""dLoRA's co-migration problem: requests and adapters on replicas.

Legend: i a request, j a replica, k an adapter; x_ij request i is on j, in device memory (x^G) or in the
host's (x^H); y_kj adapter k is on j; L_i remaining seconds of i; M_i, M_k bytes.

    minimise max_j [ sum_i (gamma_ij L_i x_ij + M_i x^H_ij / B) + sum_k (eta + load_kj) y_kj ]
    subject to  y_kj >= x_ij for the adapter k of i            (matching)
                sum_i M_i x^G_ij + sum_k M_k y_kj <= M_j^G     (device memory)
                sum_i M_i x^H_ij <= M_j^H                      (host memory)
                sum_j x_ij = 1                                 (existence)

gamma_ij is 1 at the request's replica and its move factor elsewhere.  load_kj, the load time of k, is our
addition.
Source: dLoRA, section 5.2 and table 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_lora.timing.host_times import LinkTime

ReplicaName: TypeAlias = Hashable
RequestId: TypeAlias = Hashable
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """host_bytes: for swapped requests.  adapters: on its device.  free_seats: further requests that compute
    at once; for `paying_moves` only.
    """

    name: ReplicaName
    device_bytes: float
    host_bytes: float = math.inf
    adapters: Collection[str] = frozenset()
    free_seats: float = math.inf


@dataclass(frozen=True, slots=True)
class RequestView:
    """adapter: None for the base model.  num_bytes: of KV (waiting: in future).  exec_s: remaining seconds.
    move_factor: gamma >= 1: (exec_s + seconds of the move) / exec_s; 1 for a waiting request.
    """

    request_id: RequestId
    adapter: str | None
    replica: ReplicaName
    num_bytes: float
    exec_s: float
    move_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """num_bytes: on a device."""

    name: str
    num_bytes: float
    load_s: float = 0.0


@dataclass(frozen=True)
class MigrationProblem:
    """swap_bytes_per_s: B.

    affinity_s: eta.  Raises ValueError for unknown or doubled names, and numbers out of range.
    """

    replicas: Sequence[ReplicaView]
    requests: Sequence[RequestView]
    adapters: Sequence[AdapterSize]
    swap_bytes_per_s: float = 25e9
    affinity_s: float = 0.0

    @property
    def swap(self) -> LinkTime:
        """Between host and device."""
        return LinkTime(self.swap_bytes_per_s)

    def __post_init__(self) -> None:
        replicas, adapters = {one.name for one in self.replicas}, {one.name for one in self.adapters}
        ids = {one.request_id for one in self.requests}
        if (len(replicas), len(adapters), len(ids)) != tuple(
            map(len, (self.replicas, self.adapters, self.requests))
        ):
            raise ValueError("a replica, an adapter or a request is there twice; name each once")
        for one in self.requests:
            if one.replica not in replicas or (one.adapter is not None and one.adapter not in adapters):
                raise ValueError(
                    f"request {one.request_id!r} names replica {one.replica!r} and adapter {one.adapter!r}, "
                    "of which one is not among those given"
                )
            if not (one.num_bytes >= 0 and one.exec_s >= 0 and one.move_factor >= 1):
                raise ValueError(
                    f"request {one.request_id!r}: num_bytes={one.num_bytes} and exec_s={one.exec_s} must be "
                    f"0 or more, move_factor={one.move_factor} 1 or more"
                )
        if not (self.swap_bytes_per_s > 0 and self.affinity_s >= 0):
            raise ValueError(
                f"swap_bytes_per_s={self.swap_bytes_per_s} must be above 0, affinity_s={self.affinity_s} "
                "0 or more"
            )


@dataclass(frozen=True)
class MigrationPlan:
    """The plan; loads precede their moves.

    moves: (request, source, target), cheapest first.  loads: (adapter, replica).  objective,
    objective_before: seconds of the slowest replica; infinite without enough memory.  bound: lower bound of
    any plan; 0 if unknown.
    """

    moves: tuple[tuple[RequestId, ReplicaName, ReplicaName], ...]
    loads: tuple[tuple[str, ReplicaName], ...]
    objective: float
    objective_before: float
    bound: float = 0.0


class Placement:
    """A placement in indices of the problem, with costs per replica.

    Moves take constant time.  counts: requests by replica and adapter.  seconds, used: per replica, without
    swapping, and bytes.  Columns: home, adapter (the base model is an extra one of 0 bytes), exec_s, moved_s
    (away from home) and num_bytes: [requests]; adapter_bytes, load_s: [adapters + 1].
    """

    def __init__(self, problem: MigrationProblem) -> None:
        self.problem = problem
        requests, num = problem.requests, len(problem.adapters)
        index_of = {one.name: j for j, one in enumerate(problem.replicas)}
        row_of: dict[str | None, int] = {one.name: k for k, one in enumerate(problem.adapters)}
        row_of[None] = num
        self.replica_of = [index_of[one.replica] for one in requests]
        self.home = np.array(self.replica_of, dtype=np.int64)
        self.adapter = np.array([row_of[one.adapter] for one in requests], dtype=np.int64)
        self.exec_s = np.array([one.exec_s for one in requests], dtype=np.float64)
        self.moved_s = self.exec_s * np.array([one.move_factor for one in requests], dtype=np.float64)
        self.num_bytes = np.array([one.num_bytes for one in requests], dtype=np.float64)
        self.adapter_bytes = np.array([*(one.num_bytes for one in problem.adapters), 0.0])
        self.load_s = np.array([*(one.load_s for one in problem.adapters), 0.0])
        self._row_of = row_of
        self._adapter_s: dict[int, FloatArray] = {}
        self._swapping: dict[int, tuple[float, float]] = {}
        self._columns = list(
            zip(
                self.replica_of.copy(),
                self.adapter.tolist(),
                self.exec_s.tolist(),
                self.moved_s.tolist(),
                self.num_bytes.tolist(),
                strict=True,
            )
        )
        self.members: list[set[int]] = [set() for _ in problem.replicas]
        self.counts: list[Counter[int]] = [Counter() for _ in problem.replicas]
        self.seconds = [0.0] * len(problem.replicas)
        self.used = [0.0] * len(problem.replicas)
        for i, j in enumerate(self.replica_of):
            self._enter(i, j)

    def move(self, i: int, target: int) -> None:
        self._leave(i, self.replica_of[i])
        self._enter(i, target)

    def _enter(self, i: int, j: int) -> None:
        home, k, exec_s, moved_s, num_bytes = self._columns[i]
        if not self.counts[j][k]:
            self.seconds[j] += self.adapter_at(j, k)
            self.used[j] += float(self.adapter_bytes[k])
        self.counts[j][k] += 1
        self.seconds[j] += exec_s if home == j else moved_s
        self.used[j] += num_bytes
        self.members[j].add(i)
        self.replica_of[i] = j
        self._swapping.pop(j, None)

    def _leave(self, i: int, j: int) -> None:
        home, k, exec_s, moved_s, num_bytes = self._columns[i]
        self.members[j].remove(i)
        self.counts[j][k] -= 1
        self.seconds[j] -= exec_s if home == j else moved_s
        self.used[j] -= num_bytes
        if not self.counts[j][k]:
            del self.counts[j][k]
            self.seconds[j] -= self.adapter_at(j, k)
            self.used[j] -= float(self.adapter_bytes[k])
        if not self.members[j]:
            self.seconds[j] = self.used[j] = 0.0
        self._swapping.pop(j, None)

    def adapter_s(self, j: int) -> FloatArray:
        """[adapters + 1] cost at the replica."""
        if j not in self._adapter_s:
            seconds = self.load_s + self.problem.affinity_s
            held = [self._row_of[name] for name in self.problem.replicas[j].adapters if name in self._row_of]
            seconds[held] = self.problem.affinity_s
            seconds[-1] = 0.0
            self._adapter_s[j] = seconds
        return self._adapter_s[j]

    def adapter_at(self, j: int, k: int) -> float:
        if k == len(self.problem.adapters):
            return 0.0
        is_held = self.problem.adapters[k].name in self.problem.replicas[j].adapters
        return self.problem.affinity_s + (0.0 if is_held else float(self.load_s[k]))

    def holders(self) -> list[list[int]]:
        """[adapters + 1] replicas with each on their devices."""
        found: list[list[int]] = [[] for _ in self.adapter_bytes]
        for j, replica in enumerate(self.problem.replicas):
            for name in replica.adapters:
                if name in self._row_of:
                    found[self._row_of[name]].append(j)
        return found

    def cost(self, j: int) -> tuple[float, float]:
        """(missing bytes, seconds).  The largest requests that fit stay on the device."""
        if self.used[j] <= self.problem.replicas[j].device_bytes:
            return 0.0, self.seconds[j]
        if j not in self._swapping:
            self._swapping[j] = self._cost(j)
        return self._swapping[j]

    def costs(self) -> list[tuple[float, float]]:
        """`cost` of each replica."""
        return [self.cost(j) for j in range(len(self.members))]

    def _cost(self, j: int) -> tuple[float, float]:
        replica, members = self.problem.replicas[j], sorted(self.members[j])
        room = replica.device_bytes - float(self.adapter_bytes[sorted(self.counts[j])].sum())
        swapped = swapped_bytes(self.num_bytes[members].tolist(), max(0.0, room))
        lacking = max(0.0, swapped - replica.host_bytes) + max(0.0, -room)
        return lacking, self.seconds[j] + self.problem.swap.seconds(swapped)

    def objective(self) -> float:
        """Seconds of the slowest replica; infinite without enough memory."""
        costs = self.costs()
        if any(lacking > 0 for lacking, _ in costs):
            return math.inf
        return max((seconds for _, seconds in costs), default=0.0)

    def plan(self, objective: float, objective_before: float, bound: float = 0.0) -> MigrationPlan:
        """The plan to this placement."""
        problem = self.problem
        moved = [i for i, j in enumerate(self.replica_of) if j != self.home[i]]
        moved.sort(key=lambda i: float(self.moved_s[i] - self.exec_s[i]))
        moves = []
        loads: dict[tuple[str, ReplicaName], None] = {}
        for i in moved:
            request, target = problem.requests[i], problem.replicas[self.replica_of[i]]
            moves.append((request.request_id, request.replica, target.name))
            if request.adapter is not None and request.adapter not in target.adapters:
                loads[request.adapter, target.name] = None
        return MigrationPlan(tuple(moves), tuple(loads), objective, objective_before, bound)


def swapped_bytes(sizes: Sequence[float], room: float) -> float:
    """Bytes outside the room, filled with the largest that fit."""
    total = math.fsum(sizes)
    if total <= room:
        return 0.0
    kept = 0.0
    for size in sorted(sizes, reverse=True):
        if kept + size <= room:
            kept += size
    return total - kept


def undo_needless(placement: Placement, limit: float) -> None:
    """Return useless moves, dearest first, while both replicas stay within the limit (seconds) and memory."""
    moved = [i for i, j in enumerate(placement.replica_of) if j != placement.home[i]]
    for i in sorted(moved, key=lambda i: float(placement.exec_s[i] - placement.moved_s[i])):
        target, home = placement.replica_of[i], int(placement.home[i])
        placement.move(i, home)
        if any(placement.cost(j) > (0.0, limit) for j in (home, target)):
            placement.move(i, target)


def undo_harmful(placement: Placement, before: Sequence[tuple[float, float]]) -> None:
    """Return requests from replicas with more missing memory than before, or all unless the slowest gets
    faster.
    """
    moved = {i for i, j in enumerate(placement.replica_of) if j != placement.home[i]}
    too_full = [j for j, (lacking, _) in enumerate(before) if placement.cost(j)[0] > lacking]
    while too_full:
        j = too_full.pop()
        for i in sorted(moved & placement.members[j], key=lambda i: float(placement.num_bytes[i])):
            if placement.cost(j)[0] > before[j][0]:
                home = int(placement.home[i])
                placement.move(i, home)
                moved.remove(i)
                too_full.append(home)
    if max(placement.costs(), default=(0.0, 0.0)) >= max(before, default=(0.0, 0.0)):
        for i in moved:
            placement.move(i, int(placement.home[i]))


def lower_bound(placement: Placement) -> float:
    """Lower bound of the slowest replica's seconds.

    The least T whose replicas hold all work and swapping, and any request with its adapter.
    """
    problem, num = placement.problem, len(placement.problem.replicas)
    if not problem.requests:
        return 0.0
    rows, inverse = np.unique(placement.adapter, return_inverse=True)
    is_adapter = rows < len(problem.adapters)
    work_s = np.bincount(inverse, placement.exec_s)
    num_held = np.array([len(held) for held in placement.holders()])[rows]
    eta = np.where(is_adapter, problem.affinity_s, 0.0)
    room = sum(one.device_bytes for one in problem.replicas) - float(placement.num_bytes.sum())

    def takes(seconds: float) -> bool:
        copies = np.ceil(work_s / np.maximum(seconds - eta, TOLERANCE) * (1 - TOLERANCE))
        copies = np.where(is_adapter, np.clip(copies, 1, num), 0)
        total = float(work_s.sum() + (eta * copies).sum())
        total += float((placement.load_s[rows] * np.maximum(copies - num_held, 0)).sum())
        lacking = float((placement.adapter_bytes[rows] * copies).sum()) - room
        return total + problem.swap.seconds(max(0.0, lacking)) <= num * seconds

    alone_s = eta + np.where(num_held == 0, placement.load_s[rows], 0.0)
    low = max(float((placement.exec_s + alone_s[inverse]).max()), float(work_s.sum()) / num)
    if takes(low):
        return low
    high = 2 * low
    while not takes(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if takes(middle) else (middle, high)
    return low
