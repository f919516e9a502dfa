"""An adapter's packed file sent over a control connection, for hosts that don't share a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.net.peer import Peer

from .control_messages import Block

_BLOCK_BYTES = 1 << 20


def num_blocks(store: HostStore, adapter_id: str) -> int:
    """Blocks of the file of this content hash."""
    return -(-store.path(adapter_id).stat().st_size // _BLOCK_BYTES)


def send_blocks(peer: Peer, store: HostStore, adapter_id: str) -> None:
    """Send the file of this content hash, after what announces it; read as it leaves."""
    peer.send_all(_blocks(store, adapter_id, num_blocks(store, adapter_id)))


def _blocks(store: HostStore, adapter_id: str, number: int) -> Iterator[Block]:
    with store.path(adapter_id).open("rb") as file:
        for _ in range(number):
            yield Block(file.read(_BLOCK_BYTES))


async def receive_blocks(peer: Peer, store: HostStore, adapter_id: str, number: int) -> None:
    """Take the blocks that follow and put the file into the store.

    Raises StorageError if there is no room, ConnectionError if the peer is gone or stops half-way.
    """
    loop = asyncio.get_running_loop()

    def blocks() -> Iterator[bytes]:
        for _ in range(number):
            block = asyncio.run_coroutine_threadsafe(peer.next(), loop).result()
            if not isinstance(block, Block):
                raise BrokenPipeError(f"{peer.name} stopped within an adapter's file")
            yield block.data

    await asyncio.to_thread(store.adopt, adapter_id, blocks())
