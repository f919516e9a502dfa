# SPDX-License-Identifier: Apache-2.0
"""What travels between an engine loop and its clients, in one process or over a link (`dist.net`)."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import DecodeError, Raw

from moe_lora.adapters.facts import AdapterFacts
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.request import (
    AdapterInfo,
    GenerateRequest,
    ModelInfo,
    RequestTiming,
    TokenOutput,
)
from moe_lora.dist.net.codec import Decoder, Message, encode

# What instances of an adapter pool tell who keeps its directory.  Imports no torch.


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """An adapter that an instance knows.

    source: the descriptor of the window in which the instance holds it, for its peers; None: it does not.
    """

    info: AdapterInfo
    facts: AdapterFacts
    source: bytes | None


# Of a request that moves from one instance to another.


@dataclass(frozen=True, kw_only=True)
class HeldRequest:
    """A request that gains no tokens for now.

    tokens: of its answer, from the one on that was asked for.  adapter_version: which computes it.  timing:
    as if it ended now.  unshared: its KV is not for the prefix cache, since weights carried another's
    adapter.
    """

    tokens: tuple[int, ...]
    adapter_version: int | None
    timing: RequestTiming
    unshared: bool = False


@dataclass(frozen=True)
class KvWindow:
    """Where the KV of a request that comes is to be put, and how pages lie there."""

    descriptor: bytes
    layout: str


@dataclass(frozen=True)
class KvSent:
    """KV that lies in the target's window, of so many tokens of prompt and answer; pages from first_page on
    were put last."""

    num_tokens: int
    first_page: int


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """A request that an engine has.

    name: the engine's for it.  num_left: tokens that its answer may still gain.  num_bytes: of the KV of its
    num_tokens.  waited_s: since it came, of one that has computed nothing; None: it has.  held: it is being
    moved, to here or away.
    """

    name: str
    adapter: str | None
    num_tokens: int
    num_generated: int
    num_left: int
    num_bytes: int
    waited_s: float | None
    held: bool = False


@dataclass(frozen=True)
class MoveOrder:
    """That a request is to be moved.  name: the engine's for it; target: an instance's name."""

    name: str
    target: str
    kind: str


class Move(Message, frozen=True):
    """An engine passes an order on to the front end that has the request, by the id it has there."""

    request_id: str
    target: str
    kind: str


REQUEST_METHODS = frozenset({"hold_request", "resume_request", "kv_window", "kv_send"})
"""Methods whose first argument is the id of a request of who calls."""

PROTOCOL_VERSION = 14


@dataclass(frozen=True)
class DrainOrder:
    """An operator's last word on an instance: whether it is drained.

    number: counts up over the orders to all instances, so the higher one is the later; 0: there was none.
    """

    drained: bool = False
    number: int = 0


class Hello(Message, frozen=True):
    """An engine's first message.  incarnation: the same as long as its process lives.

    notes: where its notes are (see `step_notes`).
    drain: the last that its process was told, for a controller that was started since.
    """

    name: str
    incarnation: str
    info: ModelInfo
    notes: str = ""
    drain: DrainOrder = DrainOrder()
    protocol: int = PROTOCOL_VERSION


class Welcome(Message, frozen=True):
    """The front end's answer.  refusal: why the engine can't take part; None: it does, and sends a beat
    every heartbeat_s.
    """

    refusal: str | None = None
    heartbeat_s: float = 1.0


class Generate(Message, frozen=True):
    request: GenerateRequest


class Request(Message, frozen=True):
    """A `Generate` over a link.  request: encoded, so that one that is not right is refused alone."""

    request_id: str
    request: Raw

    @staticmethod
    def of(request: GenerateRequest) -> Request:
        return Request(request.request_id, Raw(encode(request)))

    def decoded(self) -> GenerateRequest:
        """Raises TypeError."""
        try:
            found: GenerateRequest = _DECODE_REQUEST(self.request)
        except DecodeError as error:
            raise TypeError(f"the request can't be read: {error}") from error
        return found


_DECODE_REQUEST = Decoder(GenerateRequest)


class Abort(Message, frozen=True):
    request_id: str


class Outputs(Message, frozen=True):
    outputs: list[TokenOutput]


class Rejected(Message, frozen=True):
    """A request that could not be queued."""

    request_id: str
    error: Exception


class Dead(Message, frozen=True):
    """The last event of a loop that failed."""

    error: Exception


class Beat(Message, frozen=True):
    """That an engine is there, said again and again.

    stuck_s: how long its loop has been at one step or command, in seconds; 0: it waits for something to do.
    The others: of the requests that came over other connections than the one that this goes to, those that
    decode, those without a token yet, and the tokens that they may still need.
    held_back: a request waits because its adapter finds no place.
    """

    stuck_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    outstanding_tokens: int = 0
    held_back: bool = False


@dataclass(frozen=True)
class Call:
    """Run a method of the engine loop; a `Reply` with the same id follows.  Over a link a call frame."""

    call_id: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reply:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Stop:
    """End the loop; running requests are dropped.  Never over a link."""


Command = Generate | Abort | Call | Stop
Event = Outputs | Rejected | Reply | Beat | Dead


# What an engine loop is told, and when: a command may lie here for as long as a step takes.


Entry = Command | Callable[[], None]


class Inbox:
    """A queue of commands, and of calls to be made by the loop's thread.

    clock: of the engine; stamps entries as they are put, in the thread that brings them.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self._entries: queue.SimpleQueue[tuple[Entry, float]] = queue.SimpleQueue()

    def put(self, entry: Entry) -> None:
        self._entries.put((entry, self.clock.now_s()))

    def get(self, timeout_s: float | None = None) -> tuple[Entry, float]:
        """The next entry and when it came, in seconds.  Raises queue.Empty if none comes in time."""
        return self._entries.get(timeout=timeout_s)

    def empty(self) -> bool:
        return self._entries.empty()
