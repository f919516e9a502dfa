# SPDX-License-Identifier: Apache-2.0
"""Lost content of the leader's store, on its way from an instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from .server_store import NUM_TRIES, PAUSE_S

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Awaited:
    server_ranks: set[int]
    called: str | None = None
    failed: set[str] = field(default_factory=set)
    num_rounds: int = 0
    reason: str = "no instance has the adapter"


class LostContent:
    """Calls the instances of an adapter in turn, in a few rounds with pauses; then the adapter fails.

    call: calls an instance for content, except the given instances; returns its name, None if none is left.
    give_up: called with a content and the reason.
    """

    def __init__(
        self, call: Callable[[str, set[str]], str | None], give_up: Callable[[str, str], None]
    ) -> None:
        self._call = call
        self._give_up = give_up
        self._awaited: dict[str, _Awaited] = {}

    def await_content(self, server_rank: int, adapter_id: str) -> None:
        """A rank needs the content."""
        awaited = self._awaited.get(adapter_id)
        if awaited is not None:
            awaited.server_ranks.add(server_rank)
            return
        logger.warning("the content of adapter %s was lost; it is fetched again", adapter_id)
        self._awaited[adapter_id] = _Awaited({server_rank})
        self._call_next(adapter_id)

    def pop(self, adapter_id: str) -> set[int]:
        """Stop waiting for the content; returns the ranks that need the content."""
        awaited = self._awaited.pop(adapter_id, None)
        return set() if awaited is None else awaited.server_ranks

    def fail(self, instance: str, adapter_id: str, reason: str) -> None:
        """The instance did not send the content, or the store failed."""
        awaited = self._awaited.get(adapter_id)
        if awaited is not None and awaited.called == instance:
            awaited.failed.add(instance)
            awaited.reason = f"instance {instance} can't send it: {reason}"
            self._call_next(adapter_id)

    def drop_instance(self, instance: str) -> None:
        """The instance has gone: another one is called."""
        for adapter_id, awaited in list(self._awaited.items()):
            if awaited.called == instance:
                self._call_next(adapter_id)

    def _call_next(self, adapter_id: str) -> None:
        awaited = self._awaited[adapter_id]
        awaited.called = self._call(adapter_id, awaited.failed)
        if awaited.called is not None:
            return
        awaited.failed.clear()
        awaited.num_rounds += 1
        if awaited.num_rounds == NUM_TRIES:
            self._give_up(adapter_id, f"the LoRA Server has lost its content, and {awaited.reason}")
        else:
            asyncio.get_running_loop().call_later(PAUSE_S, self._call_again, adapter_id, awaited)

    def _call_again(self, adapter_id: str, awaited: _Awaited) -> None:
        if self._awaited.get(adapter_id) is awaited and awaited.called is None:
            self._call_next(adapter_id)
