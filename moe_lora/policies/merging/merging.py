# SPDX-License-Identifier: Apache-2.0
"""Mode and requests of the next step: dLoRA's rules and ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_lora.config.engine import BATCHINGS
from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.core.errors import ConfigError
from moe_lora.policies.admission.admission import WaitingView

from .merging_costs import Credits, MergingCosts, Mode, Period, Rows, Thresholds, Uid


@dataclass(frozen=True, slots=True)
class Batching:
    """The next step.

    merge: adapter for the weights, or None.  only: adapters allowed to compute (None among them: the base
    model); None: all.  at_once: change whole weights before the step.
    """

    merge: Uid = None
    only: frozenset[Uid] | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class MergingView:
    """A policy's view before a step.

    requests: running, then waiting, FCFS.  merged: adapter in all weights; None: none, or during a swap.
    eligible: True if an adapter may be merged; not called for the base model.
    """

    requests: Sequence[WaitingView]
    max_num_seqs: int
    merged: Uid
    eligible: Callable[[Uid], bool]
    now_s: float
    swapping: bool = False


class MergingPolicy(Protocol):
    """Called before each step with requests."""

    def decide(self, view: MergingView) -> Batching: ...

    def took(
        self, batching: Batching, mode: Mode, num_rows: int, seconds: float, swap_s: float = 0.0
    ) -> None:
        """Records a step; swap_s of `seconds` went to weight changes."""
        ...

    def forget(self, uid: Uid) -> None:
        """The adapter is unloaded without requests."""
        ...


def first_come(view: MergingView) -> Rows:
    """B_fcfs: requests per adapter, FCFS."""
    return Counter(request.adapter_uid for request in view.requests[: view.max_num_seqs])


class UnmergedOnly:
    """Everything unmerged, as S-LoRA and Punica."""

    def decide(self, view: MergingView) -> Batching:
        return Batching()

    def took(
        self, batching: Batching, mode: Mode, num_rows: int, seconds: float, swap_s: float = 0.0
    ) -> None:
        """Stateless."""

    def forget(self, uid: Uid) -> None:
        """Stateless."""


class MergedOnly(UnmergedOnly):
    """One adapter's requests at a time, merged, then the oldest request's adapter.

    Ineligible adapters and the base model are unmerged.
    """

    def __init__(self) -> None:
        self._turn: Uid = None
        self._since_s = -math.inf

    def decide(self, view: MergingView) -> Batching:
        if not view.requests:
            return Batching(view.merged, at_once=True)
        oldest = min(view.requests, key=lambda request: request.arrival_s)
        if not any(
            request.adapter_uid == self._turn and request.arrival_s <= self._since_s
            for request in view.requests
        ):
            self._turn, self._since_s = oldest.adapter_uid, view.now_s
        merge = self._turn if self._turn is not None and view.eligible(self._turn) else None
        return Batching(merge, frozenset((self._turn,)), at_once=True)


class DLora:
    """Merges for the adapter of most requests if they are many relative to FCFS, and stops if few.

    Algorithm 1; thresholds by Algorithm 2, starvation by Algorithm 3 (A.1).  Our choices: the richest served
    adapter pays; starving adapters run unmerged unless only the merged one starves.
    """

    def __init__(self, costs: MergingCosts, settings: DLoraConfig | None = None) -> None:
        self.settings = settings or DLoraConfig()
        self.thresholds = Thresholds(self.settings)
        self.credits: Credits | None = None
        self._costs = costs
        self._merged: Uid = None
        self._swap: tuple[Uid, Uid] | None = None
        self._period: Period | None = None

    def decide(self, view: MergingView) -> Batching:
        if not view.swapping:
            self._merged = view.merged
        fcfs = first_come(view)
        if not fcfs:
            return Batching(self._merged, at_once=True)
        waiting = Counter(request.adapter_uid for request in view.requests)
        if self.credits is None:
            batch, settings = view.max_num_seqs, self.settings
            scaled = (settings.credit, settings.t_starve, settings.t_normal)
            self.credits = Credits(*(math.ceil(times * batch) for times in scaled))
        self.credits.update(waiting)
        served = self._starving(view) or self._batch(view, fcfs, waiting)
        if served is None:
            only, rows = None, fcfs
        else:
            only = frozenset(served)
            rows = Counter(r.adapter_uid for r in view.requests if r.adapter_uid in only)
            rows = _at_most(rows, view.max_num_seqs)
            self.credits.transfer(served, {uid: num for uid, num in fcfs.items() if uid not in only})
            if only >= fcfs.keys() and self._merged is None:
                only = None
        before = view.merged
        self._swap = None if view.swapping or before == self._merged else (before, self._merged)
        self._costs.expect(rows, self._merged)
        return Batching(self._merged, only, at_once=True)

    def took(
        self, batching: Batching, mode: Mode, num_rows: int, seconds: float, swap_s: float = 0.0
    ) -> None:
        self._costs.took(mode, num_rows, seconds - swap_s)
        if self._swap is not None and swap_s:
            self._costs.swap_took(*self._swap, swap_s)

    def forget(self, uid: Uid) -> None:
        if self.credits is not None:
            self.credits.forget(uid)

    def _starving(self, view: MergingView) -> Iterable[Uid] | None:
        """B_starve, or None (lines 11-15 of Algorithm 3)."""
        assert self.credits is not None
        starving = self.credits.starving
        first = [r.adapter_uid for r in view.requests if r.adapter_uid in starving][: view.max_num_seqs]
        if not first:
            return None
        if set(first) != {self._merged}:
            self._break_point()
            self._merged = None
        return set(first)

    def _batch(self, view: MergingView, fcfs: Rows, waiting: Rows) -> Iterable[Uid] | None:
        """Algorithm 1; the adapter of R_merge, or None for B_fcfs."""
        num_fcfs = sum(fcfs.values())
        ahead = self._merged
        if ahead is None:
            legal = [uid for uid in waiting if self._is_legal(view, uid, fcfs)]
            largest = max(legal, key=waiting.__getitem__, default=None)
            self._note(view, largest, fcfs, waiting)
            if largest is None or waiting[largest] / num_fcfs < self.thresholds.alpha:
                return None
            self._break_point()
            self._merged = largest
            return (largest,)
        self._note(view, ahead, fcfs, waiting)
        few = waiting.get(ahead, 0) / num_fcfs < self.thresholds.beta
        if few or not self._is_legal(view, ahead, fcfs):
            self._break_point()
            self._merged = None
            return None
        return (ahead,)

    def _is_legal(self, view: MergingView, uid: Uid, fcfs: Rows) -> bool:
        """L_eligible (line 18): may be merged, and can pay."""
        assert self.credits is not None
        passed_over = sum(fcfs.values()) - fcfs.get(uid, 0)
        return uid is not None and self.credits.of[uid] >= passed_over and view.eligible(uid)

    def _note(self, view: MergingView, adapter: Uid, fcfs: Rows, waiting: Rows) -> None:
        period, merged = self._period, self._merged is not None
        if period is not None and (
            period.adapter != adapter or period.merged != merged or period.num_steps >= self.settings.period
        ):
            self._break_point()
        if adapter is None:
            return
        if self._period is None:
            self._period = Period(merged, adapter)
        num = min(waiting.get(adapter, 0), view.max_num_seqs)
        self._period.add(
            (num, self._costs.step_s({adapter: num}, adapter)),
            (sum(fcfs.values()), self._costs.step_s(fcfs, None)),
        )

    def _break_point(self) -> None:
        period, self._period = self._period, None
        if period is not None:
            self.thresholds.tune(period, self._costs.swap_s(None, period.adapter))


def _at_most(rows: Counter[Uid], most: int) -> Counter[Uid]:
    total = sum(rows.values())
    if total <= most:
        return rows
    return Counter({uid: max(1, num * most // total) for uid, num in rows.items()})


class CheapestMode:
    """The mode of least cost per request: unmerged, mixed, or merged for one adapter alone.

    The weights change once missed savings exceed the change's cost (rent or buy).  Merged-only steps pass
    others over for at most max_wait_s and a step, then none for as long.
    """

    def __init__(self, costs: MergingCosts, max_wait_s: float = 1.0) -> None:
        if not 0 <= max_wait_s < math.inf:
            raise ConfigError(f"max_wait_s={max_wait_s} must be 0 or more and finite")
        self._costs = costs
        self._max_wait_s = max_wait_s
        self._target: Uid = None
        self._swap: tuple[Uid, Uid] | None = None
        self._swap_s = 0.0
        self._saved_s: dict[Uid, float] = {}
        self._passed_s = 0.0
        self._rests = False
        self._last = Batching()
        self._last_s = math.inf
        self._filled = 1.0
        self._num_meant = 0

    def decide(self, view: MergingView) -> Batching:
        self._keep_time(view)
        fcfs = first_come(view)
        target = self._target if view.swapping else view.merged
        if target is not None and not view.eligible(target):
            self._saved_s.clear()
            target = None
        elif fcfs and not view.swapping:
            target = self._carried(view, fcfs, target)
        if target != self._target or (self._swap is None and target != view.merged):
            self._swap, self._swap_s = (view.merged, target), 0.0
        self._target = target
        only = None
        if target is not None and target == view.merged and self._serves_alone(view, fcfs, target):
            only = frozenset((target,))
        self._num_meant = self._num_alone(view, target) if only else 0
        self._costs.expect({target: self._num_meant} if only else fcfs, view.merged)
        self._last = Batching(target, only)
        return self._last

    def took(
        self, batching: Batching, mode: Mode, num_rows: int, seconds: float, swap_s: float = 0.0
    ) -> None:
        self._swap_s += swap_s
        self._costs.took(mode, num_rows, seconds - swap_s)
        if self._num_meant:
            self._filled += 0.1 * (min(1.0, num_rows / self._num_meant) - self._filled)

    def forget(self, uid: Uid) -> None:
        self._saved_s.pop(uid, None)

    def _keep_time(self, view: MergingView) -> None:
        elapsed_s = max(0.0, view.now_s - self._last_s)
        self._last_s = view.now_s
        self._passed_s = max(0.0, self._passed_s + (elapsed_s if self._last.only else -elapsed_s))
        if self._passed_s >= self._max_wait_s:
            self._rests = True
        elif not self._passed_s:
            self._rests = False
        if self._swap is not None and not view.swapping and view.merged == self._swap[1]:
            self._costs.swap_took(*self._swap, self._swap_s)
            self._swap = None

    def _carried(self, view: MergingView, fcfs: Rows, present: Uid) -> Uid:
        mergeable = (uid for uid in fcfs if uid is not None and view.eligible(uid))
        largest = max(mergeable, key=fcfs.__getitem__, default=None)
        num = sum(fcfs.values())
        present_s = self._request_s(view, fcfs, present)
        self._saved_s = {
            uid: max(0.0, self._saved_s.get(uid, 0.0) + num * (present_s - self._request_s(view, fcfs, uid)))
            for uid in dict.fromkeys((None, largest))
            if uid != present
        }
        best = max(self._saved_s, key=self._saved_s.__getitem__, default=present)
        if self._saved_s.get(best, 0.0) <= self._costs.swap_s(present, best):
            return present
        self._saved_s.clear()
        return best

    def _request_s(self, view: MergingView, fcfs: Rows, merged: Uid) -> float:
        """Seconds per request: the cheaper of mixed and merged-only."""
        all_s = self._costs.step_s(fcfs, merged) / sum(fcfs.values())
        if merged is None or self._rests or merged not in fcfs:
            return all_s
        return min(all_s, self._alone_s(view, merged))

    def _serves_alone(self, view: MergingView, fcfs: Rows, merged: Uid) -> bool:
        if self._rests or not self._max_wait_s or merged not in fcfs or len(fcfs) == 1:
            return False
        return self._alone_s(view, merged) < self._costs.step_s(fcfs, merged) / sum(fcfs.values())

    def _alone_s(self, view: MergingView, merged: Uid) -> float:
        num = self._num_alone(view, merged)
        return self._costs.step_s({merged: num}, merged) / (num * self._filled)

    def _num_alone(self, view: MergingView, merged: Uid) -> int:
        num = sum(request.adapter_uid == merged for request in view.requests)
        return min(num, view.max_num_seqs)


def make_merging_policy(
    name: str, costs: MergingCosts | None = None, dlora: DLoraConfig | None = None
) -> MergingPolicy:
    """Raises ConfigError for an unknown policy, or without its costs."""
    if name == "unmerged":
        return UnmergedOnly()
    if name == "merged":
        return MergedOnly()
    if name not in BATCHINGS:
        raise ConfigError(f"batching={name!r} is unknown; choose one of {', '.join(BATCHINGS)}")
    if costs is None:
        raise ConfigError(
            f"batching={name!r} needs a performance model; give --set front_end.performance_model=FILE"
        )
    return DLora(costs, dlora) if name == "dlora" else CheapestMode(costs)
