# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine: takes commands, steps, sends events."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.request import TokenOutput
from moe_lora.dist.net.codec import verbs_of
from moe_lora.engine.client.messages import (
    Abort,
    Call,
    Dead,
    Event,
    Generate,
    Inbox,
    Outputs,
    Pulse,
    Rejected,
    Reply,
    Stop,
)

from .core import EngineCore
from .verbs import EngineVerbs, PoolVerbs, Steps

if TYPE_CHECKING:
    from .pauses import Pauses
    from .sleep import Sleep

logger = logging.getLogger(__name__)


def _look_again() -> None:
    """Ends the wait for commands."""


class EngineLoop(threading.Thread):
    """Runs `core` until a stop.  Threads of slow verbs call `emit` too."""

    def __init__(self, core: EngineCore, emit: Callable[[Event], None], inbox: Inbox | None = None) -> None:
        super().__init__(name="engine-loop", daemon=True)
        self.inbox = inbox or Inbox()
        self.pulse = Pulse(self.inbox.clock)
        self._core = core
        self._emit = emit
        self._files = ThreadPoolExecutor(1, thread_name_prefix="adapter-files")
        core.watch(self._lose, lambda: self.inbox.put(_look_again))
        self.inbox.answers = self._answers
        self._engine = engine = EngineVerbs(core, self._files, self._make_pauses, self._make_sleep)
        self._verbs = verbs_of(engine)
        if (pool := core.adapters.store.pool) is not None:
            self._verbs |= verbs_of(PoolVerbs(engine, core, pool, self._files))
        self._verbs["publish_adapter"] = partial(core.add_adapter, replace=True)
        self._until: list[tuple[Callable[[], bool], Call, Steps[Any]]] = []
        """Verbs in wait for a condition."""
        self._compiling: dict[str, tuple[Generate, float]] = {}
        """Requests in wait for a grammar, with arrivals."""

    def run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work:
                    outputs = self._core.step()
                    if outputs:
                        self._emit(Outputs(outputs))
                else:
                    self._core.tend()
                if self._until:
                    self._resume_verbs()
        except Exception as error:
            logger.exception("the engine failed")
            dead = error if isinstance(error, EngineDeadError) else None
            self._emit(Dead(dead or EngineDeadError(f"the engine failed: {error!r}")))
            self._core.close(at_once=True)
        finally:
            self._files.shutdown(wait=False, cancel_futures=True)
            self._core.close()

    def _lose(self, error: EngineDeadError) -> None:
        """Fail in the loop's own thread."""

        def fail() -> None:
            raise error

        self.inbox.put(fail)

    def _take_commands(self) -> bool:
        wait = not self._core.has_work or self._core.stalled
        self.pulse.work()
        self.pulse.held_back = self._core.held_back
        while wait or not self.inbox.empty():
            timeout_s = self._core.tend()
            self.pulse.rest()
            try:
                command, arrival_s = self.inbox.get(timeout=timeout_s)
            except queue.Empty:
                continue
            finally:
                self.pulse.work()
            wait = False
            if isinstance(command, Stop):
                return False
            self._handle(command, arrival_s)
        return True

    def _handle(self, command: Generate | Abort | Call | Callable[[], None], arrival_s: float) -> None:
        pauses = self._engine.pauses
        if isinstance(command, Generate):
            if pauses is not None and pauses.delay(command, arrival_s):
                return
            try:
                if self._engine.asleep is not None:
                    self._engine.asleep.check_awake()
                if command.request.sampling.grammar is None or not self._compiles(command, arrival_s):
                    self._core.add_request(command.request, arrival_s)
            except Exception as error:
                self._emit(Rejected(command.request.request_id, error))
        elif isinstance(command, Abort):
            compiling = self._compiling.pop(command.request_id, None)
            last = self._core.abort(command.request_id)
            if compiling or (pauses is not None and pauses.forget(command.request_id)):
                last = TokenOutput(request_id=command.request_id, token_ids=(), finish_reason="abort")
            if last is not None:
                self._emit(Outputs([last]))
        elif command is _look_again:
            pass
        elif gained := self._core.catch_up():  # later commands may read or change requests
            self._emit(Outputs(gained))
            self._handle(command, arrival_s)
        elif isinstance(command, Call):
            self._call(command)
        else:
            command()

    def _make_pauses(self) -> Pauses:
        from .pauses import Pauses

        core = self._core
        return Pauses(
            core.sequences,
            self._compiling,
            core.abort,
            self._handle,
            self.inbox.put,
            core.adapters,
            self._engine.sleep_orders,
        )

    def _make_sleep(self, abort: Callable[[], None]) -> Sleep:
        from .sleep import Sleep

        return Sleep(self._core, self.inbox.put, abort)

    def _compiles(self, command: Generate, arrival_s: float) -> bool:
        """False with a compiled grammar; else the request enters later."""
        request = command.request
        grammar, grammars = request.sampling.grammar, self._core.sampler.grammars
        assert grammar is not None
        compiled = grammars.compile(grammar)
        if compiled.done():
            return False
        self._compiling[request.request_id] = command, arrival_s

        def enter() -> None:
            if self._compiling.pop(request.request_id, None):
                grammars.compile(grammar, compiled)
                if not self._engine.delay_asleep(command, arrival_s):
                    self._handle(command, arrival_s)

        compiled.add_done_callback(lambda _: self.inbox.put(enter))
        return True

    def _call(self, call: Call, compute: Callable[[], Any] | None = None) -> None:
        """Reply; with `compute` in any thread, even during a step."""
        method = self._verbs.get(call.method)
        if method is None:
            problem = f"this engine has no {call.method}: its settings are not those of the front end"
            self._emit(Reply(call.call_id, error=ConfigError(problem)))
            return
        try:
            value = method(*call.args) if compute is None else compute()
        except Exception as error:
            self._reject(call, error)
            return
        if isinstance(value, Generator):
            self._go_on(call, value, None)
        elif isinstance(value, Future):

            def reply(done: Future[Any]) -> None:
                if not done.cancelled():  # by the engine's end
                    self._call(call, done.result)

            value.add_done_callback(reply)
        else:
            self._emit(Reply(call.call_id, value))

    def _reject(self, call: Call, error: Exception) -> None:
        self._emit(Reply(call.call_id, error=error))
        if isinstance(error, EngineDeadError):
            self._lose(error)

    def _answers(self, call: Call) -> bool:
        """As `RequestMoves.answer_beside`."""
        compute = self._core.answer_beside(call.method, call.args)
        if compute is not None:
            self._call(call, compute)
        return compute is not None

    def _go_on(self, call: Call, steps: Steps[Any], done: Future[Any] | None) -> None:
        """Run a verb up to the next wait, or reply."""
        try:
            wait = steps.send(done)
        except StopIteration as last:
            self._emit(Reply(call.call_id, last.value))
        except Exception as error:
            self._reject(call, error)
        else:
            if isinstance(wait, Future):
                wait.add_done_callback(lambda done: self.inbox.put(partial(self._go_on, call, steps, done)))
            else:
                self._until.append((wait, call, steps))

    def _resume_verbs(self) -> None:
        waiting, self._until = self._until, []
        for one in waiting:
            condition, call, steps = one
            if condition():
                self._core.stalled = False  # the verb may admit requests
                self._go_on(call, steps, None)
            else:
                self._until.append(one)
