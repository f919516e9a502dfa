"""Names in a shared store: who is the newest incarnation, and where its windows are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from moe_lora.core.errors import ConfigError, PeerGoneError, PeerUnreachableError

from .contract import Store

T = TypeVar("T")

_POLL_S = 0.01


class Directory:
    """One process's entry in its cluster's store, per kind of transport. Without a store it lists nothing."""

    def __init__(self, store: Store | None, kind: str, name: str) -> None:
        """Takes the next generation of that name, also among racing claimants; 0 without a store."""
        self._store = store
        self._prefix = f"moe_lora/transport/{kind}"
        self._name = name
        self.generation = 0 if store is None else self._claim(store)

    def _claim(self, store: Store) -> int:
        key = f"{self._prefix}/{self._name}/generation"
        known = store.get(key).decode() if store.check([key]) else ""
        while True:
            mine = str(int(known or 0) + 1)
            found = store.compare_set(key, known, mine).decode()
            if found == mine:
                return int(mine)
            known = found

    def publish(self, label: str, descriptor: bytes) -> None:
        """Make a window findable. Raises PeerGoneError if a newer incarnation has taken the name over."""
        if self._store is None:
            return
        newest = int(self._store.get(f"{self._prefix}/{self._name}/generation"))
        if newest != self.generation:
            raise PeerGoneError(
                f"{self._name!r} generation {self.generation} was superseded by generation {newest}; end "
                "this process, or give it a name of its own"
            )
        self._store.set(f"{self._prefix}/{self._name}/window/{label}", descriptor.decode("ascii"))

    def find(self, peer: str, label: str, attach: Callable[[bytes], T], timeout_s: float) -> T:
        """attach(descriptor) of the newest window; tries again until timeout_s while there is none or it is
        dead. Raises PeerUnreachableError; ConfigError without a store."""
        if self._store is None:
            raise ConfigError(
                f"{self._name!r} has no store to find {peer!r} in; give make_transport store=, or attach by "
                "the descriptor that the peer sends"
            )
        key = f"{self._prefix}/{peer}/window/{label}"
        deadline = time.monotonic() + timeout_s
        reason = "it has not published it"
        while True:
            if self._store.check([key]):
                try:
                    return attach(self._store.get(key))
                except PeerUnreachableError as error:
                    reason = str(error)
            if time.monotonic() >= deadline:
                raise PeerUnreachableError(
                    f"no window {label!r} of peer {peer!r} within timeout_s={timeout_s:g} ({reason}); check "
                    "that the peer runs, uses the same store and transport, or raise the timeout"
                )
            time.sleep(_POLL_S)
