# SPDX-License-Identifier: Apache-2.0
"""vLLM's events of cached prefixes over ZeroMQ, for routers that send prompts to their prefixes.

Messages of vLLM's `distributed.kv_events`: PUB [topic, number, batch], and a ROUTER that repeats late
batches.  Events are arrays, as llm-d, AIBrix and Dynamo read in each version; vLLM has maps since 0.33.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import msgspec
import numpy as np

from moe_lora.cache.orders import Namespace
from moe_lora.cache.pages import Node
from moe_lora.cache.tree import DependencyTree
from moe_lora.config.kv_events import KvEventSettings
from moe_lora.core.errors import ConfigError

logger = logging.getLogger(__name__)

HASH_BYTES = 8
VOCABULARY_BITS = 32
"""Other tokens (of a prompt with a salt, of a state's snapshot) get no events."""
END = (-1).to_bytes(8, "big", signed=True)
POLL_S = 0.1
DEVICE = "GPU"
"""The only medium, on device or host."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks of token ids for prompts to find.  lora_name None: the base model."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Prompts no longer find these blocks."""

    block_hashes: Sequence[int]
    medium: str


class Batch(msgspec.Struct, array_like=True):
    """ts: UNIX seconds.  data_parallel_rank: number of the instance."""

    ts: float
    events: Sequence[BlockStored | BlockRemoved]
    data_parallel_rank: int


class BlockReport(Protocol):
    """Reader of a tree's reports.  A hash stands for a block and all blocks before.

    llm-d has one map from hashes to blocks for all instances: equal hashes mean equal adapters.
    """

    def seed(self, namespace: Namespace) -> bytes:
        """Seed of the first block's hash, up to 64 bytes."""
        ...

    def stored(
        self, namespace: Namespace, parent: int | None, hashes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Further blocks behind `parent`; None: the first blocks."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Prompts no longer find these blocks."""


class ReportedTree(DependencyTree):
    """`DependencyTree` with a hash for each block.  Versions of equal content share hashes."""

    def __init__(self, block_size: int, *, report: BlockReport, **settings: Any) -> None:
        super().__init__(block_size, **settings)
        self._report = report
        self._hashes: dict[Node, list[int]] = {}
        self._num_blocks: Counter[int] = Counter()
        """Findable blocks of each hash."""

    def add_kv(self, parent: Node, tokens: bytes, now_s: float) -> Node:
        node = super().add_kv(parent, tokens, now_s)
        first = int(np.frombuffer(tokens, np.int64, 1)[0])
        if first >> VOCABULARY_BITS == 0 and (parent.is_adapter or parent in self._hashes):
            self._hashes[node] = []
            self._store(node, tokens)
        return node

    def lengthen(self, node: Node, tokens: bytes, pages: list[int], now_s: float) -> None:
        super().lengthen(node, tokens, pages, now_s)
        if node in self._hashes:
            self._store(node, tokens)

    def split(self, node: Node, num_blocks: int) -> Node:
        head = super().split(node, num_blocks)
        if (hashes := self._hashes.get(node)) is not None:
            self._hashes[head], self._hashes[node] = hashes[:num_blocks], hashes[num_blocks:]
        return head

    def hide(self, node: Node) -> None:
        super().hide(node)
        if hashes := self._hashes.pop(node, None):
            self._num_blocks.subtract(hashes)
            if removed := [one for one in hashes if not self._num_blocks[one]]:
                self._report.removed(removed)
            for one in removed:
                del self._num_blocks[one]

    def _store(self, node: Node, tokens: bytes) -> None:
        """Report the node's last blocks."""
        known = self._hashes[node] or (node.parent and self._hashes.get(node.parent))
        before = known[-1] if known else None
        seed, found = self._report.seed(node.namespace) if before is None else _bytes(before), list[int]()
        for at in range(0, len(tokens), self._block_bytes):
            digest = blake2b(tokens[at : at + self._block_bytes], digest_size=HASH_BYTES, key=seed)
            seed = digest.digest()
            found.append(int.from_bytes(seed, "little"))
        self._hashes[node] += found
        self._num_blocks.update(found)
        self._report.stored(node.namespace, before, found, np.frombuffer(tokens, np.int64).tolist())


def _bytes(value: int) -> bytes:
    return value.to_bytes(HASH_BYTES, "little")


class KvEvents:
    """Publishes one cache's reports from a thread.

    names: uid -> the version; set before the first report.
    """

    def __init__(self, settings: KvEventSettings, block_size: int, instance: str) -> None:
        """instance: the name, with a number at the end.

        Raises ConfigError without pyzmq, or for an address in use.
        """
        try:
            import zmq
        except ImportError as error:
            raise ConfigError('kv_events needs pyzmq; pip install "moe-lora[kv-events]"') from error
        self.names: Mapping[Any, Any] = {}
        number = re.search(r"\d+$", instance)
        self._number = int(number[0]) if number else 0
        self._block_size, self._settings = block_size, settings
        self._queue: SimpleQueue[BlockStored | BlockRemoved | None] = SimpleQueue()
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._pub = self._socket(zmq.PUB, settings.endpoint, settings.hwm)
            if settings.replay_endpoint is not None:
                room = 2 * (settings.buffer_steps + 1)  # readers acknowledge half of it at a time
                self._replay = self._socket(zmq.ROUTER, settings.replay_endpoint, room)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events: {error}; give an endpoint with a free port") from error
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def make_tree(self, block_size: int, **settings: Any) -> DependencyTree:
        return ReportedTree(block_size, report=self, **settings)

    def seed(self, namespace: Namespace) -> bytes:
        if namespace is None:
            return b""
        version = self.names[namespace]
        return blake2b(f"{version.name} {version.packed.content_hash}".encode()).digest()

    def stored(
        self, namespace: Namespace, parent: int | None, hashes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        version = None if namespace is None else self.names[namespace]
        name, uid = (None, None) if version is None else (version.name, version.uid)
        self._queue.put(BlockStored(hashes, parent, token_ids, self._block_size, uid, DEVICE, name))

    def removed(self, hashes: Sequence[int]) -> None:
        self._queue.put(BlockRemoved(hashes, DEVICE))

    def close(self) -> None:
        """Publish pending reports, and free the ports."""
        self._queue.put(None)
        self._thread.join()

    def _socket(self, kind: int, address: str, room: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(room)
        head, port = address.rsplit(":", 1)
        socket.bind(f"{head}:{int(port) + self._number}")
        return socket

    def _run(self) -> None:
        encode, topic = msgspec.msgpack.Encoder().encode, self._settings.topic.encode()
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=self._settings.buffer_steps)
        number, is_open = 0, True
        while is_open:
            if self._replay is not None and self._replay.poll(0):
                self._repeat(kept, topic)
            try:
                events = [self._queue.get(timeout=POLL_S)]
            except Empty:
                continue
            while not self._queue.empty():
                events.append(self._queue.get())
            is_open = None not in events
            found = [one for one in events if one is not None]
            if not found:
                continue
            batch = encode(Batch(time.time(), found, self._number))
            self._pub.send_multipart((topic, number.to_bytes(8, "big"), batch))
            kept.append((number.to_bytes(8, "big"), batch))
            number += 1
        self._context.destroy(linger=int(1000 * POLL_S))

    def _repeat(self, kept: Sequence[tuple[bytes, bytes]], topic: bytes) -> None:
        """Send one reader the kept batches from its number on."""
        asked = self._replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != len(END):
            logger.warning("kv_events: a request for late batches has no number of eight bytes; dropped")
            return
        reader, _, first = asked
        for number, batch in list(kept):
            if number >= first:
                self._replay.send_multipart((reader, b"", topic, number, batch))
        self._replay.send_multipart((reader, b"", b"", END, b""))
