"""An adapter's packed file sent over a control connection, for hosts that don't share a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.net.codec import Message

from .control import SILENCE_S, ControlConnection
from .control_messages import Block, Content

_BLOCK_BYTES = 1 << 20


def send_content(connection: ControlConnection, store: HostStore, adapter_id: str) -> None:
    """Send the file of this content hash, in blocks after one message that counts them."""
    path = store.path(adapter_id)
    num_blocks = -(-path.stat().st_size // _BLOCK_BYTES)
    connection.send_all(_messages(path, Content(adapter_id, num_blocks)))


def _messages(path: Path, content: Content) -> Iterator[Message]:
    yield content
    with path.open("rb") as file:
        for _ in range(content.num_blocks):
            yield Block(file.read(_BLOCK_BYTES))


def receive_content(connection: ControlConnection, store: HostStore, content: Content) -> None:
    """Take the blocks that follow and put the file into the store.

    Raises EOFError or OSError when the peer is gone, or stops half-way.
    """
    store.adopt(content.adapter_id, (_block(connection) for _ in range(content.num_blocks)))


def _block(connection: ControlConnection) -> bytes:
    block = connection.receive(SILENCE_S)
    if not isinstance(block, Block):
        raise BrokenPipeError(f"{connection.peer} stopped within an adapter's file")
    return block.data
