# SPDX-License-Identifier: Apache-2.0
"""The number of instances by the load.

n instances with w requests waiting for room and r other requests are too few if w > waiting_high n.  Then
ceil((r + w) / (r/n + waiting_high)) suffice.  A load fits m instances if r + w <= full_share m f, with the
last such f = r/n.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from moe_lora.config.optional_parts import ScalingConfig
from moe_lora.core.clock import Clock, WallClock

logger = logging.getLogger(__name__)

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting_by_reason"
_TTFT, _UP = "vllm:time_to_first_token_seconds_bucket", "moe_lora:instance_up"
_SHARE, _LEAST = 0.95, 20
"""P95 of at least so many requests."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Metrics of a front end.

    waiting: for room.  running: other requests.  within: requests since the start, by bounds of TTFT in
    seconds.  live: names of instances.
    """

    waiting: float
    running: float
    within: Mapping[float, float]
    live: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """Requests in all instances, and P95 of TTFT in an interval."""

    waiting: float
    running: float
    ttft_ms: float | None = None

    def __str__(self) -> str:
        ttft = "" if self.ttft_ms is None else f", TTFT is {self.ttft_ms:.0f} ms (P95)"
        return f"{self.waiting:g} requests wait for room, {self.running:g} others{ttft}"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances of a cluster.  starting, roomless: names of instances without service or host."""

    number: int
    starting: Sequence[str] = ()
    roomless: Sequence[str] = ()

    @property
    def serving(self) -> int:
        return self.number - len(self.starting) - len(self.roomless)


Snapshots = Mapping[str, Snapshot | None]
"""By front end; None without an answer."""


def read_snapshot(text: str) -> Snapshot | None:
    """A snapshot in Prometheus' format; None without an engine."""
    names = (_RUNNING, _WAITING, _TTFT, _UP)
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(names)]
    families = text_string_to_metric_families("".join(lines))
    samples = [one for family in families for one in family.samples]
    found = {(one.name, one.labels.get("reason") or one.labels.get("le")): one.value for one in samples}
    if (_RUNNING, None) not in found:
        return None
    return Snapshot(
        waiting=found[_WAITING, "capacity"],
        running=found[_RUNNING, None] + found[_WAITING, "deferred"],
        within={float(bound): value for (name, bound), value in found.items() if name == _TTFT and bound},
        live=[one.labels["instance"] for one in samples if one.name == _UP and one.value],
    )


def load_of(before: Snapshots, now: Snapshots) -> FleetLoad | None:
    """The load between two looks; None if a front end lacks metrics."""
    found = [one for one in now.values() if one is not None]
    if not found or len(found) < len(now):
        return None
    within: Counter[float] = Counter()
    for name, one in now.items():
        last = before.get(name)
        if one is not None and last is not None:
            restarted = one.within.get(math.inf, 0) < last.within.get(math.inf, 0)
            within.update(one.within)
            within.subtract({} if restarted else last.within)
    # Each front end reports the requests of all, and its own TTFT.
    return FleetLoad(
        waiting=max(one.waiting for one in found),
        running=max(one.running for one in found),
        ttft_ms=_percentile_ms(within),
    )


def _percentile_ms(within: Mapping[float, float]) -> float | None:
    """Linear between two bounds; above the last finite bound, this bound."""
    rank, low, below = _SHARE * within.get(math.inf, 0), 0.0, 0.0
    if rank < _SHARE * _LEAST:
        return None
    for bound, count in sorted(within.items()):
        if count >= rank:
            high = low if bound == math.inf else bound
            return 1000 * (low + (high - low) * (rank - below) / (count - below))
        low, below = bound, count
    return None


class ScalingRule:
    """Adds instances at once, and removes one after a pause.  reason: of the last decision."""

    def __init__(self, config: ScalingConfig, max_num_seqs: int) -> None:
        self.config = config
        self.reason = "no decision yet"
        self._full = self._most = float(max_num_seqs)
        self._lacks = False
        self._number: int | None = None
        self._changed_s = self._loaded_s = 0.0

    def decide(self, now_s: float, load: FleetLoad | None, fleet: Fleet) -> int:
        """The wanted number of instances, within the bounds."""
        number, reason = self._decide(now_s, load, fleet)
        self.reason = reason if load is None else f"{load}: {reason}"
        return number

    def _decide(self, now_s: float, load: FleetLoad | None, fleet: Fleet) -> tuple[int, str]:
        config, number = self.config, fleet.number
        if fleet.starting or number != self._number:
            self._number, self._changed_s, self._loaded_s = number, now_s, now_s
        if load is None:
            self._loaded_s = now_s
            return number, "a front end has no metrics"
        needed = self._needed(load, fleet)
        room = config.full_share * self._full * min(fleet.serving, number - 1)
        if self._lacks or load.running + load.waiting > room:
            self._loaded_s = now_s
        if fleet.starting:
            return number, f"{fleet.starting[0]} does not serve yet"
        if needed > number and not fleet.roomless:
            return self._added(now_s, needed, number)
        if number > config.min_instances and now_s - self._loaded_s >= config.remove_pause_s:
            return number - 1, f"{number - 1} suffice since {config.remove_pause_s} s"
        if fleet.roomless:
            return number, f"no host has room for {fleet.roomless[0]}"
        return number, f"{number} suffice"

    def _needed(self, load: FleetLoad, fleet: Fleet) -> int:
        config, serving, number = self.config, fleet.serving, fleet.number
        if not serving:
            return number
        each, high = load.running / serving, config.waiting_high
        waits = load.waiting > high * serving
        is_late = config.ttft_ms is not None and (load.ttft_ms or 0) > config.ttft_ms
        if waits or is_late:
            self._full = min(max(each, self._full if self._lacks else 0.0), self._most)
        self._lacks = waits or is_late
        needed = math.ceil((load.running + load.waiting) / (each + high)) if waits else 0
        return max(number + is_late, needed)

    def _added(self, now_s: float, needed: int, number: int) -> tuple[int, str]:
        config = self.config
        if number == config.max_instances:
            return number, "max_instances is reached"
        if now_s - self._changed_s < config.add_pause_s:
            return number, f"the last change was less than {config.add_pause_s} s ago"
        needed = min(needed, config.max_instances)
        return needed, f"{needed} are needed"


class Scaler:
    """Sets the number by a rule."""

    def __init__(
        self,
        rule: ScalingRule,
        look: Callable[[], Awaitable[tuple[Snapshots, Fleet]]],
        change: Callable[[int], Awaitable[None]],
        clock: Clock | None = None,
    ) -> None:
        self.rule = rule
        self._look, self._change = look, change
        self._clock = clock or WallClock()
        self._before: Snapshots = {}

    async def run(self, changing: asyncio.Lock) -> None:
        """Decide until cancelled.  changing: held meanwhile."""
        while True:
            await asyncio.sleep(self.rule.config.interval_s)
            async with changing:
                try:
                    await self.step()
                except Exception:  # the cluster serves on
                    logger.exception("no decision on the number of instances")

    async def step(self) -> None:
        """Decide once."""
        snapshots, fleet = await self._look()
        number = self.rule.decide(self._clock.now_s(), load_of(self._before, snapshots), fleet)
        self._before = snapshots
        if number != fleet.number:
            logger.info("%d instances after %d: %s", number, fleet.number, self.rule.reason)
            await self._change(number)
