# SPDX-License-Identifier: Apache-2.0
"""Choice of an LLM instance for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

from moe_lora.core.request import RoutingStats

MAX_RECENT = 64
_OUTSTANDING = attrgetter("outstanding_tokens")


class InstanceLoad:
    """Unfinished requests of an instance, by adapter (None: the base model).

    waiting: without a token yet (in the simulator: queued).  running: decoding.  used: waiting and running.
    waiting_prompts: prompt tokens.  num_changes: version, for cached sums.
    recent: last used adapters, latest last.  num_elsewhere: requests of other front ends.
    held_back: a request waits for an adapter's slot.  has_slots: False at a LoRA Server.
    """

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self.waiting: Counter[str | None] = Counter()
        self.running: Counter[str | None] = Counter()
        self.used: dict[str | None, int] = {}
        self.waiting_prompts: Counter[str | None] = Counter()
        self.num_requests = self.num_elsewhere = self.waiting_tokens = self.num_changes = 0
        self.held_back, self.has_slots = False, True
        self.recent: dict[str, None] = {}
        self._max_recent = max_recent

    def has(self, adapter: str | None) -> bool:
        """True if the adapter is likely there, or on its way."""
        return adapter is None or adapter in self.recent or adapter in self.used

    def has_room(self, adapter: str | None, max_loras: int | None = None) -> bool:
        """True if the adapter is in use there, or has a place (Toppings section 5).

        max_loras: on the device at once; None: limited by memory.
        """
        most = max_loras if self.has_slots else None
        fits = most is None or adapter in self.used or len(self.used) - (None in self.used) < most
        return adapter is None or adapter in self.running or (fits and not self.held_back)

    def add(self, adapter: str | None, prompt_tokens: int) -> None:
        """A request comes."""
        self.used[adapter] = self.used.get(adapter, 0) + 1
        self.waiting[adapter] += 1
        self.waiting_prompts[adapter] += prompt_tokens
        self.num_requests += 1
        self.waiting_tokens += prompt_tokens
        self.num_changes += 1
        if adapter is not None:
            self.note(adapter)

    def note(self, adapter: str) -> None:
        """The adapter is on the device, or on its way."""
        self.recent.pop(adapter, None)
        self.recent[adapter] = None
        if len(self.recent) > self._max_recent:
            del self.recent[next(iter(self.recent))]

    def start(self, adapter: str | None, prompt_tokens: int) -> None:
        """The request has its first token."""
        self.waiting_tokens -= prompt_tokens
        self.num_changes += 1
        if self.waiting[adapter] == 1:
            del self.waiting[adapter], self.waiting_prompts[adapter]
        else:
            self.waiting[adapter] -= 1
            self.waiting_prompts[adapter] -= prompt_tokens
        self.running[adapter] += 1

    def end(self, adapter: str | None, prompt_tokens: int, *, started: bool) -> None:
        """The request is over."""
        if not started:
            self.start(adapter, prompt_tokens)
        self.num_requests -= 1
        self.num_changes += 1
        for counts in (self.used, self.running):
            counts[adapter] -= 1
            if not counts[adapter]:
                del counts[adapter]


class InstanceView(Protocol):
    """An instance in the view of routing."""

    @property
    def index(self) -> int:
        """Constant during the front end's life."""
        ...

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound of remaining tokens, other front ends' included."""
        ...

    @property
    def load(self) -> InstanceLoad:
        """Requests by adapter; one object for the instance's life."""
        ...


class RoutedView(Protocol):
    """`adapter` None: the base model."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def prompt_tokens(self) -> int: ...


Instance = TypeVar("Instance", bound=InstanceView)


class Router(Protocol):
    """Called per request, and again after its instance's end."""

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        """One of `instances`, by rising index."""
        ...


class RequestListener:
    """A router or a meter that follows requests."""

    @property
    def stats(self) -> RoutingStats | None:
        """None without choices to report."""
        return None

    def start(self, key: Hashable, request: RoutedView, max_tokens: int | None = None) -> None:
        """A request has come."""

    def stop(self, key: Hashable, answer_tokens: int) -> None:
        """A request has ended."""

    def cancel(self, key: Hashable) -> None:
        """A request was refused.  Its `stop` follows."""

    def forget(self, adapter: str) -> None:
        """An adapter was unloaded."""


def listeners(*parts: object) -> tuple[RequestListener, ...]:
    """The listeners among these parts."""
    return tuple(one for one in parts if isinstance(one, RequestListener))


class LeastOutstanding:
    """The instance of least token work, the first on ties."""

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        if len(instances) == 1:
            return instances[0]
        return min(instances, key=_OUTSTANDING)


class RoundRobin:
    """Each instance in turn; skips absent ones."""

    def __init__(self) -> None:
        self._last_index = -1

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        chosen = next((one for one in instances if one.index > self._last_index), instances[0])
        self._last_index = chosen.index
        return chosen
