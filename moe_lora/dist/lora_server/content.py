"""An adapter's packed file sent over a control connection, for hosts that don't share a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moe_lora.adapters.host_store import HostStore

from .control import ControlConnection, Message

_BLOCK_BYTES = 16 << 20


def send_content(connection: ControlConnection, store: HostStore, adapter_id: str) -> None:
    """Send the file of this content hash, in blocks after one message that counts them."""
    path = store.path(adapter_id)
    num_blocks = -(-path.stat().st_size // _BLOCK_BYTES)
    blocks = _blocks(path, num_blocks)
    connection.send_with_blocks(blocks, kind="content", adapter_id=adapter_id, num_blocks=num_blocks)


def _blocks(path: Path, num_blocks: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for _ in range(num_blocks):
            yield file.read(_BLOCK_BYTES)


def receive_content(connection: ControlConnection, store: HostStore, message: Message) -> None:
    """Take the blocks that follow `message` and put the file into the store."""
    store.adopt(message["adapter_id"], (connection.receive_block() for _ in range(message["num_blocks"])))
