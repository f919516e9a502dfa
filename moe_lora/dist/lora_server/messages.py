# SPDX-License-Identifier: Apache-2.0
"""Messages on the LoRA Server's control connections."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from moe_lora.core.records import ServerState
from moe_lora.dist.net.codec import Decoder, Interface, Message, Protocol
from moe_lora.dist.net.session import Handshake


class Need(Message, frozen=True):
    """The leader lacks the instance's adapter."""

    adapter_id: str


class Content(Message, frozen=True):
    """num_blocks blocks of an adapter's file follow."""

    adapter_id: str
    num_blocks: int


class Block(Message, frozen=True):
    data: bytes


class AdapterFailed(Message, frozen=True):
    """The server gave up an adapter on all ranks; a later `register` tries again."""

    adapter_id: str
    reason: str


class LoadOrder(Message, frozen=True):
    """runs: layer -> (first page, number of pages) on the target rank."""

    adapter_id: str
    slot: int
    generation: int
    runs: dict[int, tuple[int, int]]


class EvictOrder(Message, frozen=True):
    slot: int
    generation: int


class ResizeOrder(Message, frozen=True):
    num_slots: int


class DropOrder(Message, frozen=True):
    """Delete the file of an adapter without a registration."""

    adapter_id: str


class RestartOrder(Message, frozen=True):
    """End the rank's process for a restart."""


Order = LoadOrder | EvictOrder | ResizeOrder | DropOrder


@dataclass(frozen=True)
class Memory:
    """Slots, pages of each rank's arena, bytes of a page."""

    capacity: int
    num_pages: tuple[int, ...]
    page_bytes: int


class ServerCalls(typing.Protocol):
    """Calls of LoRA Server ranks: the first two on all ranks, the rest on the leader.

    A call's effects end with its connection.
    """

    def open_session(
        self, instance: str, answers: bytes, max_rows: int, depth: int, client_rank: int
    ) -> bytes:
        """Serve an instance's rank; `answers` and the result are window descriptors."""

    def tell_turns(self, turns: bytes, num_seen: int) -> None:
        """Announce turns to another rank, through this window descriptor."""

    def find(self, server_rank: int) -> str | None:
        """Address of a rank; None before its join."""

    def memory(self) -> tuple[Memory, int]:
        """A rank's memory, and the leader's incarnation, a lower bound of generations."""

    def join_rank(self, server_rank: int, address: str) -> None:
        """Send this rank resident adapters, then changes."""

    def linked(self, clients: tuple[str, ...]) -> None:
        """Set the client ranks (`client_name`) linked to this rank."""

    def need(self, adapter_id: str) -> None:
        """Send missing content to a rank."""

    def fail_load(self, adapter_id: str, generation: int, reason: str) -> None:
        """Give up a generation on all ranks; instances get `AdapterFailed`."""

    def fail_content(self, adapter_id: str, reason: str) -> None:
        """Answer `Need` without the content."""

    def join_instance(self, instance: str) -> None:
        """Allow an instance to acquire leases."""

    def register(self, adapter_id: str) -> bool:
        """Make an adapter known; False: send its content first.

        Raises ValueError or AdapterError for an unfit adapter.
        """

    def give(self, adapter_id: str, num_blocks: int) -> None:
        """Receive an adapter's file in following blocks."""

    def unregister(self, adapter_id: str) -> None:
        """Forget the adapter after its last registered instance."""

    def drop(self, adapter_id: str, only_unused: bool = False) -> None:
        """Delete the adapter's files on all hosts, once no instance has registered it.

        only_unused: now or not at all.
        """

    def acquire(self, adapter_id: str, tenant: str, share: float) -> tuple[int, int]:
        """Slot and generation of a lease, once available.  Raises LoraServerError after a release."""

    def release(self, adapter_id: str) -> None:
        """Return the lease, or cancel the wait."""

    def join_devices(self, instance: str) -> tuple[str, int, int, int]:
        """Meeting address of devices, the instance's number, number of instances, rows of a step.

        instance: "" for a server rank.  Raises LoraServerError for a late member.
        """

    def state(self) -> ServerState:
        """Counts for metrics, and settings."""

    def resize(self, capacity: int) -> ServerState:
        """Set the number of resident adapters on all ranks.

        Raises ConfigError below 1, CapacityError for a growth beyond the ranks' memory.
        """

    def restart(self, server_rank: int) -> None:
        """End a rank's process for a restart.  Raises LoraServerError for an absent rank."""


_CALLS = Interface(ServerCalls)
_ORDERS = LoadOrder, EvictOrder, ResizeOrder, DropOrder, RestartOrder
_TO_CLIENT = (Need, Content, Block, AdapterFailed, *_ORDERS)
HANDSHAKE = Handshake(
    "LoRA Server",
    version=9,
    payload=Decoder(dict[str, Any]),
    dials=Protocol.of(*_TO_CLIENT, asks=_CALLS),
    listens=Protocol.of(Block, answers=_CALLS),
)
"""The payload: facts that must agree.  The version covers `deltas.session` too."""
