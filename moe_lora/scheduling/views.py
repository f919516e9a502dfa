# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of sequences and their adapters."""

from __future__ import annotations

import collections.abc
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from moe_lora.cache.orders import Namespace, Readiness
from moe_lora.cache.pages import BlockTable
from moe_lora.policies.admission import admission


@dataclass(slots=True)
class Waits:
    """Times before the first step, in seconds of the scheduler's clock.

    admitted_s: plan of the first step.  loading_s: start of the wait for bytes, if any.  adapter_s: arrival
    of the adapter, or None.  adapter_load_s, kv_load_s: waits for adapter, then history.  held_back_s: start
    of the wait for a slot.
    """

    admitted_s: float | None = None
    loading_s: float | None = None
    adapter_s: float | None = None
    adapter_load_s: float = 0.0
    kv_load_s: float = 0.0
    held_back_s: float | None = None
    num_preemptions: int = 0

    @property
    def is_held_back(self) -> bool:
        """True from the lack of a slot until the first step."""
        return self.held_back_s is not None and self.admitted_s is None

    def load(self, now_s: float) -> None:
        """Record held adapter and history; bytes may still load."""
        self.loading_s, self.adapter_s = now_s, None

    def loaded(self, now_s: float) -> None:
        """Record adapter and history on the device; loads after a preemption don't count."""
        if self.admitted_s is None and self.loading_s is not None and self.adapter_s is not None:
            self.adapter_load_s += self.adapter_s - self.loading_s
            self.kv_load_s += now_s - self.adapter_s
        self.loading_s = None

    def queue_s(self, arrival_s: float, now_s: float) -> float:
        """Time without loads from arrival to admission (or now)."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        return admitted_s - arrival_s - self.adapter_load_s - self.kv_load_s

    def adapter_wait_s(self, now_s: float) -> float:
        """From the lack of an adapter's slot until the start of its load."""
        if self.held_back_s is None:
            return 0.0
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        return max(0.0, admitted_s - self.held_back_s - self.adapter_load_s - self.kv_load_s)


Adapter = TypeVar("Adapter", contravariant=True)


class Schedulable(Protocol):
    """A sequence.  The scheduler sets plain attributes; the caller appends tokens.

    table: KV pages, in the adapter's namespace, or with base_tokens the base's.  num_computed: tokens with KV
    in the table; counted after a step, reset with the pages.  num_cached: found in the cache at admission.
    matched: the prompt was looked up.  adapter_hit: resident at arrival.  cold_tokens: to compute before the
    adapter's arrival.  base_tokens: first tokens, computed without the adapter; later KV is not for the
    prefix cache.  held: the last token is not computed now.  awaits_kv: KV arrives into the caller's pages;
    reset with the pages.  early: awaits KV of an unfinished prompt, without computation; put back before
    others; set by the caller.  gave_way: preempted for another tenant.  unshared: further KV is not for the
    prefix cache; set by the caller.  computes_prompt: uses no cached prefix.
    """

    table: BlockTable
    num_computed: int
    num_cached: int
    matched: bool
    adapter_hit: bool
    cold_tokens: int
    base_tokens: int
    held: bool
    awaits_kv: bool
    early: bool
    unshared: bool
    gave_way: bool
    computes_prompt: bool

    @property
    def adapter(self) -> Any:
        """None: the base model."""
        ...

    @property
    def adapter_uid(self) -> Namespace:
        """The adapter's namespace in the cache."""
        ...

    @property
    def tenant(self) -> str:
        """As in `CompetingView`."""
        ...

    @property
    def share(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str:
        """Only equal salts share cached prompts."""
        ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def tokens(self) -> collections.abc.Sequence[int]:
        """Prompt and generated tokens."""
        ...

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV."""
        ...

    @property
    def num_left(self) -> int:
        """Most tokens still to generate."""
        ...

    @property
    def waits(self) -> Waits: ...


class Adapters(Protocol[Adapter]):
    """Holds of adapters, and waits for them."""

    @property
    def waits_for_others(self) -> bool:
        """True if readiness may depend on another process."""
        ...

    def enqueue(self, adapter: Adapter) -> None:
        """Count a waiting request, without a hold."""
        ...

    def dequeue(self, adapter: Adapter) -> None:
        """A waiting request holds the adapter, or has left."""
        ...

    def begin_round(self) -> None:
        """Start of a round of `acquire` calls."""
        ...

    def acquire(self, adapter: Adapter, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Hold the adapter for a request; start a load if absent.

        NO_ROOM: not held.  again: the request held the adapter before.  num_tokens: orders the layers if host
        workers compute the first.
        """
        ...

    def has_unused_lease(self, adapter: Adapter) -> bool:
        """True if other engines wait for a slot unused here."""
        ...

    def readiness(self, adapter: Adapter) -> Readiness:
        """State of an acquired adapter.  NO_ROOM: the load failed."""
        ...

    def pays_on_host(self, adapter: Adapter, num_tokens: int, on_host: int) -> bool:
        """True if host workers compute these prompt tokens sooner than the device after the load.

        on_host: the workers' other tokens in the step.
        """
        ...

    def release(self, adapter: Adapter) -> None:
        """Undo one `acquire`."""
        ...

    def release_lease(self, adapter: Adapter) -> None:
        """Release the lease, or cancel its request, unless a request holds the adapter."""
        ...


Sequence = TypeVar("Sequence", bound=Schedulable)


@dataclass(eq=False, slots=True)
class Scheduled(Generic[Sequence]):
    """`num_tokens` from the first uncomputed token; `samples` if the last token is included."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_uncomputed == self.num_tokens


class RequestQueue(deque[Sequence], Generic[Sequence]):
    """Waiting requests by arrival, preempted requests first.

    order: sorts the requests that may start.
    """

    def __init__(self, order: Callable[[Iterable[Sequence]], Iterable[Sequence]] = list) -> None:
        super().__init__()
        self.order = order


def shortest_first(requests: Iterable[Sequence]) -> list[Sequence]:
    """Preempted requests, then the shortest."""
    return sorted(
        admission.shortest_first(requests), key=lambda request: not request.matched or request.gave_way
    )
