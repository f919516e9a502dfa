"""Where a sequence's time before its first step goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waits:
    """Noted by the scheduler, in seconds of its clock.

    admitted_s: when the sequence's first step was planned.  loading_s, adapter_s: when it began to wait for
    bytes on their way, and when those of its adapter were there; None: it does not wait, they are not.
    adapter_load_s, kv_load_s: how long it waited for its adapter, and then for its history.  held_back_s:
    since when it waits for an adapter's place.
    """

    admitted_s: float | None = None
    loading_s: float | None = None
    adapter_s: float | None = None
    adapter_load_s: float = 0.0
    kv_load_s: float = 0.0
    held_back_s: float | None = None

    def load(self, now_s: float) -> None:
        """It holds its adapter and its history; their bytes may be on their way."""
        self.loading_s, self.adapter_s = now_s, None

    def loaded(self, now_s: float) -> None:
        """Adapter and history are on the device; later loads, after a preemption, are no part of the wait."""
        if self.admitted_s is None and self.loading_s is not None and self.adapter_s is not None:
            self.adapter_load_s += self.adapter_s - self.loading_s
            self.kv_load_s += now_s - self.adapter_s
        self.loading_s = None

    def queue_s(self, arrival_s: float, now_s: float) -> float:
        """Time for which no bytes were waited for, from arrival to admission (until now if there was none):
        for the step under way, for its turn, for room.
        """
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        return admitted_s - arrival_s - self.adapter_load_s - self.kv_load_s

    def adapter_wait_s(self, now_s: float) -> float:
        """Of the queueing: from the moment it was held back until its bytes began to move."""
        if self.held_back_s is None:
            return 0.0
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        return max(0.0, admitted_s - self.held_back_s - self.adapter_load_s - self.kv_load_s)
