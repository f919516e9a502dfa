"""What is done to a running cluster: parts of it killed, or stopped for a while, one after the other."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .chaos_cluster import ChaosCluster, Figures
from .chaos_replay import Replay
from .cluster_jobs import alive

RECOVERY_S = 180.0
"""For all parts to be there again."""


@dataclass(frozen=True)
class Strike:
    """fault: its name.  victims: the roles that it hit.  at_s: on the monotonic clock.  after: requests ended
    by then.
    """

    fault: str
    victims: tuple[str, ...]
    at_s: float
    after: int


@dataclass
class Striker:
    """Does the `faults` one after the other while a replay runs, each when the cluster is whole again.

    strikes: those that were done.  resent: requests that an instance left to another, by the front end's
    process.  num_kills: by role; they are spread, since one that ends again and again is given up.
    """

    cluster: ChaosCluster
    replay: Replay
    faults: Sequence[str]
    rng: random.Random
    strikes: list[Strike] = field(default_factory=list)
    resent: Counter[int] = field(default_factory=Counter)
    num_kills: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Raises AssertionError if the cluster does not become whole; the replay ends in any case."""
        between = self.replay.least // (len(self.faults) + 1)
        try:
            for number, fault in enumerate(self.faults, 1):
                self._wait(partial(self._have_ended, number * between), f"{number * between} requests end")
                version = self.cluster.table_version()
                self._strike(fault)
                self._wait(self.cluster.is_whole, f"all parts are there after {fault}")
                self._wait(partial(self._has_table_after, version), f"another table after {fault}")
        finally:
            self.replay.stop()

    def _have_ended(self, num_requests: int) -> bool:
        return self.replay.outcomes.num_ended >= num_requests

    def _has_table_after(self, version: int) -> bool:
        return self.cluster.table_version() > version

    def _strike(self, fault: str) -> None:
        victims = VICTIMS[fault](self, self.count_resent())
        self.strikes.append(Strike(fault, victims, time.monotonic(), self.replay.outcomes.num_ended))
        if fault in SILENCES:
            self._silence(victims, SILENCES[fault])
            return
        said = AGAIN.get(fault, "")
        before = self.cluster.count(said)
        self._kill(victims)
        if said:
            self._wait(lambda: self.cluster.count(said) > before, f"{victims} say {said!r}")
            self._kill(victims)

    def _silence(self, victims: Sequence[str], said: str) -> None:
        """Stop processes until the log has noticed."""
        pids, before = self.cluster.pids(), self.cluster.count(said)
        for name in victims:
            os.kill(pids[name], signal.SIGSTOP)
        self._wait(lambda: self.cluster.count(said) > before, f"the silence of {victims} is noticed")
        for name in victims:
            os.kill(pids[name], signal.SIGCONT)

    def _kill(self, victims: Sequence[str]) -> None:
        """Kill processes; return when others have their roles."""
        pids = self.cluster.pids()
        self.num_kills.update(victims)
        for name in victims:
            os.kill(pids[name], signal.SIGKILL)
        self._wait(lambda: not any(alive(pids[name]) for name in victims), f"{victims} end")
        self._wait(
            lambda: all(self.cluster.pids()[name] != pids[name] for name in victims),
            f"{victims} are started again",
        )

    def count_resent(self) -> Figures:
        """Bring `resent` up to date; the metrics that say it."""
        figures, pids = self.cluster.figures(), self.cluster.pids()
        for name, values in figures.items():
            of_it = sum(v for (metric, _), v in values.items() if metric == "instance_requests_resent_total")
            self.resent[pids[name]] = max(self.resent[pids[name]], int(of_it))
        return figures

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        self.cluster.until(condition, what, RECOVERY_S)


def _busy_instance(striker: Striker, figures: Figures) -> tuple[str, ...]:
    """One that computes something, once there is one."""
    while True:
        values = next(iter(figures.values()))
        busy = [i for (name, i), v in values.items() if name == "instance_requests_running" and v]
        if busy:
            return (min(busy, key=lambda one: (striker.num_kills[one], striker.rng.random())),)
        figures = striker.cluster.figures()


def _holder(striker: Striker, figures: Figures) -> tuple[str, ...]:
    """Of the instances that hold adapters one that was killed least; of these the one with most."""
    held = {i: v for (name, i), v in next(iter(figures.values())).items() if name == "instance_pool_adapters"}
    holders = [one for one, number in held.items() if number]
    assert holders, f"no instance holds an adapter: {held}"
    return (min(holders, key=lambda one: (striker.num_kills[one], -held[one])),)


def _all_instances(striker: Striker, _: Figures) -> tuple[str, ...]:
    return tuple(f"instance-{number}" for number in range(striker.cluster.num_instances))


def _front_end(striker: Striker, _: Figures) -> tuple[str, ...]:
    return (f"front-end-{striker.rng.randrange(striker.cluster.num_front_ends)}",)


def _controller(striker: Striker, _: Figures) -> tuple[str, ...]:
    return ("controller",)


Choice = Callable[[Striker, Figures], tuple[str, ...]]


def _both(one: Choice, other: Choice) -> Choice:
    return lambda striker, figures: one(striker, figures) + other(striker, figures)


VICTIMS: dict[str, Choice] = {
    "instance killed": _busy_instance,
    "holder killed": _holder,
    "instance killed twice": _busy_instance,
    "controller killed twice": _controller,
    "all instances killed": _all_instances,
    "controller killed": _controller,
    "front end killed": _front_end,
    "controller and instance killed": _both(_controller, _busy_instance),
    "controller and front end killed": _both(_controller, _front_end),
    "instance silent": _busy_instance,
    "instance silent for long": _busy_instance,
    "controller silent": _controller,
}
AGAIN = {"instance killed twice": "engine ready", "controller killed twice": "the controller listens"}
"""Faults that kill a second time, when the new process says this: while it comes in."""
SILENCES = {
    "instance silent": r"is silent for [\d.]+ s; it gets no requests",
    "instance silent for long": r"is silent for \d+ s and is ended",
    "controller silent": r"lost the controller",
}
"""Faults that stop a process until the log says this once more; all others kill."""
