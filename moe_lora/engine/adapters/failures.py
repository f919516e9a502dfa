# SPDX-License-Identifier: Apache-2.0
"""Failed adapters: the reasons, and the time of the next try."""

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
"""Maybe temporary causes: of a disk, its files, a peer, a network."""


@dataclass(frozen=True)
class Failure:
    """retry_s: the engine's time of the next allowed load by a request; None: needs a new load call."""

    reason: str
    retry_s: float | None = None


class AdapterFailures:
    """Failures by adapter version, until a load of the adapter succeeds.

    Belongs to the engine's thread; any thread may call `report`.  reports: unread ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_version: dict[int, Failure] = {}
        self._num_loads: dict[int, int] = {}
        self.reports: queue.SimpleQueue[tuple[str, Exception]] = queue.SimpleQueue()

    def report(self, content_hash: str, error: Exception) -> None:
        """Record another process's failure, for `reported` in the engine's thread."""
        self.reports.put((content_hash, error))

    def reported(self) -> list[tuple[str, Exception]]:
        """Reports since the last call: content hash and error."""
        found = []
        while not self.reports.empty():
            found.append(self.reports.get())
        return found

    def load_failed(self, adapter: AdapterVersion, error: Exception, *, may_repeat: bool = True) -> bool:
        """Record a failed load; True if the adapter's requests must end, False for another try at once.

        may_repeat: False if the loader has retried already.
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
        """Record an error of a step that computed this adapter alone.

        may_pass: other adapters of the step failed too, so the cause may lie elsewhere.
        """
        may_pass = may_pass or isinstance(error, (MemoryError, *PASSING))
        self._note(
            adapter, f"computing its deltas failed: {_said(error)}", FIRST_PAUSE_S if may_pass else None
        )

    def loaded(self, adapter: AdapterVersion) -> None:
        """A load to the device succeeded: ends a failure with a pause only."""
        self._num_loads.pop(adapter.uid, None)
        failure = self.by_version.get(adapter.uid)
        if failure is not None and failure.retry_s is not None:
            del self.by_version[adapter.uid]

    def forget(self, uid: int) -> None:
        self._num_loads.pop(uid, None)
        self.by_version.pop(uid, None)

    def problem(self, adapter: AdapterVersion) -> str | None:
        """Reason why the adapter is unavailable; None: available."""
        failure = self.by_version.get(adapter.uid)
        return None if failure is None else failure.reason

    def check(self, adapter: AdapterVersion) -> None:
        """Raises AdapterFailedError while the adapter is unavailable; a failure ends with its pause."""
        failure = self.by_version.get(adapter.uid)
        if failure is None:
            return
        if failure.retry_s is None or self._clock.now_s() < failure.retry_s:
            raise AdapterFailedError(self.message(adapter))
        del self.by_version[adapter.uid]

    def message(self, adapter: AdapterVersion) -> str:
        """Text for clients about a failed adapter."""
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
    text = str(error)
    if text and type(error).__module__.startswith("moe_lora."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
