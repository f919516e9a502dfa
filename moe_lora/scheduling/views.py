"""What the scheduler sees of sequences, and of the adapters that they hold."""

from __future__ import annotations

import collections.abc
from typing import Any, Protocol, TypeVar

from moe_lora.cache.orders import Namespace, Readiness
from moe_lora.cache.tables import BlockTable

from .waits import Waits

Adapter = TypeVar("Adapter", contravariant=True)


class Schedulable(Protocol):
    """A sequence.  The scheduler sets what is no property here; its caller appends tokens.

    table: the pages that hold its KV.  num_computed: tokens that have KV there; the scheduler counts them
    when they are computed, and sets them back when it takes the pages.  num_cached: of these, what it found
    when it was admitted.  matched: its prompt was looked up in the cache.  adapter_hit: it never waited for
    its adapter to come.
    """

    table: BlockTable
    num_computed: int
    num_cached: int
    matched: bool
    adapter_hit: bool

    @property
    def adapter(self) -> Any:
        """As `Adapters` knows it; None: the base model."""
        ...

    @property
    def adapter_uid(self) -> Namespace:
        """The adapter's namespace in the cache."""
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

    def acquire(self, adapter: Adapter, *, again: bool = False) -> Readiness:
        """Hold the adapter for one request, its bytes on their way if they are not there.

        NO_ROOM: it is not held, there is no place now.  again: this request held it before.
        """
        ...

    def has_unused_lease(self, adapter: Adapter) -> bool:
        """Whether others wait for its place, which is kept though no request uses it."""
        ...

    def readiness(self, adapter: Adapter) -> Readiness:
        """Of an adapter that was acquired: whether its bytes are there; NO_ROOM: they failed to come."""
        ...

    def release(self, adapter: Adapter) -> None:
        """Undo one `acquire`."""
        ...
