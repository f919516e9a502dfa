"""What a front end knows of the requests that it gave to an instance; the simulator keeps the same books."""

from __future__ import annotations

from collections import Counter

MAX_RECENT = 64


class InstanceLoad:
    """Requests that have not ended, by adapter (None: the base model).

    waiting: those without a token yet: queued, or their prompt is being computed (the simulator counts them
    until they leave its queue).  running: those that decode.  waiting_prompts, waiting_tokens: prompt tokens
    of the first, by adapter and in all.  num_changes: how often this changed, for who keeps sums of it.
    recent: the adapters of the last requests, at most `max_recent`, the latest last: what the instance most
    likely holds on its device.  num_elsewhere: requests that other front ends gave it, whose adapters are
    not known here.
    """

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self.waiting: Counter[str | None] = Counter()
        self.running: Counter[str | None] = Counter()
        self.waiting_prompts: Counter[str | None] = Counter()
        self.num_waiting = self.num_running = self.waiting_tokens = self.num_changes = 0
        self.num_elsewhere = 0
        self.recent: dict[str, None] = {}
        self._max_recent = max_recent

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running + self.num_elsewhere

    def has(self, adapter: str | None) -> bool:
        """Whether the adapter is most likely there, or on its way; the base model always is."""
        return adapter is None or adapter in self.recent or adapter in self.waiting or adapter in self.running

    def add(self, adapter: str | None, prompt_tokens: int) -> None:
        """A request comes."""
        self.waiting[adapter] += 1
        self.waiting_prompts[adapter] += prompt_tokens
        self.num_waiting += 1
        self.waiting_tokens += prompt_tokens
        self.num_changes += 1
        if adapter is not None:
            self.recent.pop(adapter, None)
            self.recent[adapter] = None
            if len(self.recent) > self._max_recent:
                del self.recent[next(iter(self.recent))]

    def start(self, adapter: str | None, prompt_tokens: int) -> None:
        """It has its first token."""
        self._leave(adapter, prompt_tokens)
        self.running[adapter] += 1
        self.num_running += 1

    def end(self, adapter: str | None, prompt_tokens: int, *, started: bool) -> None:
        """It is over, however it ended."""
        if not started:
            self._leave(adapter, prompt_tokens)
            return
        self.num_running -= 1
        self.num_changes += 1
        _take(self.running, adapter, 1)

    def _leave(self, adapter: str | None, prompt_tokens: int) -> None:
        self.num_waiting -= 1
        self.waiting_tokens -= prompt_tokens
        self.num_changes += 1
        _take(self.waiting, adapter, 1)
        _take(self.waiting_prompts, adapter, prompt_tokens)


def _take(counts: Counter[str | None], adapter: str | None, number: int) -> None:
    counts[adapter] -= number
    if not counts[adapter]:
        del counts[adapter]
