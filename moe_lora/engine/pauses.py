# SPDX-License-Identifier: Apache-2.0
"""Pauses of an engine: covered requests do not start, and with `keep` gain no tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from moe_lora.core.errors import AdapterNotFoundError
from moe_lora.core.request import BACKGROUND, COMPOSED, GenerateRequest

from .client.messages import Abort, CurrentPause, Generate, PauseMode, PauseScope
from .sequence import Sequence

if TYPE_CHECKING:
    from .adapters.manager import AdapterManager
    from .client.messages import Entry, SleepOrder

Handle = Callable[[Generate | Abort, float], None]


@dataclass(eq=False)
class Pause:
    scope: PauseScope
    mode: PauseMode
    timer: threading.Timer
    end_s: float


class Pauses:
    """Pauses by owner, in the engine's thread, between two steps.

    A delayed request enters at the end of its pauses or of a sleep, with the adapter version of that time.  A
    held request keeps pages and version.  A scope with a term of a weighted sum covers the sum.

    drop: removes a request without an output.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        compiling: Mapping[str, tuple[Generate, float]],
        drop: Callable[[str], object],
        handle: Handle,
        put: Callable[[Entry], None],
        adapters: AdapterManager,
        sleep_orders: Callable[[], Collection[SleepOrder]],
    ) -> None:
        self._sequences = sequences
        self._compiling = compiling
        self._drop = drop
        self._handle = handle
        self._put = put
        self._adapters = adapters
        self._sleep_orders = sleep_orders
        self._pauses: dict[str, Pause] = {}
        self._delayed: dict[str, tuple[Generate, float]] = {}
        self._held: set[Sequence] = set()

    @property
    def scopes(self) -> list[PauseScope]:
        return [pause.scope for pause in self._pauses.values()]

    @property
    def current(self) -> list[CurrentPause]:
        now_s = time.monotonic()
        return [CurrentPause(one.scope, one.mode, one.end_s - now_s) for one in self._pauses.values()]

    @property
    def num_delayed(self) -> int:
        return len(self._delayed)

    @property
    def num_background(self) -> int:
        """Delayed requests of batches."""
        return sum(command.request.priority >= BACKGROUND for command, _ in self._delayed.values())

    @property
    def held(self) -> set[str]:
        """Ids of requests held by pauses."""
        return {sequence.request.request_id for sequence in self._held}

    def start(self, scope: PauseScope, mode: PauseMode, timeout_s: float) -> Pause:
        """Pause the scope for at most timeout_s; prolongs the owner's equal pause, replaces another.

        keep: covered requests gain no tokens.  wait: they go on to their ends.
        """
        timer = threading.Timer(timeout_s, lambda: self._put(lambda: self._expire(pause, timer)))
        timer.daemon = True
        before, end_s = self._pauses.get(scope.owner), time.monotonic() + timeout_s
        if before is not None:
            before.timer.cancel()
        if before is None or (before.scope, before.mode) != (scope, mode):
            pause = self._pauses[scope.owner] = Pause(scope, mode, timer, end_s)
        else:
            pause = before
            pause.timer, pause.end_s = timer, end_s
        timer.start()
        if mode == "abort":
            self.abort(scope)
        elif mode == "keep":
            self._delay_unstarted(scope)
        self.apply()
        return pause

    def lasts(self, pause: Pause) -> bool:
        return self._pauses.get(pause.scope.owner) is pause

    def is_given(self, pause: Pause) -> bool:
        """True once it is over, or, under wait, no covered request runs."""
        return pause.mode != "wait" or not self.lasts(pause) or not self._runs(pause.scope)

    def end(self, owner: str | None) -> None:
        """End the owner's pause; None: all."""
        for name in [*self._pauses] if owner is None else [owner]:
            if (pause := self._pauses.pop(name, None)) is not None:
                pause.timer.cancel()
        self.apply()

    def abort(self, scope: PauseScope) -> None:
        """End all covered requests."""
        for request_id, sequence in list(self._sequences.items()):
            if self._is_in(scope, sequence.request):
                self._handle(Abort(request_id), sequence.arrival_s)
        for request_id, (command, arrival_s) in [*self._delayed.items(), *self._compiling.items()]:
            if self._is_in(scope, command.request):
                self._handle(Abort(request_id), arrival_s)

    def delay(self, command: Generate, arrival_s: float) -> bool:
        """Delay a covered request; False for other and for moved requests.

        Under wait, a begun answer is not delayed.
        """
        request = command.request
        modes: tuple[PauseMode, ...] = ("abort", "keep") if request.generated else get_args(PauseMode)
        if _is_moved(request) or not self._covers(request, *modes):
            return False
        self.add(command, arrival_s)
        return True

    def add(self, command: Generate, arrival_s: float) -> None:
        """Delay a request to the next end of a pause or sleep."""
        self._delayed[command.request.request_id] = command, arrival_s

    def forget(self, request_id: str) -> bool:
        """Drop a delayed request, if known."""
        return self._delayed.pop(request_id, None) is not None

    def leave(self, request_id: str) -> None:
        """A move holds the request now."""
        self._held.discard(self._sequences[request_id])

    def apply(self) -> None:
        """Hold, resume and admit requests by the current pauses.

        A sleeping engine admits none: apply again after the sleep.
        """
        for sequence in list(self._sequences.values()):
            covered = self._covers(sequence.request, "keep")
            if covered and not sequence.is_held_by_order:
                sequence.held = True
                self._held.add(sequence)
            elif not covered and sequence in self._held:
                sequence.held = False
                self._held.discard(sequence)
        self._held.intersection_update(self._sequences.values())
        if self._sleep_orders():
            return
        delayed, self._delayed = self._delayed, {}
        for command, arrival_s in delayed.values():
            self._handle(command, arrival_s)

    def _expire(self, pause: Pause, timer: threading.Timer) -> None:
        if self.lasts(pause) and pause.timer is timer:
            self.end(pause.scope.owner)

    def _covers(self, request: GenerateRequest, *modes: PauseMode) -> bool:
        return any(one.mode in modes and self._is_in(one.scope, request) for one in self._pauses.values())

    def _is_in(self, scope: PauseScope, request: GenerateRequest) -> bool:
        """True for a covered request."""
        name = request.adapter
        if name is None or scope.tenant is None or not name.startswith(COMPOSED):
            return scope.covers(request)
        from moe_lora.core.composed import parts_in

        sequence = self._sequences.get(request.request_id)
        try:
            known = None if sequence is None else sequence.adapter
            path = (known or self._adapters.current(name)).path
        except AdapterNotFoundError:  # unloaded meanwhile: the request ends at its start
            return False
        terms = [] if path is None else parts_in(path)
        return scope.tenant == request.tenant and any(scope.names(term.name) for term in terms)

    def _runs(self, scope: PauseScope) -> bool:
        return any(self._is_in(scope, one.request) for one in self._sequences.values())

    def _delay_unstarted(self, scope: PauseScope) -> None:
        for request_id, sequence in list(self._sequences.items()):
            request = sequence.request
            is_new = sequence.waits.admitted_s is None and not _is_moved(request)
            if is_new and self._is_in(scope, request):
                self._drop(request_id)
                self.delay(Generate(request), sequence.arrival_s)


def _is_moved(request: GenerateRequest) -> bool:
    return request.held or request.awaits_kv
