# SPDX-License-Identifier: Apache-2.0
"""What travels over the LoRA Server's control connections: a hello, then calls and the leader's orders."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from moe_lora.core.records import ServerState
from moe_lora.dist.net.codec import Interface, Message, Protocol


class ServerHello(Message, frozen=True):
    """A connection's first message.  agreed: facts that both sides must agree on."""

    name: str
    agreed: dict[str, Any]


class ServerWelcome(Message, frozen=True):
    """problem: why the peer is turned away; None: it is let in."""

    problem: str | None


class Need(Message, frozen=True):
    """The leader lacks an adapter that the instance has registered."""

    adapter_id: str


class Content(Message, frozen=True):
    """So many blocks of an adapter's file follow."""

    adapter_id: str
    num_blocks: int


class Block(Message, frozen=True):
    data: bytes


class AdapterFailed(Message, frozen=True):
    """The server gave up an adapter of this instance: no rank serves the adapter any more.

    A later `register` makes the adapter known again.  reason: the error of the failed rank.
    """

    adapter_id: str
    reason: str


class LoadOrder(Message, frozen=True):
    """runs: layer -> (first page, number of pages) on the rank that it goes to."""

    adapter_id: str
    slot: int
    generation: int
    runs: dict[int, tuple[int, int]]


class EvictOrder(Message, frozen=True):
    slot: int
    generation: int


class ResizeOrder(Message, frozen=True):
    num_slots: int


class RestartOrder(Message, frozen=True):
    """The rank's process is to end, so that whoever keeps it running starts it again."""


Order = LoadOrder | EvictOrder | ResizeOrder


@dataclass(frozen=True)
class Memory:
    """Slots of the server, pages of each rank's arena, bytes of a page."""

    capacity: int
    num_pages: tuple[int, ...]
    page_bytes: int


class ServerCalls(typing.Protocol):
    """What ranks of the LoRA Server answer: all of them the first two, the leader the others too.

    What a call began ends with its connection.
    """

    def open_session(self, instance: str, answers: bytes, max_rows: int, depth: int) -> bytes:
        """Serve rows of an instance's rank.  answers: the descriptor of its window; that of ours returns."""

    def tell_turns(self, turns: bytes, num_seen: int) -> None:
        """Announce whose turn it is to another rank of the stage.  turns: the descriptor of its window."""

    def find(self, server_rank: int) -> str | None:
        """Where a rank listens; None while it has not joined."""

    def memory(self) -> tuple[Memory, int]:
        """How a rank's memory is laid out, and the leader's incarnation: generations are above it."""

    def join_rank(self, server_rank: int, address: str) -> None:
        """Tell this rank what is resident, then what changes.  address: where it listens itself."""

    def linked(self, clients: tuple[str, ...]) -> None:
        """Say which client ranks (`client_name`) have a session with this rank now."""

    def need(self, adapter_id: str) -> None:
        """Send a rank the content that it lacks, at once or when an instance has given it."""

    def fail_load(self, adapter_id: str, generation: int, reason: str) -> None:
        """Give up a generation on all ranks after an error of this rank; instances get `AdapterFailed`."""

    def fail_content(self, adapter_id: str, reason: str) -> None:
        """Answer `Need` without the content."""

    def join_instance(self, instance: str) -> None:
        """Let an instance ask for leases."""

    def register(self, adapter_id: str) -> bool:
        """Make an adapter known; False: its content has to be given first.

        Raises ValueError or AdapterError if it could never be resident.
        """

    def give(self, adapter_id: str, num_blocks: int) -> None:
        """Take an adapter's file, in so many blocks that follow."""

    def unregister(self, adapter_id: str) -> None:
        """Forget the adapter when no instance has it registered any more."""

    def acquire(self, adapter_id: str, tenant: str, share: float) -> tuple[int, int]:
        """Slot and generation of a lease, once there is one; no answer if it is released before.

        tenant: whose request needs it, and its weight among those that fill the server: for the leader's
        decisions alone, it is told to nobody.
        """

    def release(self, adapter_id: str) -> None:
        """Give the lease back, or stop waiting for it."""

    def join_devices(self, instance: str) -> tuple[str, int, int, int]:
        """Where devices that put to each other meet, the instance's number among the instances, how many
        these are, and rows of a step.  instance: "" for a rank of the server.

        Raises LoraServerError if all have met.
        """

    def state(self) -> ServerState:
        """Counts for metrics, and what could be changed."""

    def resize(self, capacity: int) -> ServerState:
        """Change the number of adapters resident at once, on all ranks; see `LeaseTable.resize`.

        Raises ConfigError below 1, CapacityError for more than before if the ranks' memory can't hold them.
        """

    def restart(self, server_rank: int) -> None:
        """Have a rank's process end, so that whoever keeps it running starts it again.

        Raises LoraServerError if the rank is not there.
        """


_CALLS = Interface(ServerCalls)
SERVER_SIDE = Protocol.of(ServerHello, Block, answers=_CALLS)
CLIENT_SIDE = Protocol.of(
    *(ServerWelcome, Need, Content, Block, AdapterFailed),
    *(LoadOrder, EvictOrder, ResizeOrder, RestartOrder),
    asks=_CALLS,
)
