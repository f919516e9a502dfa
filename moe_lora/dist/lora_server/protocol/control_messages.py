"""What travels over the LoRA Server's control connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lora.dist.lora_server.server.leases import LeaseStats
from moe_lora.dist.net.codec import Message, Protocol

ADMIN_VERSION = 2


class ServerBeat(Message, frozen=True):
    """Nothing but that one is there."""


class ServerHello(Message, frozen=True, kw_only=True):
    """A connection's first message: its type names the purpose.  agreed: what both sides must agree on."""

    name: str
    agreed: Mapping[str, Any]


class LeasesHello(ServerHello, frozen=True, kw_only=True):
    """Of an instance's first rank, which asks for leases."""

    instance: str


class DataHello(ServerHello, frozen=True, kw_only=True):
    """Of an instance's rank, which sends rows.  answers: the descriptor of its window for answers."""

    instance: str
    server_rank: int
    answers: bytes
    max_rows: int
    depth: int


class RankHello(ServerHello, frozen=True, kw_only=True):
    """Of a server rank, to the leader.  address: where it listens itself."""

    server_rank: int
    address: str


class FindHello(ServerHello, frozen=True, kw_only=True):
    """Of whoever asks where a server rank listens."""

    server_rank: int


class TurnsHello(ServerHello, frozen=True, kw_only=True):
    """Of a server rank, to the first of its stage.  turns: the descriptor of its window for turns."""

    server_rank: int
    turns: bytes
    seen: int


class AdminHello(Message, frozen=True, kw_only=True):
    """A question of the front end.  capacity: to have from now on; None: as it is."""

    name: str
    protocol: int = ADMIN_VERSION
    capacity: int | None = None


class Refused(Message, frozen=True):
    error: str


class ServerWelcome(Message, frozen=True):
    """To leases and turns."""


class DataWelcome(Message, frozen=True):
    """requests: the descriptor of the server rank's window for requests."""

    requests: bytes


class RankWelcome(Message, frozen=True, kw_only=True):
    """How a rank's memory is laid out (`server.rank_memory.Memory`), and the leader's incarnation."""

    capacity: int
    num_pages: tuple[int, ...]
    page_bytes: int
    first_generation: int


class FindWelcome(Message, frozen=True):
    """address: None while the rank has not joined."""

    address: str | None


@dataclass(frozen=True, kw_only=True)
class ServerState(LeaseStats):
    """capacity: adapters resident at once.  max_capacity: the most that the ranks' memory holds, as far as
    the registered adapters tell; None if there is none.
    """

    capacity: int
    max_capacity: int | None


class AdminWelcome(Message, frozen=True):
    """problem: why the capacity could not be changed.  state: after the question."""

    problem: str | None
    state: ServerState


class Register(Message, frozen=True):
    adapter_id: str


class Unregister(Message, frozen=True):
    adapter_id: str


class Acquire(Message, frozen=True):
    """number: the grant repeats it; one of an acquire that was given up since is not for the next one."""

    adapter_id: str
    number: int


class Release(Message, frozen=True):
    adapter_id: str


class StatsAsked(Message, frozen=True):
    request: int


class Need(Message, frozen=True):
    """The peer's store lacks this adapter; its `Content` follows."""

    adapter_id: str


class Content(Message, frozen=True):
    """So many blocks of an adapter's file follow."""

    adapter_id: str
    num_blocks: int


class Block(Message, frozen=True):
    data: bytes


class Registered(Message, frozen=True):
    adapter_id: str


class ServerRejected(Message, frozen=True):
    adapter_id: str
    error: str


class Granted(Message, frozen=True):
    adapter_id: str
    number: int
    slot: int
    generation: int


class Stats(Message, frozen=True):
    request: int
    stats: LeaseStats


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


Order = LoadOrder | EvictOrder | ResizeOrder

HELLOS = (LeasesHello, DataHello, RankHello, FindHello, TurnsHello, AdminHello)
PROTOCOL = Protocol.of(
    *HELLOS,
    *(ServerBeat, Refused, ServerWelcome, DataWelcome, RankWelcome, FindWelcome, AdminWelcome),
    *(Register, Unregister, Acquire, Release, StatsAsked, Need, Content, Block),
    *(Registered, ServerRejected, Granted, Stats, LoadOrder, EvictOrder, ResizeOrder),
)
