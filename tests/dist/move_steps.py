# SPDX-License-Identifier: Apache-2.0
"""A cluster on this host whose processes stand still at a step of a move, to be killed there.

Each process is forked from one that has the imports, and runs a role as it is started otherwise; only the
stops are added.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_lora.assemble import serve_controller, serve_front_end
from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.cluster.migration import RequestMover
from moe_lora.dist.cluster.resumable_request import Attempt, ResumableRequest
from moe_lora.dist.launch.cluster_file import on_sockets
from moe_lora.dist.launch.roles import JobPlace, serve_instance
from moe_lora.engine.core import EngineCore
from moe_lora.engine.moving import KvTransfer, RequestMoves

from .cluster_jobs import free_port, until

BY_TOKENS = (
    "ordered",
    "reserved at the target",
    "paused",
    "state sent",
    "resumed at the target",
    "acknowledged",
    "switched at the front end",
    "source freed",
)
ONLY_KV = ("first blocks copied", "last block sent")
STEPS = {"tokens": BY_TOKENS, "kv": (*BY_TOKENS, *ONLY_KV)}
"""Of a move of each kind; the source owns the request until it is resumed at the target."""
_MODELS = "upper", "demo", "upper", "demo", "reverse", "upper"
_POLL_S = 0.002
_LIMIT_S = 60.0


def streamed_bodies(length: int, prompt_of: Callable[[int], list[int]]) -> list[dict[str, Any]]:
    """Requests of adapters and the base, greedy and drawn by turns.  prompt_of: by a request's number."""
    return [
        {
            "model": model,
            "prompt": prompt_of(number),
            "max_tokens": length,
            "min_tokens": length,
            "return_token_ids": True,
            "stream": True,
            **({"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}),
        }
        for number, model in enumerate(_MODELS, 10)
    ]


class Stops:
    """Where one process is to stand still next, told through files of a folder.

    armed: a file with the name of a step; who comes there first removes it, writes `reached`, and waits until
    that is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._armed, self.reached = folder / "armed", folder / "reached"

    def arm(self, step: str) -> None:
        self.reached.unlink(missing_ok=True)
        draft = self._armed.with_suffix(".draft")
        draft.write_text(step)
        draft.replace(self._armed)

    def disarm(self) -> None:
        """Let whoever stands still go on."""
        self._armed.unlink(missing_ok=True)
        self.reached.unlink(missing_ok=True)

    def _is_here(self, step: str) -> bool:
        try:
            if self._armed.read_text() != step:
                return False
            self._armed.unlink()
        except FileNotFoundError:
            return False
        self.reached.write_text(step)
        return True

    def stand(self, step: str) -> None:
        if self._is_here(step):
            while self.reached.exists():
                time.sleep(_POLL_S)

    async def stand_aside(self, step: str) -> None:
        """The same, but what else the event loop does goes on."""
        if self._is_here(step):
            while self.reached.exists():
                await asyncio.sleep(_POLL_S)


def _after(owner: type, name: str, then: Callable[..., None]) -> None:
    """Call `then` after a method, with what it returned and got."""
    method = getattr(owner, name)

    def changed(self: Any, *args: Any) -> Any:
        found = method(self, *args)
        then(self, *args)
        return found

    setattr(owner, name, changed)


def stop_in_instance(stops: Stops) -> None:
    """Of a source: with the request paused, with blocks put, with the request freed; of a target: resumed."""

    def has_put(_: Any, outgoing: Any, sequence: Any) -> None:
        stops.stand("last block sent" if sequence.held else "first blocks copied")

    def has_resumed(moves: Any, request_id: str, *_: Any) -> None:
        if moves._sequences[request_id].request.held:
            stops.stand("resumed at the target")

    _after(RequestMoves, "hold", lambda *_: stops.stand("paused"))
    _after(RequestMoves, "resume", has_resumed)
    _after(KvTransfer, "_put", has_put)
    abort = EngineCore.abort

    def abort_and_stand(core: EngineCore, request_id: str) -> Any:
        sequence = core._sequences.get(request_id)
        last = abort(core, request_id)
        if sequence is not None and sequence.held and not sequence.request.held:
            stops.stand("source freed")
        return last

    EngineCore.abort = abort_and_stand  # type: ignore[method-assign]


def stop_in_front_end(stops: Stops) -> None:
    """Between what it asks the two instances."""
    carry_out, call = RequestMover._carry_out, Attempt.call

    async def carry_out_later(self: RequestMover, *args: Any) -> None:
        await stops.stand_aside("ordered")
        await carry_out(self, *args)

    async def call_and_stand(attempt: Attempt, method: str, *args: Any) -> Any:
        if method in ("kv_window", "hold_request"):
            await stops.stand_aside("reserved at the target")
        found = await call(attempt, method, *args)
        if method == "hold_request":
            await stops.stand_aside("state sent")
        if method == "resume_request" and attempt.request.held:
            await stops.stand_aside("acknowledged")
        return found

    RequestMover._carry_out = carry_out_later  # type: ignore[method-assign]
    Attempt.call = call_and_stand  # type: ignore[method-assign]
    _after(ResumableRequest, "switch", lambda *_: stops.stand("switched at the front end"))


SOURCE, TARGET = "instance-0", "instance-1"
MOVER, OTHER = "front-end-0", "front-end-1"
"""The front end whose request is moved, and one that asks the same instances."""


def _run(role: str, cluster: ClusterConfig, folder: Path) -> None:
    """A process: a role, with its stops."""
    log = (folder / f"{role}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    logging.getLogger("moe_lora").setLevel(logging.INFO)
    if role == "controller":
        serve_controller(cluster)
    elif role in cluster.front_ends:
        if role == MOVER:
            stop_in_front_end(Stops(folder))
        serve_front_end(cluster, role)
    else:
        stop_in_instance(Stops(folder))
        serve_instance(cluster, JobPlace(), role)


class SteppedCluster:
    """Two front ends, their controller and two instances, each a process that may be killed.

    cluster: its settings; the addresses are made here.
    """

    def __init__(self, cluster: ClusterConfig, folder: Path) -> None:
        whole = on_sockets(cluster, 2, str(folder))
        ports = {name: free_port() for name in whole.front_ends}
        places = {name: replace(one, port=ports[name]) for name, one in whole.front_ends.items()}
        self._cluster, self._folder = replace(whole, front_ends=places), folder
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        self.stops = Stops(folder)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[str, Any] = {}
        for role in ("controller", MOVER, OTHER, SOURCE, TARGET):
            self.start(role)

    def start(self, role: str) -> None:
        process = self._context.Process(target=_run, args=(role, self._cluster, self._folder), name=role)
        process.start()
        self._processes[role] = process

    def kill(self, role: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._processes[role].kill()
        self._processes[role].join()

    def wait_until_reached(self, failed: Callable[[], object]) -> None:
        """Until some process stands at the step; failed: says that none will come there any more."""

        def reached() -> bool:
            assert not failed(), f"the move was over before: {failed()}"
            return self.stops.reached.exists()

        until(reached, lambda: f"the step is not reached\n{self.text()}", _LIMIT_S)

    def text(self) -> str:
        """The end of each process's log."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {path.stem}\n{path.read_text()[-1500:]}" for path in logs)

    def logged(self, pattern: str) -> bool:
        return any(pattern in path.read_text() for path in self._folder.glob("*.log"))

    def close(self) -> list[str]:
        """End all; the roles that did not end as they should."""
        self.stops.disarm()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(_LIMIT_S)
        wrong = [f"{role}: {one.exitcode}" for role, one in self._processes.items() if one.exitcode]
        for process in self._processes.values():
            process.kill()
        return wrong
