# SPDX-License-Identifier: Apache-2.0
"""Engines that dial in: scripted loops behind real connections, no model."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from moe_lora.core.address import Address, parse_address
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import AdapterError
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.cluster.instance_links import FrontEndLinks
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.listener import CatchUp, InstanceListener
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.thread import LoopThread
from moe_lora.engine.client.messages import (
    Abort,
    Call,
    CurrentPause,
    Generate,
    Heartbeat,
    Inbox,
    InstanceFacts,
    Outputs,
    PauseScope,
    Pulse,
    Reply,
    SleepOrder,
    Stop,
)
from moe_lora.policies.routing.routing import RoundRobin
from tests.patience import PATIENCE_S

from .fleet_parts import INFO, fleet_client

ADVICE = "none has dialled in"


def caught_up(instance_registry: InstanceRegistry) -> CatchUp:
    """Brings in what dials in, with nothing to recover first."""
    catch_up = CatchUp(instance_registry, None)
    catch_up.end_recovery()
    return catch_up


HELD_TOKENS = 9
T = TypeVar("T")


class ScriptedLoop(threading.Thread):
    """An engine loop that answers every request with its number, unless told to hold requests, or to hang.

    A request of max_tokens HELD_TOKENS is held too.
    """

    def __init__(
        self, emit: Callable, inbox: Inbox, number: int, adapters: dict[str, tuple[str, int]]
    ) -> None:
        super().__init__(daemon=True)
        self.inbox = inbox
        self.pulse = Pulse()
        self.adapters = adapters
        self.holds = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.held: list[str] = []
        self.refused: set[str] = set()
        self.unanswered: set[str] = set()
        self.aborted: list[str] = []
        self.calls: list[tuple] = []
        self.num_steps = 0
        self._emit = emit
        self._number = number

    def run(self) -> None:
        while not isinstance(command := self.inbox.get()[0], Stop):
            self.pulse.work()
            self.may_go_on.wait()
            if isinstance(command, Generate):
                self._generate(command.request)
            elif isinstance(command, Abort):
                self.aborted.append(command.request_id)
                self._emit(
                    Outputs([TokenOutput(request_id=command.request_id, token_ids=(), finish_reason="abort")])
                )
            elif isinstance(command, Call):
                self.calls.append((command.method, *command.args))
                try:
                    reply = Reply(command.call_id, getattr(self, command.method)(*command.args))
                except AdapterError as error:
                    reply = Reply(command.call_id, error=error)
                if command.method not in self.unanswered:
                    self._emit(reply)
            else:
                command()
            self.pulse.rest()

    def _generate(self, request: GenerateRequest) -> None:
        request_id, max_tokens = request.request_id, request.sampling.max_tokens
        self.num_steps += 1
        if self.holds.is_set() or (max_tokens == HELD_TOKENS and not request.generated):
            self._emit(Outputs([TokenOutput(request_id=request_id, token_ids=(self._number,))]))
            self.held.append(request_id)
            return
        output = TokenOutput(request_id=request_id, token_ids=(self._number,), finish_reason="length")
        self._emit(Outputs([output]))

    def say(self, request_id: str, token: int, reason: str | None = None) -> None:
        """One more token of a request that it holds."""
        output = TokenOutput(request_id=request_id, token_ids=(token,), finish_reason=reason)
        self._emit(Outputs([output]))

    def model_info(self):
        return INFO

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=self.num_steps)

    def paused_scopes(self) -> list[PauseScope]:
        return []

    def current_pauses(self) -> list[CurrentPause]:
        return []

    def sleep_orders(self) -> list[SleepOrder]:
        return []

    def list_adapters(self) -> list[AdapterInfo]:
        return [self._info(name) for name in self.adapters]

    def used_adapters(self) -> dict[str, int]:
        return {}

    def ready_adapters(self, names: Sequence[str]) -> list[str]:
        return []

    def preload_adapters(self, names: Sequence[str]) -> int:
        return len(names)

    def load_adapter(
        self, name: str, path: str, replaces: bool, version: int, content_hash: str | None
    ) -> AdapterInfo:
        assert replaces
        if path in self.refused:
            raise AdapterError(f"{path} is gone")
        self.adapters[name] = (path, version)
        return self._info(name)

    def unload_adapter(self, name: str, waits: bool) -> None:
        del self.adapters[name]

    def _info(self, name: str) -> AdapterInfo:
        path, version = self.adapters[name]
        return AdapterInfo(
            name=name, version=version, lora_rank=1, nbytes=1, targets=(), path=path, residency="host"
        )


class Instance:
    """An instance's process, as far as the front end can tell."""

    def __init__(
        self,
        name: str,
        *sockets: str,
        number=0,
        keys=None,
        info=INFO,
        adapters=None,
        incarnation=None,
        refused=(),
        aliases=None,
        names=(),
    ):
        self.incarnation = incarnation or secrets.token_hex(8)
        names = names or [f"listener-{one}" for one in sockets]
        addresses = {there: parse_address("listener", one) for there, one in zip(names, sockets, strict=True)}
        inbox = Inbox()
        self._thread = LoopThread()

        async def make() -> FrontEndLinks:
            return FrontEndLinks(addresses, keys, inbox, info.max_model_len)

        self.dial = self._thread.run(make())
        self.dial._mux.aliases |= aliases or {}
        self.loop = ScriptedLoop(self.dial.emit, inbox, number, dict(adapters or {}))
        self.loop.refused = set(refused)
        self.loop.start()
        self._running = asyncio.run_coroutine_threadsafe(
            self.dial.run(name, self.incarnation, InstanceFacts(info), self.loop.pulse), self._thread.loop
        )

    def in_its_loop(self, function: Callable[[], object]) -> None:
        """Call it in the event loop of its connections."""
        self._thread.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.loop.may_go_on.set()
        self.dial.stop()
        self._running.result(PATIENCE_S)
        self._thread.stop()
        self.loop.join(PATIENCE_S)
        assert not self.loop.is_alive()


class FrontEnd:
    """A front end's instance_registry, fleet and listener in an event loop of their own.

    make_entry: called there.
    """

    def __init__(
        self,
        socket: str | Address | None = None,
        adapters=(),
        heartbeat: Heartbeat | None = None,
        make_entry=caught_up,
        keys: Keys | None = None,
        epoch: int = 0,
    ) -> None:
        self.given_up: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="moe_lora-")
        self.thread = LoopThread()
        self.instance_registry = InstanceRegistry((), adapters, ADVICE, heartbeat)
        self.fleet = fleet_client(self.instance_registry, RoundRobin(), WallClock())
        self._closing = asyncio.Event()
        self._closed = False
        place: Future[Address] = Future()

        async def stay() -> None:
            self.entry = make_entry(self.instance_registry)
            own = Address(path=f"{self._folder.name}/engines")
            address = (
                own if socket is None else socket if isinstance(socket, Address) else Address(path=socket)
            )
            listener = InstanceListener(self.instance_registry, self.entry, self.given_up.append, epoch=epoch)
            async with listener.open("engines_address", address, keys) as found:
                place.set_result(found)
                await self._closing.wait()
                await self.fleet.close()

        def tell(staying) -> None:
            if not place.done():
                place.set_exception(staying.exception())

        self._staying = asyncio.run_coroutine_threadsafe(stay(), self.thread.loop)
        self._staying.add_done_callback(tell)
        self.socket = str(place.result(PATIENCE_S))

    def names(self) -> list[str]:
        return sorted(instance.name for instance in self.instance_registry.live)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns in the front end's event loop."""
        return self.thread.run(work)

    def ask(self, request_id: str, max_tokens: int = 4) -> tuple[int, ...]:
        async def collect() -> tuple[int, ...]:
            request = GenerateRequest(
                request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=max_tokens)
            )
            return tuple([t async for output in self.fleet.generate(request) for t in output.token_ids])

        return self.run(collect())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.thread.loop.call_soon_threadsafe(self._closing.set)
            self._staying.result(PATIENCE_S)
            self.thread.stop()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tokens_out(front_end: FrontEnd, name: str) -> int:
    """Tokens of requests that the front end still expects of the instance."""
    return next(one.outstanding_tokens for one in front_end.instance_registry.instances if one.name == name)
