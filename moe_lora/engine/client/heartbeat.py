# SPDX-License-Identifier: Apache-2.0
"""Beats: how an engine shows that it goes on, and when its front end takes it for silent."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import Clock, WallClock

from .messages import Beat

BEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """When an engine counts as silent, and when as dead, in seconds since it last got on."""

    timeout_s: float = RoutingConfig.heartbeat_timeout_s
    dead_s: float = RoutingConfig.heartbeat_dead_s

    @staticmethod
    def of(config: RoutingConfig) -> Heartbeat:
        return Heartbeat(timeout_s=config.heartbeat_timeout_s, dead_s=config.heartbeat_dead_s)

    @property
    def interval_s(self) -> float:
        """From one beat of an engine to the next."""
        return self.timeout_s / BEATS_PER_TIMEOUT


class Pulse:
    """How long a thread has been at one piece of work; it tells, others ask.  held_back: see `Beat`."""

    held_back = False

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._since_s: float | None = None

    def work(self) -> None:
        """The thread begins something that it should soon be done with."""
        self._since_s = self._clock.now_s()

    def rest(self) -> None:
        """It waits until there is something to do."""
        self._since_s = None

    def stuck_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s


class Hearing:
    """When an engine last got on, and when it was last heard of, as far as its beats tell."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._heard_s = self._beat_s = self._clock.now_s()

    def hear(self, beat: Beat) -> None:
        self._beat_s = self._clock.now_s()
        self._heard_s = max(self._heard_s, self._beat_s - beat.stuck_s)

    def restart_clock(self) -> None:
        """Nothing could be heard until now."""
        self._heard_s = self._beat_s = self._clock.now_s()

    def unheard_s(self) -> float:
        """Seconds since a beat came: more than a few intervals if its process is stopped, or cut off."""
        return self._clock.now_s() - self._beat_s

    def silent_s(self) -> float:
        """Seconds since the engine got on."""
        return self._clock.now_s() - self._heard_s
