# SPDX-License-Identifier: Apache-2.0
"""An instance moves to another LoRA Server between two steps, with its leases."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.lora_server.attach import LeaseClient, LoraServerClient
from moe_lora.engine.core import EngineCore
from moe_lora.engine.ranks.followers import MemoryOrder
from moe_lora.engine.ranks.rank import Rank

from .leased_adapters import LeasedAdapters

GRANTS_S = 10.0
"""Most time before the move for leases; then rows without one are computed here."""
_LOOK_S = 0.005


@dataclass(frozen=True)
class ServerOrder(MemoryOrder):
    """Move a rank to this server, unless it is there."""

    server: LoraServerConfig

    def carry_out(self, rank: Rank) -> None:
        if not _is_at(rank, self.server):
            reached = rank.reach(self.server)
            assert reached is not None
            rank.move_to(self.server, reached).close()


def moved(core: EngineCore, files: Executor, address: str, layout: str) -> Generator[Future[Any], Any, None]:
    """Reach the server, wait for leases there, then move all ranks; requests go on meanwhile."""
    rank, leased = core.rank, core.adapters.leases
    if leased is None or rank.config.lora_server is None:
        raise ConfigError("this instance has no LoRA Server to move from; restart it with lora_server")
    assert isinstance(leased, LeasedAdapters)
    server = replace(rank.config.lora_server, address=address, layout=layout)
    reached: tuple[LoraServerClient, LeaseClient] | None = None
    if not _is_at(rank, server):
        reached = (yield files.submit(_reached, rank, leased, server)).result()
    with core.transfers.followers.answering(ServerOrder((), server)):
        if reached is not None:
            leases = leased.lease_from(*reached)
            files.submit(_left, rank.move_to(server, reached[0]), leases)


def _is_at(rank: Rank, server: LoraServerConfig) -> bool:
    assert rank.config.lora_server is not None
    return rank.config.lora_server.address == server.address


def _reached(
    rank: Rank, leased: LeasedAdapters, server: LoraServerConfig
) -> tuple[LoraServerClient, LeaseClient]:
    client = rank.reach(server)
    assert client is not None
    try:
        leases = leased.leases_at(client)
    except BaseException:
        client.close()
        raise
    end_s = time.monotonic() + GRANTS_S
    while not leases.settled and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return client, leases


def _left(client: LoraServerClient, leases: LeaseClient) -> None:
    leases.stop()
    client.close()
