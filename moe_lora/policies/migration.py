"""Which requests go to another replica, and which adapters with them: dLoRA's co-migration problem.

Legend: i a request, j a replica, k an adapter; x_ij request i is on j, in device memory (x^G) or in the
host's (x^H); y_kj adapter k is on j; L_i seconds that i still takes; M_i its bytes, M_k those of an adapter.

    minimise max_j [ sum_i (gamma_ij L_i x_ij + M_i x^H_ij / B) + sum_k (eta + load_kj) y_kj ]
    subject to  y_kj >= x_ij for the adapter k of i            (matching)
                sum_i M_i x^G_ij + sum_k M_k y_kj <= M_j^G     (device memory)
                sum_i M_i x^H_ij <= M_j^H                      (host memory)
                sum_j x_ij = 1                                 (existence)

gamma_ij is 1 at the replica where i is and its move factor elsewhere.  (As printed, one gamma scales every
term alike, wherever the request is, so it inhibits no move.)  load_kj is the time to load k where it is not
yet; the paper has no such term: with load_s = 0 of every adapter the problem is the printed one.
Source: dLoRA, section 5.2 and table 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.optimize import Bounds, LinearConstraint

ReplicaName: TypeAlias = Hashable
RequestId: TypeAlias = Hashable
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
TOLERANCE = 1e-9
"""Of the objective: less is rounding."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """device_bytes: for adapters and requests together.  host_bytes: for requests that the device has no room
    for.  adapters: those that are on its device now, so that requests for them load nothing.
    """

    name: ReplicaName
    device_bytes: float
    host_bytes: float = math.inf
    adapters: Collection[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestView:
    """adapter: None for the base model.  replica: where it is.  num_bytes: of its KV (of one that waits: what
    it will need).  exec_s: seconds that it still takes; the paper takes the mean of its adapter's requests.
    move_factor: gamma >= 1: (exec_s + seconds of the move) / exec_s; 1 for one that waits: nothing moves but
    its tokens.
    """

    request_id: RequestId
    adapter: str | None
    replica: ReplicaName
    num_bytes: float
    exec_s: float
    move_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """num_bytes: on a device.  load_s: until it is there."""

    name: str
    num_bytes: float
    load_s: float = 0.0


@dataclass(frozen=True)
class MigrationProblem:
    """swap_bytes_per_s: B, between host and device.  affinity_s: eta, what another adapter costs a replica.

    Raises ValueError for a request whose replica or adapter is not named, for names given twice, and for
    numbers out of range.
    """

    replicas: Sequence[ReplicaView]
    requests: Sequence[RequestView]
    adapters: Sequence[AdapterSize]
    swap_bytes_per_s: float = 25e9
    affinity_s: float = 0.0

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
    """What to do; loads come before the moves that need them.

    moves: (request, source, target), those that cost least first, so those that wait before those that run.
    loads: (adapter, replica that lacks it).  objective, objective_before: seconds of the slowest replica,
    afterwards and as things are; infinite where memory does not suffice.  bound: no plan is below it; 0 where
    none is known.
    """

    moves: tuple[tuple[RequestId, ReplicaName, ReplicaName], ...]
    loads: tuple[tuple[str, ReplicaName], ...]
    objective: float
    objective_before: float
    bound: float = 0.0


class Placement:
    """Where each request is, in indices of the problem's sequences, and what that costs each replica.

    Begins as things are.  replica_of: [requests].  members: of each replica, in no order.  Columns of the
    problem: home, adapter (the base model is one more, of no bytes), exec_s, moved_s (elsewhere than at home)
    and num_bytes: [requests]; adapter_bytes: [adapters + 1].
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
        self._load_s = np.array([*(one.load_s for one in problem.adapters), 0.0])
        self._row_of = row_of
        self._adapter_s: dict[int, FloatArray] = {}
        self.members: list[set[int]] = [set() for _ in problem.replicas]
        for i, j in enumerate(self.replica_of):
            self.members[j].add(i)
        self._costs = self._costs_at_home()

    def move(self, i: int, target: int) -> None:
        self._costs.pop(target, None)
        self._costs.pop(self.replica_of[i], None)
        self.members[self.replica_of[i]].remove(i)
        self.members[target].add(i)
        self.replica_of[i] = target

    def adapter_s(self, j: int) -> FloatArray:
        """[adapters + 1] what each costs at the replica."""
        if j not in self._adapter_s:
            seconds = self._load_s + self.problem.affinity_s
            held = [self._row_of[name] for name in self.problem.replicas[j].adapters if name in self._row_of]
            seconds[held] = self.problem.affinity_s
            seconds[-1] = 0.0
            self._adapter_s[j] = seconds
        return self._adapter_s[j]

    def _adapter_at(self, j: int, k: int) -> float:
        """`adapter_s` of one adapter."""
        if k == len(self.problem.adapters):
            return 0.0
        is_held = self.problem.adapters[k].name in self.problem.replicas[j].adapters
        return self.problem.affinity_s + (0.0 if is_held else float(self._load_s[k]))

    def cost(self, j: int) -> tuple[float, float]:
        """(bytes too many, seconds) of the replica.

        The host takes whole requests, the least bytes that a greedy choice finds: the largest that still fit
        stay on the device.
        """
        if j not in self._costs:
            self._costs[j] = self._cost(j)
        return self._costs[j]

    def _costs_at_home(self) -> dict[int, tuple[float, float]]:
        """Of the replicas whose device has room for all that is there, all at once."""
        num = len(self.problem.replicas)
        pairs = np.unique(self.home * len(self.adapter_bytes) + self.adapter)
        homes, adapters = np.divmod(pairs, len(self.adapter_bytes))
        used = np.bincount(self.home, self.num_bytes, num)
        used += np.bincount(homes, self.adapter_bytes[adapters], num)
        costs_s = list(map(self._adapter_at, homes.tolist(), adapters.tolist()))
        seconds = np.bincount(self.home, self.exec_s, num) + np.bincount(homes, costs_s, num)
        room = [one.device_bytes for one in self.problem.replicas]
        return {int(j): (0.0, float(seconds[j])) for j in np.flatnonzero(used <= room)}

    def _cost(self, j: int) -> tuple[float, float]:
        replica, members = self.problem.replicas[j], np.array(sorted(self.members[j]), dtype=np.int64)
        adapters = np.unique(self.adapter[members])
        at_home = self.home[members] == j
        seconds = float(np.where(at_home, self.exec_s[members], self.moved_s[members]).sum())
        seconds += float(self.adapter_s(j)[adapters].sum())
        room = replica.device_bytes - float(self.adapter_bytes[adapters].sum())
        num_bytes = self.num_bytes[members]
        if room >= num_bytes.sum():
            return 0.0, seconds
        swapped = swapped_bytes(num_bytes.tolist(), max(0.0, room))
        lacking = max(0.0, swapped - replica.host_bytes) + max(0.0, -room)
        return lacking, seconds + swapped / self.problem.swap_bytes_per_s

    def objective(self) -> float:
        """Seconds of the slowest replica; infinite where memory does not suffice."""
        costs = [self.cost(j) for j in range(len(self.members))]
        if any(lacking > 0 for lacking, _ in costs):
            return math.inf
        return max((seconds for _, seconds in costs), default=0.0)

    def plan(self, objective: float, objective_before: float, bound: float = 0.0) -> MigrationPlan:
        """From how things are to here."""
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
    """Bytes of the requests that have no place in the room, which the largest that still fit get."""
    total = math.fsum(sizes)
    if total <= room:
        return 0.0
    kept = 0.0
    for size in sorted(sizes, reverse=True):
        if kept + size <= room:
            kept += size
    return total - kept


def undo_needless(placement: Placement, limit: float) -> None:
    """Send requests back whose move does not help: with them at home no replica of the two passes the limit
    (seconds), and none that had room lacks it.  The dearest moves first.
    """
    moved = [i for i, j in enumerate(placement.replica_of) if j != placement.home[i]]
    for i in sorted(moved, key=lambda i: float(placement.exec_s[i] - placement.moved_s[i])):
        target, home = placement.replica_of[i], int(placement.home[i])
        placement.move(i, home)
        if any(placement.cost(j) > (0.0, limit) for j in (home, target)):
            placement.move(i, target)


# The exact plan.


def plan_exact(problem: MigrationProblem, *, time_limit_s: float = 60.0) -> MigrationPlan:
    """The plan with the least objective, by HiGHS; the best found, with a bound, if the time is up.

    No moves where nothing better is found, or where no placement fits memory.  For small clusters and as the
    oracle of `fast_migration.plan_fast`: the time grows exponentially.
    """
    placement = Placement(problem)
    before = placement.objective()
    if not problem.requests:
        return placement.plan(before, before, before)
    from scipy.optimize import milp  # a third of a second, for this alone

    program = _Program(problem)
    found = milp(
        program.cost,
        constraints=program.constraints(),
        bounds=program.bounds(),
        integrality=program.integrality,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    bound = 0.0 if found.mip_dual_bound is None else max(0.0, found.mip_dual_bound * program.unit)
    if found.x is None or found.fun * program.unit >= before * (1 - TOLERANCE):
        return placement.plan(before, before, min(bound, before))
    objective = float(found.fun) * program.unit
    for i, j in enumerate(program.targets(found.x)):
        placement.move(i, j)
    if placement.objective() <= objective * (1 + TOLERANCE):
        undo_needless(placement, objective * (1 + TOLERANCE))
        objective = placement.objective()
    return placement.plan(objective, before, min(bound, objective))


class _Program:
    """The problem in arrays.  Columns: T, then x^G, x^H (by request, then replica), y (by adapter).

    Seconds in `unit`s, bytes in those of the largest request, so that numbers are near 1.
    """

    def __init__(self, problem: MigrationProblem) -> None:
        self._problem = problem
        self._num = num = len(problem.replicas)
        used = {one.adapter for one in problem.requests}
        self._adapters = [one for one in problem.adapters if one.name in used]
        self._on_device = 1 + np.arange(len(problem.requests) * num).reshape(-1, num)
        self._on_host = self._on_device + self._on_device.size
        self._loaded = 1 + 2 * self._on_device.size + np.arange(len(self._adapters) * num).reshape(-1, num)
        num_columns = 1 + 2 * self._on_device.size + self._loaded.size
        self.cost = np.zeros(num_columns)
        self.cost[0] = 1.0
        self.integrality = np.ones(num_columns)
        self.integrality[0] = 0
        self.unit = max(one.exec_s for one in problem.requests) or 1.0
        self._bytes = np.array([one.num_bytes for one in problem.requests])
        self._scale = max(float(self._bytes.max()), 1.0)
        self._adapter_bytes = np.array([one.num_bytes for one in self._adapters])
        self._rows: list[tuple[IntArray, FloatArray, float, float]] = []

    def bounds(self) -> Bounds:
        """Nothing goes to the host of a replica whose device has room for all."""
        from scipy.optimize import Bounds

        upper = np.ones(len(self.cost))
        upper[0] = np.inf
        every = float(self._bytes.sum() + self._adapter_bytes.sum())
        for j, replica in enumerate(self._problem.replicas):
            if replica.device_bytes >= every:
                upper[self._on_host[:, j]] = 0.0
        return Bounds(np.zeros(len(upper)), upper)

    def constraints(self) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        for j in range(self._num):
            self._of_replica(j)
        row_of = {one.name: k for k, one in enumerate(self._adapters)}
        for i, request in enumerate(self._problem.requests):
            places = np.concatenate([self._on_device[i], self._on_host[i]])
            self._row(places, np.ones(len(places)), 1.0, 1.0)
            if request.adapter is None:
                continue
            for j, loaded in enumerate(self._loaded[row_of[request.adapter]]):
                matching = np.array([loaded, self._on_device[i, j], self._on_host[i, j]])
                self._row(matching, np.array([1.0, -1.0, -1.0]), 0.0, np.inf)
        columns, values, lower, upper = zip(*self._rows, strict=True)
        ends = np.cumsum([0, *map(len, columns)])
        shape = (len(ends) - 1, len(self.cost))
        matrix = csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=shape)
        return LinearConstraint(matrix, lower, upper)

    def targets(self, x: FloatArray) -> list[int]:
        """Of each request, its replica."""
        return [int(j) for j in (x[self._on_device] + x[self._on_host]).argmax(axis=1)]

    def _row(self, columns: IntArray, values: FloatArray, lower: float, upper: float) -> None:
        self._rows.append((columns, values, lower, upper))

    def _of_replica(self, j: int) -> None:
        """Its seconds are at most T, its bytes at most what it has."""
        problem, replica = self._problem, self._problem.replicas[j]
        seconds = np.array(
            [
                one.exec_s * (1.0 if one.replica == replica.name else one.move_factor)
                for one in problem.requests
            ]
        )
        loads = np.array(
            [
                problem.affinity_s + (0.0 if one.name in replica.adapters else one.load_s)
                for one in self._adapters
            ]
        )
        device, host, loaded = self._on_device[:, j], self._on_host[:, j], self._loaded[:, j]
        everywhere = np.concatenate([device, host, loaded, [0]])
        times = np.concatenate([seconds, seconds + self._bytes / problem.swap_bytes_per_s, loads]) / self.unit
        self._row(everywhere, np.append(times, -1.0), -np.inf, 0.0)
        needed = np.concatenate([self._bytes, self._adapter_bytes]) / self._scale
        self._row(np.concatenate([device, loaded]), needed, -np.inf, replica.device_bytes / self._scale)
        self._row(host, self._bytes / self._scale, -np.inf, replica.host_bytes / self._scale)
