# SPDX-License-Identifier: Apache-2.0
"""Sends an adapter's packed file over a control connection, to hosts without a shared store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.net.peer import Peer

from .messages import Block

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


def num_blocks(store: HostStore, adapter_id: str) -> int:
    """Blocks of the file of this content hash."""
    return -(-store.path(adapter_id).stat().st_size // _BLOCK_BYTES)


def send_blocks(peer: Peer, store: HostStore, adapter_id: str) -> None:
    """Send the file of this content hash after its announcement, reading while sending."""
    peer.send_all(_blocks(store, adapter_id, num_blocks(store, adapter_id)))


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
        # As many blocks as announced: the receiver finds the damage, and the connection goes on.
        for _ in range(num_sent, number):
            yield Block(b"")


async def receive_blocks(peer: Peer, store: HostStore, adapter_id: str, number: int) -> None:
    """Receive `number` blocks and put the file into the store.

    Raises StorageError without room, ConnectionError for a lost peer.  After an error of the store the rest
    is still read, and the connection goes on.
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
