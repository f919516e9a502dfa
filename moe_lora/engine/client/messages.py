# SPDX-License-Identifier: Apache-2.0
"""Messages and beats between an engine loop and its clients."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from msgspec import DecodeError, Raw

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.request import (
    AdapterFacts,
    AdapterInfo,
    GenerateRequest,
    ModelInfo,
    RequestTiming,
    TokenOutput,
    name_matches,
)
from moe_lora.dist.net.codec import Decoder, Message, encode

BEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """An adapter of an instance, for the pool's directory.

    source: descriptor of a window for peers; None: not held.
    """

    info: AdapterInfo
    facts: AdapterFacts
    source: bytes | None


@dataclass(frozen=True)
class KvWindow:
    """Window for an arriving request's KV, and the pages' layout."""

    descriptor: bytes
    layout: str


@dataclass(frozen=True)
class KvSent:
    """KV of num_tokens in the target's window; pages from first_page on were put twice."""

    num_tokens: int
    first_page: int


@dataclass(frozen=True, kw_only=True)
class HeldRequest:
    """A request that gains no tokens for now.

    tokens: from the requested position on.  timing: as if ended now.  unshared: weights carried another
    adapter.
    """

    tokens: tuple[int, ...]
    adapter_version: int | None
    timing: RequestTiming
    unshared: bool = False
    sent: KvSent = KvSent(0, 0)


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """A request of an engine.

    num_left: tokens that the answer may still gain.  num_bytes: of the KV.  waited_s: since arrival; None:
    computing.  held: under a move.
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
    """Order to move a request.  name: the engine's for the request.  target: an instance."""

    name: str
    target: str
    kind: str


class Move(Message, frozen=True):
    """An order for a front end, with the front end's id."""

    request_id: str
    target: str
    kind: str


REQUEST_METHODS = frozenset({"hold_request", "resume_request", "kv_window", "kv_send"})
"""Methods whose first argument is a request's id."""


PauseMode = Literal["abort", "wait", "keep"]
"""Effects of a pause.  Running requests end, go on to their ends, or gain no tokens until the resume."""


SleepPart = Literal["weights", "kv_cache", "scheduling"]
"""Parts of an engine that sleep; "scheduling" wakes up with the last part."""


@dataclass(frozen=True)
class PauseScope:
    """Requests that a pause covers.

    owner: a later pause replaces the pause.  tenant: None: all requests.  adapters: names or shell patterns.
    ids: beginnings of request ids; (): any.
    """

    owner: str = ""
    tenant: str | None = None
    adapters: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def names(self, adapter: str | None) -> bool:
        """True for a covered adapter; the base model only without a tenant."""
        if self.tenant is None:
            return True
        return adapter is not None and name_matches(adapter, self.adapters)

    def covers(self, request: GenerateRequest) -> bool:
        is_named = not self.ids or request.request_id.startswith(self.ids)
        return is_named and self.tenant in (None, request.tenant) and self.names(request.adapter)


@dataclass(frozen=True)
class CurrentPause:
    """left_s: until the pause's end."""

    scope: PauseScope
    mode: PauseMode
    left_s: float


@dataclass(frozen=True)
class PauseOrder:
    """A pause of all instances.  end_s: of `time.monotonic`."""

    scope: PauseScope
    mode: PauseMode
    end_s: float


@dataclass(frozen=True)
class SleepOrder:
    """A sleep; awake without parts.  mode: the latest."""

    parts: frozenset[SleepPart] = frozenset()
    drops_weights: bool = False
    mode: PauseMode = "abort"

    def start(self, parts: Collection[SleepPart], drops_weights: bool, mode: PauseMode) -> SleepOrder:
        """The order after a further sleep."""
        return SleepOrder(self.parts | set(parts), self.drops_weights or drops_weights, mode)

    def stop(self, parts: Collection[SleepPart]) -> SleepOrder:
        """The order after a wake-up."""
        left = self.parts - set(parts)
        return SleepOrder(left, self.drops_weights and "weights" in left, self.mode)


@dataclass(frozen=True)
class AbortOrder:
    """An end of all covered requests, also outside of instances."""

    scope: PauseScope
    number: int


@dataclass(frozen=True)
class DrainOrder:
    """An operator's last order for an instance.

    number: counts up over all instances' orders; 0: no order.
    """

    drained: bool = False
    number: int = 0


AliasStage = Literal["settled", "rollout", "promoted", "rolled_back"]
AliasStep = Literal["rollout", "promote", "rollback", "drop", "remove"]


@dataclass(frozen=True)
class Alias:
    """A model name for an adapter, or for two during a rollout.

    current: for requests outside `share`; "": a removed alias.  second: loaded too, or "".  share: of the
    requests, for `second`; 0 after "rollout".  number: counts up over the cluster's steps.
    """

    current: str = ""
    second: str = ""
    share: float = 0.0
    stage: AliasStage = "settled"
    loaded: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    number: int = 0


class KnownAliases(dict[str, Alias]):
    """Aliases by name, with removed aliases.

    live: without removed aliases; `|=` sets a new mapping.
    """

    live: Mapping[str, Alias] = MappingProxyType({})

    def __ior__(self, found: Any) -> KnownAliases:  # type: ignore[override, misc]
        self.update(found)
        self.live = {name: alias for name, alias in self.items() if alias.current}
        return self


@dataclass(frozen=True)
class AliasChange:
    """A rollout has a share and `to`, an adapter or a version as v8."""

    step: AliasStep
    to: str = ""
    share: float | None = None


@dataclass(frozen=True)
class InstanceFacts:
    """Facts of an engine's process.

    notes: place of the `StepNotes`.  drain, aliases: for a restarted controller.
    """

    info: ModelInfo
    notes: str = ""
    drain: DrainOrder = DrainOrder()
    aliases: Mapping[str, Alias] = field(default_factory=dict)


class Generate(Message, frozen=True):
    request: GenerateRequest


class Request(Message, frozen=True):
    """A `Generate` over a link.  request: encoded, so that a malformed request is refused alone."""

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
    """A request without room in the queue, or with outputs above a frame's limit."""

    request_id: str
    error: Exception


class Dead(Message, frozen=True):
    """The last event of a failed loop."""

    error: Exception


class Beat(Message, frozen=True):
    """A periodic sign of life.

    stuck_s: time so far on one step or command; 0: idle.  num_running, num_waiting, outstanding_tokens: of
    other connections.  held_back: a request waits for an adapter's slot.
    """

    stuck_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    outstanding_tokens: int = 0
    held_back: bool = False


@dataclass(frozen=True)
class Call:
    """Run a method of the engine loop; a `Reply` with the same id follows."""

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
    """End the loop and drop requests.  Never over a link."""


Command = Generate | Abort | Call | Stop
Event = Outputs | Rejected | Reply | Beat | Dead


Entry = Command | Callable[[], None]


class Inbox(queue.SimpleQueue[tuple[Entry, float]]):
    """A queue of entries for the loop's thread, with arrivals in seconds.

    answers: True for a call about a move, answered beside a step, in any thread.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self.answers: Callable[[Call], bool] = lambda call: False

    def put(self, entry: Entry) -> None:  # type: ignore[override]
        super().put((entry, self.clock.now_s()))


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
    """Time of a thread's current work; read by other threads."""

    held_back = False

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._since_s: float | None = None

    def work(self) -> None:
        """Start a short piece of work."""
        self._since_s = self._clock.now_s()

    def rest(self) -> None:
        """Wait for work."""
        self._since_s = None

    def stuck_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s


class Hearing:
    """Times of the last progress and beat."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._heard_s = self._beat_s = self._clock.now_s()

    def hear(self, beat: Beat) -> None:
        self._beat_s = self._clock.now_s()
        self._heard_s = max(self._heard_s, self._beat_s - beat.stuck_s)

    def restart_clock(self) -> None:
        """Restart after a gap in this process."""
        self._heard_s = self._beat_s = self._clock.now_s()

    def unheard_s(self) -> float:
        """Seconds since the last beat: several intervals if the process is stopped or cut off."""
        return self._clock.now_s() - self._beat_s

    def silent_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock.now_s() - self._heard_s
