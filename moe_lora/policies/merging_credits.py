"""What dLoRA's batching keeps between steps: credits against starvation, thresholds that follow the load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_lora.config.settings import Settings, setting
from moe_lora.core.errors import ConfigError

from .merging_costs import Rows, Uid


@dataclass(frozen=True, kw_only=True)
class DLoraSettings(Settings):
    """dLoRA's parameters, to none of which the paper gives a value; these are chosen on simulated traces
    (docs/guides/merging.md).

    alpha_switch, beta_switch: of the ratio of the largest adapter's requests to those that FCFS order would
    serve; above the first the weights are merged, below the second unmerged.  They begin there and adapt
    within [least_threshold, most_threshold], beta_switch not above alpha_switch (bounds are ours: without
    them one that rises in proportion and falls by steps does not come back).  gamma_dec, gamma_mul, period:
    of Algorithm 2, which runs after so many steps at the latest.
    credit, t_starve, t_normal: what an adapter begins with, and when it starves and no longer does, of
    Algorithm 3; in times max_num_seqs, a credit being one request passed over in one step.  t_normal of 1 or
    more keeps the bound of `DLora`.
    """

    alpha_switch: float = setting(0.8, above=0)
    beta_switch: float = setting(0.3, above=0)
    gamma_dec: float = setting(0.05, least=0)
    gamma_mul: float = setting(1.5, least=1)
    period: int = setting(8, least=1)
    least_threshold: float = setting(0.1, above=0)
    most_threshold: float = setting(1.5, above=0)
    credit: float = setting(32.0, above=0)
    t_starve: float = setting(48.0, above=0)
    t_normal: float = setting(16.0, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_threshold > self.most_threshold:
            raise ConfigError(
                f"least_threshold={self.least_threshold} is above most_threshold={self.most_threshold}; "
                "lower the first or raise the second"
            )


class Credits:
    """Credits of adapters, whole numbers >= 0; they change hands and are never made or lost but for an
    adapter's own when it is first seen.

    initial: of each.  starve, normal: an adapter starves from more than `starve` until less than `normal`.
    Source: dLoRA, Algorithm 3 (A.1).
    """

    def __init__(self, initial: int, starve: int, normal: int) -> None:
        self.of: dict[Uid, int] = {}
        self.starving: set[Uid] = set()
        self._initial = initial
        self._starve = starve
        self._normal = normal

    def update(self, uids: Iterable[Uid]) -> None:
        """These have requests: give new ones their credit, and look who starves (lines 6-10)."""
        for uid in uids:
            credit = self.of.setdefault(uid, self._initial)
            if uid in self.starving and credit < self._normal:
                self.starving.discard(uid)
            elif credit > self._starve:
                self.starving.add(uid)

    def transfer(self, served: Iterable[Uid], passed_over: Rows) -> None:
        """For each request passed over, the richest of the served gives its adapter one, while it has any.

        served: at least one.
        """
        payers = sorted(served, key=str)
        for uid, num in passed_over.items():
            for _ in range(num):
                payer = max(payers, key=self.of.__getitem__)
                if not self.of[payer]:
                    return
                self.of[payer] -= 1
                self.of[uid] += 1

    def forget(self, uid: Uid) -> None:
        """The adapter is gone; the poorest take what it had above its first credit, the richest make up what
        was missing.
        """
        self.starving.discard(uid)
        surplus = self.of.pop(uid, self._initial) - self._initial
        change, choose = (1, min) if surplus > 0 else (-1, max)
        for _ in range(abs(surplus) if self.of else 0):
            self.of[choose(self.of, key=self.of.__getitem__)] += change


@dataclass(slots=True)
class Period:
    """Steps since the last break point, as they were and as they would have been in the other mode.

    rows, seconds: requests served in each mode, and the time of it.  Source: dLoRA, Algorithm 2.
    """

    merged: bool
    adapter: Uid
    num_steps: int = 0
    merged_rows: int = 0
    merged_s: float = 0.0
    fcfs_rows: int = 0
    fcfs_s: float = 0.0

    def add(self, merged: tuple[int, float], fcfs: tuple[int, float]) -> None:
        """One step: rows and seconds of the merged batch, and of the FCFS batch unmerged."""
        self.num_steps += 1
        self.merged_rows += merged[0]
        self.merged_s += merged[1]
        self.fcfs_rows += fcfs[0]
        self.fcfs_s += fcfs[1]

    def other_is_better(self, swap_s: float) -> bool:
        """Whether the mode that it was not in, the swap to it included, would have served more a second."""
        merged_s = self.merged_s + (0.0 if self.merged else swap_s)
        fcfs_s = self.fcfs_s + (swap_s if self.merged else 0.0)
        merged_wins = self.merged_rows * fcfs_s > self.fcfs_rows * merged_s
        fcfs_wins = self.merged_rows * fcfs_s < self.fcfs_rows * merged_s
        return fcfs_wins if self.merged else merged_wins


class Thresholds:
    """alpha_switch and beta_switch, which break points tune (Algorithm 2; beta mirrored: += and /=)."""

    def __init__(self, settings: DLoraSettings) -> None:
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
