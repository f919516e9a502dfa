"""Where adapters' bytes lie while requests use them: the interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import Readiness
from moe_lora.core.request import AdapterResidency

from .adapter_version import AdapterVersion


class Placement(Protocol):
    """Makes adapters ready for computing.  Called by the engine's own thread only."""

    on_change: Callable[[], None] | None
    """Called, from another thread, when an adapter that was not ready may be now."""

    @property
    def waits_for_others(self) -> bool:
        """Whether it may depend on another process that an adapter becomes ready."""
        ...

    def counters(self) -> dict[str, int]:
        """Counters of `EngineStats` by their names there."""
        ...

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """What takes long of an `admit` that is to come; may be called from another thread."""
        ...

    def undo_prepare(self, packed: PackedAdapter) -> None:
        """No `admit` of what was prepared will come."""
        ...

    def admit(self, adapter: AdapterVersion) -> None:
        """Take on an adapter that `drop` will end; `adapter.packed` becomes what to keep of it.

        Raises CapacityError if it could never be made ready.
        """
        ...

    def begin_round(self) -> None:
        """Requests are about to be admitted, one `hold` after the other."""
        ...

    def hold(self, adapter: AdapterVersion, *, again: bool = False) -> Readiness:
        """Keep the adapter ready for one request, or make it so; NO_ROOM: ask again later.

        again: this is no further use of it: the request held it before.
        """
        ...

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """Whether others wait for its place, which is kept for this engine, though no request uses it."""
        ...

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        """Of an adapter that is held."""
        ...

    def let_go(self, adapter: AdapterVersion) -> None:
        """Undo one `hold`: it stays ready while nobody else needs the room."""
        ...

    def stop_asking(self, adapter: AdapterVersion) -> None:
        """Nobody holds the adapter, and nobody will ask again soon."""
        ...

    def drop(self, adapter: AdapterVersion) -> None:
        """It will not be used again."""
        ...

    def pin(self, adapter: AdapterVersion) -> None:
        """Bring the adapter in and keep it.  Raises CapacityError if that left no room for a request."""
        ...

    def bring_pinned(self) -> None:
        """Bring in what was pinned when there was no room; to be called again and again."""
        ...

    def unpin(self, adapter: AdapterVersion) -> None:
        """Undo `pin`."""
        ...

    def where(self, adapter: AdapterVersion) -> tuple[AdapterResidency, int]:
        """Where its bytes are, and how many pages of the device's arena they take there."""
        ...

    def resident(self) -> Iterator[AdapterVersion]:
        """Adapters that are ready now."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...
