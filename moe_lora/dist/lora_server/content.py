# SPDX-License-Identifier: Apache-2.0
"""Sends an adapter's packed file to hosts without a shared store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.net.peer import Peer

from .messages import Block
from .server_store import NUM_TRIES, PAUSE_S

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


def num_blocks(store: HostStore, adapter_id: str) -> int:
    """Number of blocks of the adapter's file."""
    return -(-store.path(adapter_id).stat().st_size // _BLOCK_BYTES)


def send_blocks(peer: Peer, store: HostStore, adapter_id: str, number: int) -> None:
    """Send the announced blocks, reading while sending."""
    peer.send_all(_blocks(store, adapter_id, number))


def _blocks(store: HostStore, adapter_id: str, number: int) -> Iterator[Block]:
    num_sent = 0
    try:
        with store.path(adapter_id).open("rb") as file:
            while num_sent < number:
                data = file.read(_BLOCK_BYTES)
                num_sent += 1
                yield Block(data)
    except OSError as error:
        logger.warning("adapter %s can't be read to the end: %s", adapter_id, error)
        # All announced blocks: the receiver finds the damage.
        for _ in range(num_sent, number):
            yield Block(b"")


async def receive_blocks(peer: Peer, store: HostStore, adapter_id: str, number: int) -> None:
    """Receive `number` blocks and put the file into the store.

    Raises StorageError without room, ConnectionError for a lost peer.  After a store's error the rest is
    still read for the connection.
    """
    loop = asyncio.get_running_loop()

    def received() -> Iterator[bytes]:
        for _ in range(number):
            block = asyncio.run_coroutine_threadsafe(peer.next(), loop).result()
            if not isinstance(block, Block):
                raise BrokenPipeError(f"{peer.name} stopped within an adapter's file")
            yield block.data

    def adopt() -> None:
        blocks = received()
        try:
            store.adopt(adapter_id, blocks)
        except ConnectionError:
            raise
        except Exception:
            for _ in blocks:
                """Dropped."""
            raise

    await asyncio.to_thread(adopt)


@dataclass(eq=False)
class _Awaited:
    server_ranks: set[int]
    called: str | None = None
    failed: set[str] = field(default_factory=set)
    num_rounds: int = 0
    reason: str = "no instance has the adapter"


class LostContent:
    """Calls an adapter's instances in turn, in a few rounds with pauses; then gives up.

    call: calls an instance, except the given ones; returns its name, if any.
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
        """Stop waiting for the content; returns the ranks in need."""
        awaited = self._awaited.pop(adapter_id, None)
        return set() if awaited is None else awaited.server_ranks

    def fail(self, instance: str, adapter_id: str, reason: str) -> None:
        """Record an instance's or the store's failure."""
        awaited = self._awaited.get(adapter_id)
        if awaited is not None and awaited.called == instance:
            awaited.failed.add(instance)
            awaited.reason = f"instance {instance} can't send it: {reason}"
            self._call_next(adapter_id)

    def drop_instance(self, instance: str) -> None:
        """Call another instance instead."""
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
