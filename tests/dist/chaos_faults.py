# SPDX-License-Identifier: Apache-2.0
"""What is done to a running cluster: parts of it killed, or stopped for a while, one after the other."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from .chaos_cluster import ChaosCluster, Figures
from .chaos_host import MAX_FILES, ChaosHost
from .chaos_replay import Replay
from .cluster_jobs import alive

RECOVERY_S = 180.0
"""For all parts to be there again."""


@dataclass(frozen=True)
class Strike:
    """fault: its name.  victims: the roles that it hit.  at_s: on the monotonic clock.  after: requests ended
    by then.  over_s, whole_s: when it was over, and the cluster whole again; 0 if it never was.
    """

    fault: str
    victims: tuple[str, ...]
    at_s: float
    after: int
    over_s: float = 0.0
    whole_s: float = 0.0


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
    host: ChaosHost | None = None
    strikes: list[Strike] = field(default_factory=list)
    resent: Counter[int] = field(default_factory=Counter)
    num_kills: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Raises AssertionError if the cluster does not become whole; the replay ends in any case."""
        between = self.replay.least // (len(self.faults) + 1)
        try:
            for number, fault in enumerate(self.faults, 1):
                self._wait(partial(self._have_ended, number * between), f"{number * between} requests end")
                version = 0 if fault == SERVER_KILLED else self.cluster.table_version()
                self._strike(fault)
                over_s = time.monotonic()
                self._wait(self.cluster.is_whole, f"all parts are there after {fault}")
                self.strikes[-1] = replace(self.strikes[-1], over_s=over_s, whole_s=time.monotonic())
                self._wait(partial(self._has_table_after, version), f"another table after {fault}")
        finally:
            self.replay.stop()

    def _have_ended(self, num_requests: int) -> bool:
        return self.replay.outcomes.num_ended >= num_requests

    def _has_table_after(self, version: int) -> bool:
        return self.cluster.table_version() > version

    def _strike(self, fault: str) -> None:
        victims = VICTIMS[fault](self, self.count_resent()) if fault in VICTIMS else ()
        self.strikes.append(Strike(fault, victims, time.monotonic(), self.replay.outcomes.num_ended))
        if fault == SERVER_KILLED:
            losses_s = self.replay.publisher.losses_s
            losses_s.append(time.monotonic())
            self.cluster.kill_and_start_again(RECOVERY_S)
            losses_s.append(time.monotonic())
            return
        if fault in OF_HOST:
            assert self.host is not None, f"{fault}: needs a host of its own"
            OF_HOST[fault](self, self.host)
            return
        if fault in OF_OPERATOR:
            OF_OPERATOR[fault](self)
            return
        if fault in PAUSES:
            self._pause(victims)
            return
        if fault in TOLD:
            self._end(victims, signal.SIGTERM)
            return
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

    def _pause(self, victims: Sequence[str]) -> None:
        """Stop processes for a while, which nobody has to notice."""
        pids = self.cluster.pids()
        for name in victims:
            os.kill(pids[name], signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for name in victims:
            os.kill(pids[name], signal.SIGCONT)

    def _kill(self, victims: Sequence[str]) -> None:
        self._end(victims, signal.SIGKILL)

    def _end(self, victims: Sequence[str], number: int) -> None:
        """End processes by a signal; return when others have their roles."""
        pids = self.cluster.pids()
        self.num_kills.update(victims)
        for name in victims:
            os.kill(pids[name], number)
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

    def let_pass(self, num_requests: int) -> None:
        """Return when so many more requests have ended."""
        ended = self.replay.outcomes.num_ended + num_requests
        self._wait(partial(self._have_ended, ended), f"{num_requests} requests end")

    def expect(self, status: int, said: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Raises AssertionError for another answer."""
        url = f"{self.cluster.url}{path}"
        answer = httpx.post(url, json=body, timeout=RECOVERY_S, trust_env=False)
        found = f"{path}: {answer.status_code} {answer.text}, not {status} {said}"
        assert answer.status_code == status, found
        assert said in answer.text, found

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Raises AssertionError if any request was refused meanwhile."""
        before = self.replay.outcomes.counts["refused"]
        yield
        refused = self.replay.outcomes.counts["refused"] - before
        assert not refused, f"{refused} requests were refused that {self.strikes[-1].fault} does not touch"

    def kill_busy_instance(self) -> None:
        self._kill(_busy_instance(self, self.count_resent()))

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


def _server_rank(striker: Striker, _: Figures) -> tuple[str, ...]:
    return (striker.rng.choice([name for name in striker.cluster.pids() if name.startswith("lora-server")]),)


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
    "instance told to end": _busy_instance,
    "controller told to end": _controller,
    "front end told to end": _front_end,
    "LoRA Server rank killed": _server_rank,
    "LoRA Server rank told to end": _server_rank,
    "front end stopped for a while": _front_end,
    "LoRA Server rank stopped for a while": _server_rank,
}
SERVER_KILLED = "server killed"
"""The process that started all others; it is started again."""
TOLD = tuple(fault for fault in VICTIMS if fault.endswith("told to end"))
"""Faults by SIGTERM; nobody else is told."""
BREAKING = ("front end killed", "controller and front end killed", "front end told to end", SERVER_KILLED)
"""Faults during which connections may break."""
AGAIN = {"instance killed twice": "engine ready", "controller killed twice": "the controller listens"}
"""Faults that kill a second time, when the new process says this: while it comes in."""
SILENCES = {
    "instance silent": r"is silent for [\d.]+ s; it gets no requests",
    "instance silent for long": r"is silent for \d+ s and is ended",
    "controller silent": r"lost the controller",
}
"""Faults that stop a process until the log says this once more."""
PAUSES = tuple(fault for fault in VICTIMS if fault.endswith("stopped for a while"))
PAUSE_S = 6.0
"""Longer than a LoRA Server's rank may be silent."""


# What the host lacks for a while: each a clear answer for whom it touches, and nothing for the rest.

_DURING = 20
"""Requests that end while something is lacking."""


def _disk_full(striker: Striker, host: ChaosHost) -> None:
    place = host.copy_of(striker.cluster.model.adapter_dir / striker.cluster.model.adapters[1], striker.rng)
    with host.full(host.state), striker.untouched():
        striker.expect(503, "can't be kept on this host", "/v1/load_lora_adapter", fresh_load(place))
        striker.let_pass(_DURING)
    striker.expect(200, "", "/v1/load_lora_adapter", fresh_load(place))
    striker.expect(200, "", "/v1/unload_lora_adapter", {"lora_name": FRESH})


def _shm_full(striker: Striker, host: ChaosHost) -> None:
    with host.full(Path("/dev/shm")), striker.untouched():
        striker.let_pass(_DURING)


def _registry_read_only(striker: Striker, host: ChaosHost) -> None:
    place = striker.cluster.model.adapter_dir / striker.cluster.model.adapters[2]
    body = {"lora_name": f"{FRESH}-{len(striker.strikes)}", "lora_path": str(place)}
    with host.read_only_registry(), striker.untouched():
        striker.expect(503, "Read-only file system", "/v1/registry/adapters", body)
        striker.let_pass(_DURING)
    striker.expect(200, "", "/v1/registry/adapters", body)


def _adapter_files_cut(striker: Striker, host: ChaosHost) -> None:
    """Those of an adapter that is served, not published again, while an instance is started again."""
    name = striker.rng.choice(striker.cluster.model.adapters[1:-1])
    weights = striker.cluster.model.adapter_dir / name / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    try:
        body = {"lora_name": FRESH, "lora_path": str(weights.parent)}
        striker.expect(400, "adapter_model.safetensors", "/v1/load_lora_adapter", body)
        striker.kill_busy_instance()
        striker.let_pass(_DURING)
    finally:
        weights.write_bytes(whole)


def _connections_at_the_limit(striker: Striker, _host: ChaosHost) -> None:
    """Open until the server refuses some; others are told so, or answered."""
    place = httpx.URL(striker.cluster.url)
    held = []
    try:
        for _ in range(4 * MAX_FILES):
            held.append(one := socket.create_connection((place.host, place.port or 80), timeout=30))
            one.setblocking(False)
            time.sleep(0.002)
            with suppress(BlockingIOError):
                assert one.recv(100).startswith(b"HTTP/1.1 503"), "what is beyond the limit is told so"
                break
        else:
            raise AssertionError("no connection was refused")
        striker.let_pass(_DURING)
    finally:
        for one in held:
            one.close()


OF_HOST: dict[str, Callable[[Striker, ChaosHost], None]] = {
    "disk full": _disk_full,
    "/dev/shm full": _shm_full,
    "registry read-only": _registry_read_only,
    "adapter files cut, instance killed": _adapter_files_cut,
    "connections at the limit": _connections_at_the_limit,
}
FRESH = "fresh"


def fresh_load(place: Path) -> dict[str, str]:
    return {"lora_name": FRESH, "lora_path": str(place)}


# What an operator orders while all goes on: nothing that is asked meanwhile is refused.


def _restart_instances(striker: Striker) -> None:
    """One after the other, as `moe-lora restart` does."""
    before = striker.cluster.pids()
    names = _all_instances(striker, {})
    with striker.untouched():
        for name in names:
            striker.expect(200, "", f"/v1/instances/{name}/restart")
    after = striker.cluster.pids()
    assert all(before[name] != after[name] for name in names), "not all instances were started again"


def _drain_instance(striker: Striker) -> None:
    [name] = _busy_instance(striker, striker.cluster.figures())
    with striker.untouched():
        striker.expect(200, '"drained":true', f"/v1/instances/{name}/drain")
        striker.let_pass(_DURING)
        striker.expect(200, '"drained":false', f"/v1/instances/{name}/undrain")


def _reload_limits(striker: Striker) -> None:
    """A request beyond the new limit is refused, by whichever front end has it; with the old one, none."""
    body = {"model": "base", "prompt": [1], "max_tokens": 1, "n": 2}
    with striker.untouched():
        striker.cluster.reload({"max_choices": 1})
        for _ in range(4 * striker.cluster.num_front_ends):
            striker.expect(400, "make more than 1 choices", "/v1/completions", body)
        striker.let_pass(_DURING)
        striker.cluster.reload({})
        striker.expect(200, "", "/v1/completions", body)


def _restart_server(striker: Striker) -> None:
    """Rank by rank, as `moe-lora restart --lora-server` does."""
    with striker.untouched():
        striker.expect(200, "", "/v1/lora_server/restart")


OF_OPERATOR: dict[str, Callable[[Striker], None]] = {
    "instances restarted one by one": _restart_instances,
    "instance drained and undrained": _drain_instance,
    "limits read again": _reload_limits,
    "LoRA Server restarted rank by rank": _restart_server,
}
