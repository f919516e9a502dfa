# SPDX-License-Identifier: Apache-2.0
"""Beats: an engine's proof of progress, and a front end's measure of silence."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import Clock, WallClock

from .messages import Beat

BEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Seconds without progress until an engine counts as silent, and as dead."""

    timeout_s: float = RoutingConfig.heartbeat_timeout_s
    dead_s: float = RoutingConfig.heartbeat_dead_s

    @staticmethod
    def of(config: RoutingConfig) -> Heartbeat:
        return Heartbeat(timeout_s=config.heartbeat_timeout_s, dead_s=config.heartbeat_dead_s)

    @property
    def interval_s(self) -> float:
        """Interval of an engine's beats."""
        return self.timeout_s / BEATS_PER_TIMEOUT


class Pulse:
    """Time that a thread spends on one piece of work; set by the thread, read by others.  held_back: see
    `Beat`.
    """

    held_back = False

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._since_s: float | None = None

    def work(self) -> None:
        """The thread starts a short piece of work."""
        self._since_s = self._clock.now_s()

    def rest(self) -> None:
        """The thread waits for work."""
        self._since_s = None

    def stuck_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s


class Hearing:
    """Times of an engine's last progress and last beat."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._heard_s = self._beat_s = self._clock.now_s()

    def hear(self, beat: Beat) -> None:
        self._beat_s = self._clock.now_s()
        self._heard_s = max(self._heard_s, self._beat_s - beat.stuck_s)

    def restart_clock(self) -> None:
        """Restart both times after a gap in this process."""
        self._heard_s = self._beat_s = self._clock.now_s()

    def unheard_s(self) -> float:
        """Seconds since the last beat: several intervals if the engine's process is stopped or cut off."""
        return self._clock.now_s() - self._beat_s

    def silent_s(self) -> float:
        """Seconds since the engine's last progress."""
        return self._clock.now_s() - self._heard_s
