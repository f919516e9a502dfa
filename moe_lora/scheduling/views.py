# SPDX-License-Identifier: Apache-2.0
"""What the scheduler sees of sequences, and of the adapters that they hold."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from moe_lora.cache.orders import Namespace, Readiness
from moe_lora.cache.pages import BlockTable

# Where a sequence's time before its first step goes.


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


Adapter = TypeVar("Adapter", contravariant=True)


class Schedulable(Protocol):
    """A sequence.  The scheduler sets what is no property here; its caller appends tokens.

    table: the pages that hold its KV.  num_computed: tokens that have KV there; the scheduler counts them
    when they are computed, and sets them back when it takes the pages.  num_cached: of these, what it found
    when it was admitted.  matched: its prompt was looked up in the cache.  adapter_hit: its adapter was there
    when it came.  cold_tokens: of `tokens`, those that it may compute before its adapter is there; 0: it is.
    held: its last token is not to be computed now, so that it gains none.  awaits_kv: its KV comes from
    elsewhere, into pages that the caller takes; the scheduler sets it back when it takes them.
    gave_way: it makes room for another tenant's.
    unshared: what it computes from now on is not for the prefix cache; set by the caller.
    """

    table: BlockTable
    num_computed: int
    num_cached: int
    matched: bool
    adapter_hit: bool
    cold_tokens: int
    held: bool
    awaits_kv: bool
    unshared: bool
    gave_way: bool

    @property
    def adapter(self) -> Any:
        """As `Adapters` knows it; None: the base model."""
        ...

    @property
    def adapter_uid(self) -> Namespace:
        """The adapter's namespace in the cache."""
        ...

    @property
    def tenant(self) -> str:
        """Whom it counts for; as `policies.admission.fairness.CompetingView` has it, and the next two."""
        ...

    @property
    def share(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str:
        """It shares computed prompts with sequences of the same one."""
        ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def tokens(self) -> collections.abc.Sequence[int]:
        """Prompt and what was generated so far."""
        ...

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV."""
        ...

    @property
    def num_left(self) -> int:
        """Tokens that it will still generate, at most."""
        ...

    @property
    def waits(self) -> Waits: ...


class Adapters(Protocol[Adapter]):
    """Who holds which adapter, and who waits for it."""

    @property
    def waits_for_others(self) -> bool:
        """Whether it may depend on another process that an adapter becomes ready."""
        ...

    def enqueue(self, adapter: Adapter) -> None:
        """One more request of the adapter waits, holding nothing."""
        ...

    def dequeue(self, adapter: Adapter) -> None:
        """One of those holds the adapter now, or has left."""
        ...

    def begin_round(self) -> None:
        """Requests are about to be admitted, one `acquire` after the other."""
        ...

    def acquire(self, adapter: Adapter, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Hold the adapter for one request, its bytes on their way if they are not there.

        NO_ROOM: it is not held, there is no place now.  again: this request held it before.  num_tokens: of
        the request, by which layers are ordered where host workers compute the first ones.
        """
        ...

    def has_unused_lease(self, adapter: Adapter) -> bool:
        """Whether others wait for its place, which is kept though no request uses it."""
        ...

    def readiness(self, adapter: Adapter) -> Readiness:
        """Of an adapter that was acquired: whether its bytes are there, or prompts can be computed without.

        NO_ROOM: they failed to come.
        """
        ...

    def pays_on_host(self, adapter: Adapter, num_tokens: int, on_host: int) -> bool:
        """Whether so many prompt tokens are to begin on host workers, rather than wait for the adapter, one
        that is HOST_COMPUTABLE.  on_host: tokens that they compute in that step already.
        """
        ...

    def release(self, adapter: Adapter) -> None:
        """Undo one `acquire`."""
        ...


# What a scheduler decides: the work of one step.


Sequence = TypeVar("Sequence", bound=Schedulable)


@dataclass(eq=False, slots=True)
class Scheduled(Generic[Sequence]):
    """`num_tokens` of a sequence from its first uncomputed one; `samples` if its last token is among them."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_uncomputed == self.num_tokens
