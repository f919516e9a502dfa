# SPDX-License-Identifier: Apache-2.0
"""Adapters that an engine can't serve now: the reasons, and the time of the next try."""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass

from moe_lora.core.clock import Clock
from moe_lora.core.errors import (
    AdapterError,
    AdapterFailedError,
    PeerGoneError,
    PeerUnreachableError,
    SignalTimeoutError,
    StorageError,
)

from .adapter_store import AdapterVersion

logger = logging.getLogger(__name__)

MAX_LOADS = 3
"""Failed loads in a row before the requests of the adapter end."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PASSING = (OSError, StorageError, AdapterError, PeerGoneError, PeerUnreachableError, SignalTimeoutError)
"""Causes that may pass: of a disk, its files, a peer, a network."""


@dataclass(frozen=True)
class Failure:
    """retry_s: the engine's time from which a request starts another load; None: a new load is needed."""

    reason: str
    retry_s: float | None = None


class AdapterFailures:
    """Failures by adapter version, until a load of the adapter succeeds.

    The engine's thread uses everything but `report`, which any thread may call.  reports: not read yet.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_version: dict[int, Failure] = {}
        self._num_loads: dict[int, int] = {}
        self.reports: queue.SimpleQueue[tuple[str, Exception]] = queue.SimpleQueue()

    def report(self, content_hash: str, error: Exception) -> None:
        """Note a failure that another process found; `reported` returns it to the engine's thread."""
        self.reports.put((content_hash, error))

    def reported(self) -> list[tuple[str, Exception]]:
        """Reports since the last call: content hash and error."""
        found = []
        while not self.reports.empty():
            found.append(self.reports.get())
        return found

    def load_failed(self, adapter: AdapterVersion, error: Exception, *, may_repeat: bool = True) -> bool:
        """Note a failed load; True if the requests of the adapter must end, False for another try at once.

        may_repeat: False if whoever loads has tried again already.
        """
        number = self._num_loads[adapter.uid] = self._num_loads.get(adapter.uid, 0) + 1
        passing = isinstance(error, PASSING)
        if passing and may_repeat and number % MAX_LOADS:
            logger.warning("adapter %s: load %d failed (%s); trying again", adapter.name, number, error)
            return False
        pause_s = None
        if passing:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (min(number, 30) // MAX_LOADS - 1))
        self._note(adapter, f"it could not be loaded: {_said(error)}", pause_s)
        return True

    def compute_failed(self, adapter: AdapterVersion, error: Exception, *, may_pass: bool = False) -> None:
        """Note an error of a step that computed this adapter alone.

        may_pass: other adapters of the step failed alike, so the cause may lie elsewhere.
        """
        may_pass = may_pass or isinstance(error, (MemoryError, *PASSING))
        self._note(
            adapter, f"computing its deltas failed: {_said(error)}", FIRST_PAUSE_S if may_pass else None
        )

    def loaded(self, adapter: AdapterVersion) -> None:
        """A load to the device succeeded: this ends a failure with a pause, no other."""
        self._num_loads.pop(adapter.uid, None)
        failure = self.by_version.get(adapter.uid)
        if failure is not None and failure.retry_s is not None:
            del self.by_version[adapter.uid]

    def forget(self, uid: int) -> None:
        self._num_loads.pop(uid, None)
        self.by_version.pop(uid, None)

    def problem(self, adapter: AdapterVersion) -> str | None:
        """Why the adapter is unavailable; None: it is not."""
        failure = self.by_version.get(adapter.uid)
        return None if failure is None else failure.reason

    def check(self, adapter: AdapterVersion) -> None:
        """Raises AdapterFailedError while the adapter is unavailable; a failure whose pause is over ends."""
        failure = self.by_version.get(adapter.uid)
        if failure is None:
            return
        if failure.retry_s is None or self._clock.now_s() < failure.retry_s:
            raise AdapterFailedError(self.message(adapter))
        del self.by_version[adapter.uid]

    def message(self, adapter: AdapterVersion) -> str:
        """What clients are told; the adapter has failed."""
        failure = self.by_version[adapter.uid]
        way_out = "load it again once that is mended"
        if failure.retry_s is not None:
            rest_s = max(0.0, failure.retry_s - self._clock.now_s())
            way_out = f"requests from {rest_s:.0f} s on try again"
        return f"adapter {adapter.name!r} is unavailable: {failure.reason}; {way_out}"

    def _note(self, adapter: AdapterVersion, reason: str, pause_s: float | None) -> None:
        retry_s = None if pause_s is None else self._clock.now_s() + pause_s
        self.by_version[adapter.uid] = Failure(reason, retry_s)
        logger.error("adapter %s version %d is unavailable: %s", adapter.name, adapter.version, reason)


def _said(error: Exception) -> str:
    """The error in words, without a class name where the project wrote the words."""
    text = str(error)
    if text and type(error).__module__.startswith("moe_lora."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
