# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine: takes commands, steps, sends events (see `messages`)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_lora.adapters.facts import AdapterFacts
from moe_lora.adapters.host_store import adapter_without_data, facts_of
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.errors import AdapterNotFoundError, ConfigError, EngineDeadError
from moe_lora.core.request import AdapterInfo
from moe_lora.engine.client.heartbeat import Pulse
from moe_lora.engine.client.messages import (
    Abort,
    Call,
    Dead,
    Event,
    Generate,
    Inbox,
    Outputs,
    PoolEntry,
    Rejected,
    Reply,
    Stop,
)

from .core import EngineCore

if TYPE_CHECKING:
    from moe_lora.engine.adapters.pool_store import PoolAdapters

# The methods of an engine loop by which an adapter pool is kept.


Sources = Sequence[bytes]
"""Descriptors of the windows that hold an adapter, in the order in which to read them."""


class PoolCalls:
    """What else may be called of an instance whose adapters lie in a pool."""

    def __init__(self, core: EngineCore, pool: PoolAdapters) -> None:
        self._core = core
        self._pool = pool

    def quick(self) -> dict[str, Callable[..., Any]]:
        """Methods that are done at once."""
        return {
            "pool_know": self._know,
            "pool_drop": self._pool.drop,
            "pool_sources": self._set_sources,
            "pool_state": lambda: [self._entry(info.name) for info in self._core.list_adapters()],
            "pool_orphans": self._pool.orphans,
            "pool_known": lambda hashes: list(filter(self._pool.knows, hashes)),
            "pool_free": self._pool.free_orphan,
        }

    def slow(self) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
        """Methods of two parts: one for another thread, and one for the loop's, which gets what the first
        returned, and then the arguments."""
        return {
            "pool_load": (partial(_read, self._core), self._add),
            "pool_hold": (self._fetch, self._hold),
        }

    def _know(
        self, facts: AdapterFacts, path: str, replace: bool, version: int, sources: Sources
    ) -> PoolEntry:
        """Serve an adapter whose bytes other instances hold."""
        self._core.add_adapter(adapter_without_data(facts), path, replace=replace, version=version)
        self._pool.set_sources(facts.content_hash, sources)
        return self._entry(facts.name)

    def _set_sources(self, sources: Mapping[str, Sources]) -> None:
        """From now on read these adapters (content hashes) from there."""
        for content_hash, places in sources.items():
            if self._pool.knows(content_hash):
                self._pool.set_sources(content_hash, places)

    def _add(self, *args: Any) -> PoolEntry:
        """Serve an adapter and hold it."""
        return self._entry(_add(self._core, *args).name)

    def _fetch(self, content_hash: str, sources: Sources) -> Any:
        if not self._pool.knows(content_hash):
            raise AdapterNotFoundError(f"no adapter of content {content_hash} is loaded")
        return self._pool.fetch_held(content_hash, sources)

    def _hold(self, held: Any, content_hash: str, sources: Sources) -> bytes | None:
        """Hold an adapter that is known; how peers reach it.  The reply is the confirmation."""
        if not self._pool.knows(content_hash):
            held.window.free()
            raise AdapterNotFoundError(f"the adapter of content {content_hash} was unloaded meanwhile")
        self._pool.hold(held)
        return self._pool.source(content_hash)

    def _entry(self, name: str) -> PoolEntry:
        info, packed = self._core.known_adapter(name)
        return PoolEntry(info=info, facts=facts_of(packed), source=self._pool.source(packed.content_hash))


def _read(
    core: EngineCore, name: str, path: str, replace: bool, version: int | None, content: str | None = None
) -> PackedAdapter:
    """The part of a load that another thread may do; content: the hash that it must have."""
    return core.read_adapter(name, path, content)


def _add(
    core: EngineCore,
    packed: PackedAdapter,
    name: str,
    path: str,
    replace: bool,
    version: int | None,
    content: str | None = None,
) -> AdapterInfo:
    """The part of a load that the loop's thread does."""
    return core.add_adapter(packed, path, replace=replace, version=version)


logger = logging.getLogger(__name__)


def _look_again() -> None:
    """A command that only ends the wait for commands."""


class EngineLoop(threading.Thread):
    """Runs `core` until it is told to stop.  `emit` is called from this thread and from those for slow parts.

    pulse: tells whether the loop goes on.
    """

    def __init__(self, core: EngineCore, emit: Callable[[Event], None], inbox: Inbox | None = None) -> None:
        super().__init__(name="engine-loop", daemon=True)
        self.inbox = inbox or Inbox()
        self.pulse = Pulse(self.inbox.clock)
        self._core = core
        self._emit = emit
        self._files = ThreadPoolExecutor(1, thread_name_prefix="adapter-files")
        core.watch(self._lose, lambda: self.inbox.put(_look_again))
        self._leaving: list[tuple[Call, frozenset[int]]] = []
        self._quick: dict[str, Callable[..., Any]] = {
            "publish_adapter": partial(core.add_adapter, replace=True),
            "pin_adapter": core.pin_adapter,
            "preload_adapters": core.preload_adapters,
            "list_adapters": core.list_adapters,
            "stats": core.stats,
            "model_info": lambda: core.info,
            "hold_request": lambda *args: core.moves.hold(*args),
            "resume_request": lambda *args: core.moves.resume(*args),
            "request_loads": lambda: core.moves.loads(),
            "kv_window": lambda *args: core.moves.kv_window(*args),
        }
        self._slow: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "load_adapter": (partial(_read, core), partial(_add, core)),
            "kv_send": (lambda *args: core.moves.kv_send(*args), lambda *args: core.moves.kv_sent(*args)),
        }
        if core.pool is not None:
            calls = PoolCalls(core, core.pool)
            self._quick |= calls.quick()
            self._slow |= calls.slow()

    def run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work:
                    outputs = self._core.step()
                    if outputs:
                        self._emit(Outputs(outputs))
                else:
                    self._core.tend()
                self._settle_leaving()
        except Exception as error:
            logger.exception("the engine failed")
            dead = error if isinstance(error, EngineDeadError) else None
            self._emit(Dead(dead or EngineDeadError(f"the engine failed: {error!r}")))
            self._core.close(at_once=True)
        finally:
            self._files.shutdown(wait=False, cancel_futures=True)
            self._core.close()

    def _lose(self, error: EngineDeadError) -> None:
        """Fail in the loop's own thread, at once if it waits for commands."""

        def fail() -> None:
            raise error

        self.inbox.put(fail)

    def _take_commands(self) -> bool:
        """Handle what lies in the inbox, waiting for something if there is nothing to compute."""
        wait = not self._core.has_work or self._core.stalled
        self.pulse.work()
        self.pulse.held_back = self._core.held_back
        while wait or not self.inbox.empty():
            timeout_s = self._core.tend()
            self.pulse.rest()
            try:
                command, arrival_s = self.inbox.get(timeout_s)
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
        if isinstance(command, Generate):
            try:
                self._core.add_request(command.request, arrival_s)
            except Exception as error:
                self._emit(Rejected(command.request.request_id, error))
        elif isinstance(command, Abort):
            last = self._core.abort(command.request_id)
            if last is not None:
                self._emit(Outputs([last]))
        elif command is _look_again:
            pass
        elif gained := self._core.catch_up():  # what follows may look at requests, or change them
            self._emit(Outputs(gained))
            self._handle(command, arrival_s)
        elif isinstance(command, Call):
            self._call(command)
        else:
            command()

    def _call(self, call: Call) -> None:
        if call.method in self._quick:
            self._reply(call, self._quick[call.method], *call.args)
        elif call.method in self._slow:
            threads = self._core.moves.threads if call.method == "kv_send" else self._files
            threads.submit(self._begin_slow, call, *self._slow[call.method])
        elif call.method == "unload_adapter":
            try:
                self._leaving.append((call, self._core.remove_adapter(*call.args)))
            except KeyError as error:
                self._emit(Reply(call.call_id, error=error))
        else:
            problem = f"this engine has no {call.method}: its settings are not those of the front end"
            self._emit(Reply(call.call_id, error=ConfigError(problem)))

    def _reply(self, call: Call, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._emit(Reply(call.call_id, function(*args)))
        except Exception as error:
            self._emit(Reply(call.call_id, error=error))

    def _begin_slow(self, call: Call, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        """The first part, in another thread, so that steps go on; the loop's thread does the second, with
        what it returned.
        """
        try:
            result = first(*call.args)
        except Exception as error:
            self._emit(Reply(call.call_id, error=error))
        else:
            self.inbox.put(lambda: self._reply(call, second, result, *call.args))

    def _settle_leaving(self) -> None:
        """Answer unload calls whose adapter's last request is done."""
        for entry in list(self._leaving):
            call, uids = entry
            if not self._core.adapters_in_use(uids):
                self._leaving.remove(entry)
                self._emit(Reply(call.call_id))
