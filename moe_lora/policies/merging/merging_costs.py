# SPDX-License-Identifier: Apache-2.0
"""Times of unmerged, merged and mixed steps, and of swaps: modelled and measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Literal, TypeAlias

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

    A row of the merged adapter costs as a base row; other rows of a mixed step pay for two deltas (-delta_a +
    delta_b).  Model times are scaled by the measured ratio of the mode, or the mean of other modes if
    unmeasured, so a wrong model favours no mode.
    lora_rank: of an adapter.  swap_s: from the merged adapter to another; None: none.
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
        """A decode step with these requests on weights with `merged`."""
        return self._model_s(rows, merged) * self._ratio(mode_of(rows, merged))

    def swap_s(self, before: Uid, after: Uid) -> float:
        """A swap from `before` to `after`; 0 if equal."""
        if before == after:
            return 0.0
        return self._modelled_swap_s(before, after) * self._ratio("swap")

    def expect(self, rows: Rows, merged: Uid) -> None:
        """Announce the next step; `took` compares."""
        self._expected = (dict(rows), merged)

    def took(self, mode: Mode, num_rows: int, seconds: float) -> None:
        """The measured step; ignored with other rows (e.g. a prompt's) or another mode."""
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
