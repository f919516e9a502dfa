"""What became of one request of a run."""

from __future__ import annotations

from dataclasses import dataclass

from .latency import RequestTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request and its fate: finished (`timing`), failed (`error`), or, with neither, interrupted.

    adapter: None for the base model.  arrival_s: planned, sent_s: actual, both after the run's start.
    input_tokens: as the server counted them where it says so.  exact: whether the text is the known answer.
    queue_ms, adapter_load_ms, kv_load_ms: the server's own account, where it gives one.
    """

    adapter: str | None
    arrival_s: float
    sent_s: float
    input_tokens: int
    timing: RequestTiming | None = None
    error: str | None = None
    text: str = ""
    exact: bool | None = None
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    kv_load_ms: float | None = None

    @property
    def interrupted(self) -> bool:
        return self.timing is None and self.error is None
