# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server and an instance that it serves, each rank a process, forked from one that has torch loaded.

Forking takes milliseconds where starting Python takes seconds; what runs in a process is the entry point that
the product starts there.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.host import OwnFolder
from moe_lora.core.partition import Layout
from moe_lora.core.request import GenerateRequest
from moe_lora.dist.launch.host_roles import Started, say_started
from moe_lora.dist.launch.roles import JobPlace
from moe_lora.dist.launch.server_role import serve_rank
from moe_lora.dist.lora_server import attach
from moe_lora.dist.lora_server.control import LoraServerAdmin
from moe_lora.dist.net.codec import decoder_of
from moe_lora.engine import build
from moe_lora.engine.core import EngineCore
from moe_lora.engine.ranks.follower import follow
from moe_lora.engine.ranks.followers import Followers
from tests.patient_links import links_have_time

from .compared_backend import ComparedBackend, Tally, read_tally
from .covering import Row
from .served_models import CAPACITY, ServedModel, requests_to

MAX_ROWS = 7
"""Rows in a message: few, so that every prompt takes several."""
STOP_S = 20.0
HEAR_STARTED = decoder_of([Started])
Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """What an instance answered, what each of its ranks found, how many adapters the server evicted."""

    tokens: Tokens
    tallies: Sequence[Tally]
    num_evictions: int

    def complaints(self, expected: Tokens) -> list[str]:
        """What is not as it must be; also a comparison that compared nothing."""
        found = [
            f"request {number} differs from token {_first_difference(ours, theirs)} on"
            for number, (ours, theirs) in enumerate(zip(self.tokens, expected, strict=True))
            if ours != theirs
        ]
        for rank, tally in enumerate(self.tallies):
            if tally.num_wrong:
                layer, site = divmod(tally.first_wrong, 100)
                found.append(
                    f"rank {rank}: {tally.num_wrong} rows differ, first in layer {layer} site {site}"
                )
            if tally.num_fallback_rows:
                found.append(f"rank {rank}: {tally.num_fallback_rows} rows were not computed by the server")
            if not tally.num_added or tally.num_requests <= tally.num_sites // 4:
                found.append(f"rank {rank}: hardly anything was asked of the server: {tally}")
        if not self.num_evictions:
            found.append("no adapter was evicted")
        return found


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)


def local_tokens(model: ServedModel, dtype: str, **changes: Any) -> Tokens:
    """Greedy tokens of the local backend.  changes: of `settings`."""
    with instance(settings(model, dtype, **changes)) as engine:
        return answers(engine, requests_to(model))


def served_tokens(model: ServedModel, row: Row, *, eager: bool = True, **changes: Any) -> Outcome:
    """The same from an instance of a LoRA Server.

    row: a value of each of `combinations.FACTORS`.  eager: without compiled layers.  changes: of `settings`.
    """
    with links_have_time(), ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_lora-"))
        server = LoraServerConfig(
            layout=row["layout"],
            capacity=CAPACITY,
            address=f"{directory}/leader",
            store_dir=f"{directory}/store",
            transport=row["transport"],
            sites=row["sites"],
            max_rows=MAX_ROWS,
        )
        expert_parallel = int(row["expert_parallel"])
        config = settings(
            *(model, row["dtype"]),
            **{"lora_server": server, "expert_parallel": expert_parallel, "eager": eager, **changes},
        )
        stack.enter_context(server_processes(config, Layout.parse(server.layout).num_ranks))
        engine = stack.enter_context(instance(config))
        tokens = answers(engine, requests_to(model))
        num_evictions = LoraServerAdmin(server.address, None).state().num_evictions
        tallies = [read_tally(server.store_dir, rank) for rank in range(config.num_ranks)]
    return Outcome(tokens, tallies, num_evictions)


def settings(model: ServedModel, dtype: str, **changes: Any) -> EngineConfig:
    common: dict[str, Any] = {
        "device": "cpu",
        "eager": True,
        "num_threads": 1,
        "max_loras": CAPACITY,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "kv_cache_gb": 0.01,
    }
    return EngineConfig(
        model_dir=str(model.model_dir), adapters=model.adapters, dtype=dtype, **{**common, **changes}
    )


def answers(engine: EngineCore, requests: Sequence[GenerateRequest]) -> Tokens:
    """Tokens of each request."""
    changed = threading.Event()
    engine.watch(lambda error: None, changed.set)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        if engine.stalled:
            assert changed.wait(STOP_S), "no lease came free"
            changed.clear()
    return [tuple(tokens) for tokens in found.values()]


@contextmanager
def server_processes(config: EngineConfig, num_ranks: int) -> Iterator[None]:
    """All ranks of the LoRA Server that `config` names."""
    with ExitStack() as stack:
        connections = [stack.enter_context(forked(serve_server_rank)) for _ in range(num_ranks)]
        for server_rank, connection in enumerate(connections):
            connection.send((config, server_rank))
        for connection in connections:
            started = HEAR_STARTED(os.read(connection.fileno(), 1 << 16))
            if started.error is not None:
                raise started.error
        yield
        # All at once: each takes a moment to end.
        for connection in connections:
            connection.close()


def serve_server_rank(connection: Connection) -> None:
    """What the product starts for a rank; it ends with the connection."""
    config, server_rank = connection.recv()

    def end_with_connection() -> None:
        connection.poll(None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_connection, daemon=True).start()
    status = os.dup(connection.fileno())
    try:
        serve_rank(config, JobPlace(server_rank), status)
    except Exception as error:
        say_started(status, error)


@contextmanager
def instance(config: EngineConfig) -> Iterator[EngineCore]:
    """An engine whose ranks compare every delta."""
    with ExitStack() as stack, mock.patch.object(attach, "RemoteBackend", ComparedBackend):
        connections = [stack.enter_context(forked(follow_comparing)) for _ in range(1, config.num_ranks)]
        followers = Followers(connections, OwnFolder()) if connections else None
        engine = build.build_engine(config, followers)
        try:
            yield engine
        finally:
            engine.close()


def follow_comparing(connection: Connection) -> None:
    with mock.patch.object(attach, "RemoteBackend", ComparedBackend):
        follow(connection)


@contextmanager
def forked(target: Callable[[Connection], None]) -> Iterator[Connection]:
    """A process that runs `target` with the other end of the connection, and ends when this end is closed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "moe_lora.dist.lora_server.server_rank"])
    ours, theirs = context.Pipe()
    log_level = logging.getLogger("moe_lora").level
    process = context.Process(target=_run, args=(target, theirs, log_level), daemon=True)
    with theirs:
        process.start()
    try:
        yield ours
    finally:
        ours.close()
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run(target: Callable[[Connection], None], connection: Connection, log_level: int) -> None:
    logging.getLogger("moe_lora").setLevel(log_level)
    with links_have_time():
        target(connection)
