# SPDX-License-Identifier: Apache-2.0
"""Modelled and measured times of steps by mode, and of swaps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.timing.step_model import Row, StepModel

Uid: TypeAlias = Hashable
"""An adapter's; None: the base model."""
Mode: TypeAlias = Literal["unmerged", "merged", "mixed"]
Rows: TypeAlias = Mapping[Uid, int]
"""Requests of each adapter in a step."""
_SHARE = 0.05


def mode_of(rows: Rows, merged: Uid) -> Mode:
    """merged: the adapter in the weights, or None."""
    if merged is None:
        return "unmerged"
    return "merged" if set(rows) <= {merged} else "mixed"


class MergingCosts:
    """Seconds of decode steps by mode, and of swaps.

    The merged adapter's rows cost as base rows; other rows of a mixed step pay for two deltas.  The mode's
    measured ratio (unmeasured: the mean of other modes) scales model times, so a wrong model favours no mode.
    """

    def __init__(
        self,
        model: StepModel,
        lora_rank: Callable[[Uid], int],
        swap_s: Callable[[Uid, Uid], float],
    ) -> None:
        self._model = model
        self._lora_rank = lora_rank
        self._modelled_swap_s = swap_s
        self._ratios: dict[str, float] = {}
        self._expected: tuple[Rows, Uid] = ({}, None)

    def step_s(self, rows: Rows, merged: Uid) -> float:
        """Seconds of a decode step on weights with `merged`."""
        return self._model_s(rows, merged) * self._ratio(mode_of(rows, merged))

    def swap_s(self, before: Uid, after: Uid) -> float:
        """Seconds of a swap; 0 if equal."""
        return 0.0 if before == after else self._modelled_swap_s(before, after) * self._ratio("swap")

    def expect(self, rows: Rows, merged: Uid) -> None:
        """Announce the next step; `took` compares."""
        self._expected = (dict(rows), merged)

    def took(self, mode: Mode, num_rows: int, seconds: float) -> None:
        """Record a measured step; other rows or modes are ignored."""
        rows, merged = self._expected
        if num_rows and num_rows == sum(rows.values()) and mode == mode_of(rows, merged):
            self._learn(mode, seconds, self._model_s(rows, merged))

    def swap_took(self, before: Uid, after: Uid, seconds: float) -> None:
        """A whole swap was measured."""
        self._learn("swap", seconds, self._modelled_swap_s(before, after))

    def _learn(self, what: str, seconds: float, expected_s: float) -> None:
        if expected_s > 0 and seconds > 0:
            ratio = seconds / expected_s
            before = self._ratios.get(what, ratio)
            self._ratios[what] = before + _SHARE * (ratio - before)

    def _ratio(self, what: str) -> float:
        if what in self._ratios:
            return self._ratios[what]
        steps = [ratio for mode, ratio in self._ratios.items() if mode != "swap"]
        return sum(steps) / len(steps) if steps else 1.0

    def _model_s(self, rows: Rows, merged: Uid) -> float:
        others = sum(num for uid, num in rows.items() if uid != merged) if merged is not None else 0
        work = self._model.work(
            self._row(uid, num) if uid != merged else Row(None, 0, num) for uid, num in rows.items() if num
        )
        seconds = self._model.seconds("decode", work)
        if others:
            taken_out, none = self._row(merged, others), Row(None, 0, others)
            seconds += self._alone_s(taken_out) - self._alone_s(none)
        return seconds

    def _alone_s(self, row: Row) -> float:
        return self._model.seconds("decode", self._model.work([row]))

    def _row(self, uid: Uid, num_rows: int) -> Row:
        return Row(None, 0, num_rows) if uid is None else Row(str(uid), self._lora_rank(uid), num_rows)


class Credits:
    """Credits of adapters, whole numbers >= 0.

    Transfers keep the sum.  share: credits per other adapter, so n adapters start with share (n - 1) each.
    starve, normal: above the start.  An adapter starves from more than `starve` until less than `normal`.
    Source: dLoRA, Algorithm 3 (A.1), and the artifact.
    """

    def __init__(self, share: int, starve: int, normal: int) -> None:
        self.of: dict[Uid, int] = {}
        self.starving: set[Uid] = set()
        self._share = share
        self._starve = starve
        self._normal = normal

    @property
    def start(self) -> int:
        """First credit of today's adapters."""
        return self._share * max(0, len(self.of) - 1)

    def update(self, uids: Iterable[Uid]) -> None:
        """Add new adapters, and update the starving set (lines 6-10)."""
        for uid in uids:
            if uid not in self.of:
                self._add(uid)
            above = self.of[uid] - self.start
            if uid in self.starving and above < self._normal:
                self.starving.discard(uid)
            elif above > self._starve:
                self.starving.add(uid)

    def _add(self, uid: Uid) -> None:
        for other in self.of:
            self.of[other] += self._share
        self.of[uid] = 0
        self.of[uid] = self.start

    def transfer(self, served: Iterable[Uid], passed_over: Rows) -> None:
        """For each passed-over request, the richest served adapter pays one credit, if any."""
        payers = sorted(served, key=str)
        for uid, num in passed_over.items():
            for _ in range(num):
                payer = max(payers, key=self.of.__getitem__)
                if not self.of[payer]:
                    return
                self.of[payer] -= 1
                self.of[uid] += 1

    def forget(self, uid: Uid) -> None:
        """Remove an adapter, and its share from other adapters.

        The poorest get gained credits; the richest pay losses.
        """
        self.starving.discard(uid)
        if self.of.pop(uid, None) is None:
            return
        rest = {other: max(0, credit - self._share) for other, credit in self.of.items()}
        self.of = _levelled(rest, self.start * len(rest))


def _levelled(credits: dict[Uid, int], total: int) -> dict[Uid, int]:
    """Same sum: the richest fall to one level, or the poorest rise."""
    surplus = sum(credits.values()) - total
    sign = 1 if surplus > 0 else -1
    ordered = sorted(credits, key=lambda uid: -sign * credits[uid])
    left = abs(surplus)
    for number, uid in enumerate(ordered, start=1):
        level = credits[uid]
        step = left if number == len(ordered) else abs(level - credits[ordered[number]])
        if left <= number * step:
            each, more = divmod(left, number)
            changed = {
                one: level - sign * (each + (place < more)) for place, one in enumerate(ordered[:number])
            }
            return credits | changed
        left -= number * step
    return credits


@dataclass(slots=True)
class Period:
    """Steps since the last break point, in both modes.

    Source: dLoRA, Algorithm 2.
    """

    merged: bool
    adapter: Uid
    num_steps: int = 0
    merged_rows: int = 0
    merged_s: float = 0.0
    fcfs_rows: int = 0
    fcfs_s: float = 0.0

    def add(self, merged: tuple[int, float], fcfs: tuple[int, float]) -> None:
        """One step's rows and seconds: merged batch, and FCFS batch unmerged."""
        self.num_steps += 1
        self.merged_rows += merged[0]
        self.merged_s += merged[1]
        self.fcfs_rows += fcfs[0]
        self.fcfs_s += fcfs[1]

    def other_is_better(self, swap_s: float) -> bool:
        """True if the other mode would have served more per second."""
        merged_s = self.merged_s + (0.0 if self.merged else swap_s)
        fcfs_s = self.fcfs_s + (swap_s if self.merged else 0.0)
        merged_wins = self.merged_rows * fcfs_s > self.fcfs_rows * merged_s
        fcfs_wins = self.merged_rows * fcfs_s < self.fcfs_rows * merged_s
        return fcfs_wins if self.merged else merged_wins


class Thresholds:
    """alpha_switch and beta_switch, tuned at break points (Algorithm 2; beta mirrored: += and /=)."""

    def __init__(self, settings: DLoraConfig) -> None:
        self.alpha = settings.alpha_switch
        self.beta = min(settings.beta_switch, settings.alpha_switch)
        self._settings = settings

    def tune(self, period: Period, swap_s: float) -> None:
        """A period has ended."""
        settings, easier = self._settings, period.other_is_better(swap_s)
        if period.merged:
            self.beta = self.beta + settings.gamma_dec if easier else self.beta / settings.gamma_mul
        else:
            self.alpha = self.alpha - settings.gamma_dec if easier else self.alpha * settings.gamma_mul
        least, most = settings.least_threshold, settings.most_threshold
        self.alpha = min(max(self.alpha, least), most)
        self.beta = min(max(self.beta, least), self.alpha)
