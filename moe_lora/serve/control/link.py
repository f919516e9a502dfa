"""A front end's connection to the controller: it dials, and dials again when the connection ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from typing import Any, Protocol

from moe_lora.core.errors import ControllerAwayError
from moe_lora.core.problems import LastProblem
from moe_lora.engine.messages import Call, Reply
from moe_lora.engine.wire import dial

from .channel import BEAT_S, Channel
from .messages import Beat, ClusterState, Figures, FrontEndHello, Report, Taken, ToFrontEnd

logger = logging.getLogger(__name__)

RETRY_S = 0.5
REPORT_S = 0.25


class Follower(Protocol):
    """What of a front end hears of the controller, in its event loop."""

    def follow(self, state: ClusterState) -> None:
        """Do from now on as the controller says."""
        ...

    def show(self, figures: Figures) -> None: ...

    def report(self) -> Report | None:
        """What happened since the last report; None: nothing."""
        ...


class ControllerLink:
    """Carries a front end's calls and reports to the controller at host:port, and its decisions back.

    Belongs to the event loop that runs `run`, but for one thread that dials and reads.  up: whether the
    controller is there.  state: the last that it sent; older ones that come later are ignored, so a
    front end goes on with the newest.  num_joins: connections so far.
    """

    def __init__(self, host: str, port: int, key: str, name: str) -> None:
        self._host, self._port, self._key, self.name = host, port, key.encode(), name
        self._channel: Channel | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._stopping = threading.Event()
        self.state: ClusterState | None = None
        self.follower: Follower | None = None
        self.num_joins = 0

    @property
    def up(self) -> bool:
        return self._channel is not None

    async def call(self, method: str, *args: Any) -> Any:
        """What the controller answers.  Raises what it raised, ControllerAwayError if it is not there."""
        if self._channel is None:
            raise ControllerAwayError(
                f"the controller at {self._host}:{self._port} is away, and nothing can be changed without "
                "it; requests go on, send this again in a while"
            )
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(Call(call_id, method, args))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def run(self) -> None:
        """Keep the connection and report what happens, until cancelled."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._stay, args=(loop,), name="controller-link", daemon=True).start()
        said_s = loop.time()
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                # While nobody listens what was counted is dropped: no later time step is to have it.
                report = None if self.follower is None else self.follower.report()
                if self._channel is not None and (report is not None or loop.time() - said_s >= BEAT_S):
                    self._channel.send(report or Beat())
                    said_s = loop.time()
        finally:
            self._stopping.set()
            if self._channel is not None:
                self._channel.close()

    def receive(self, message: ToFrontEnd) -> None:
        """Do as a message of the controller says."""
        if isinstance(message, Reply):
            future = self._calls.get(message.call_id)
            if future is None or future.done():
                return
            if message.error is not None:
                future.set_exception(message.error)
            else:
                future.set_result(message.value)
        elif isinstance(message, ClusterState):
            self._take(message)
        elif isinstance(message, Figures) and self.follower is not None:
            self.follower.show(message)

    def _take(self, state: ClusterState) -> None:
        if self.state is None or state.number > self.state.number:
            self.state = state
            if self.follower is not None:
                self.follower.follow(state)
        if self._channel is not None:
            self._channel.send(Taken(self.state.number))

    def _joined(self, channel: Channel) -> None:
        self._channel = channel
        self.num_joins += 1

    def _lost(self) -> None:
        self._channel = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(
                    ControllerAwayError(
                        "the controller was lost before it answered, so it is not known whether this was "
                        "done; look what is there (GET /v1/adapters) once it is back, then send it again"
                    )
                )

    def _stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread that dials and reads, until the loop or the link ends."""

        def post(function: Callable[..., None], *args: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(function, *args)

        said = LastProblem()
        while not self._stopping.is_set():
            try:
                connection, welcome = dial(
                    self._host, self._port, self._key, FrontEndHello(name=self.name, state=self.state)
                )
                problem = welcome.refusal or ""
            except (AuthenticationError, EOFError) as error:
                problem = f"the controller turned this front end away ({error!r}); is the key the same?"
            except OSError as error:
                problem = f"no controller answers: {error!r}"
            else:
                if problem:
                    connection.close()
                else:
                    logger.info("joined the controller at %s:%d", self._host, self._port)
                    self._read(Channel(connection), post)
            if not problem:
                said.over()
            elif said.is_new(problem):
                logger.warning("%s:%d: %s; trying on", self._host, self._port, problem)
            self._stopping.wait(RETRY_S)

    def _read(self, channel: Channel, post: Callable[..., None]) -> None:
        post(self._joined, channel)
        try:
            while not self._stopping.is_set():
                post(self.receive, channel.receive())
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if not self._stopping.is_set():
                logger.warning("lost the controller: %r; requests go on by what it said last", error)
        finally:
            channel.close(at_once=True)
            post(self._lost)
