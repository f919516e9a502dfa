"""The host workers of an engine: started, started again when they end, and who of them gets which rows."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import ConfigError, EngineDeadError, PeerUnreachableError
from moe_lora.core.host import OwnFolder
from moe_lora.core.processes import STOP_TIMEOUT_S, start_child, usable_cores
from moe_lora.dist.lora_server.client.remote_backend import RemoteBackend
from moe_lora.dist.lora_server.protocol.session import ClientSession, DeltaRequest, FrameLayout
from moe_lora.dist.transport.contract import Transport, make_transport
from moe_lora.kernels.operands import StepTables
from moe_lora.lora.row_routing import RoutedAdapter, RowRouting, Source, content_number, no_terms

from .worker import WorkerSetUp

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
DEPTH = 4
"""Frames of a session: sites of a layer that are begun before the first is added, and one to spare."""
_FIRST_PAUSE_S, _MAX_PAUSE_S, _LONG_LIFE_S = 0.5, 5.0, 30.0
_NOTHING = torch.empty(0, dtype=torch.int32)
_NO_STEP = StepTables(query_start=_NOTHING, seq_lens=_NOTHING, block_tables=_NOTHING)
_LOOK_S, _GRACE_S, _END_S = 0.05, 0.5, 1.0


class WorkerLink(threading.Thread):
    """Keeps one worker process and a `ClientSession` with it.

    session: None while there is none; deltas are then computed by the engine itself.
    """

    session: ClientSession | None = None

    def __init__(
        self,
        number: int,
        transport: Transport,
        layout: FrameLayout,
        store: HostStore,
        core: int | None,
        answer_timeout_s: float,
        owned: bool,
        slowdown: float,
    ) -> None:
        super().__init__(name=f"host-worker-{number}", daemon=True)
        self._transport = transport
        self._layout = layout
        self._store = store
        self._core = core
        self._owned = owned
        self._slowdown = slowdown
        self._answer_timeout_s = answer_timeout_s
        self._starts = itertools.count()
        self._closing = threading.Event()
        self._ready = threading.Event()
        self.pid: int | None = None
        self.start()

    def wait_ready(self) -> None:
        """Raises EngineDeadError if the worker does not start in time."""
        if not self._ready.wait(START_TIMEOUT_S):
            raise EngineDeadError(f"{self.name} did not start within {START_TIMEOUT_S:g} s; see the log")

    def close(self) -> None:
        """End the process; `join` waits for it."""
        self._closing.set()
        session = self.session
        if session is not None:
            session.break_off()

    def run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            start_s = time.monotonic()
            with contextlib.ExitStack() as held:
                try:
                    self._live(held)
                except (OSError, EOFError, PeerUnreachableError) as error:
                    logger.warning("%s can't be started: %s", self.name, error)
                session, self.session = self.session, None
                if session is not None:
                    session.break_off()
                if not self._closing.is_set():
                    logger.warning("%s ended; the engine computes its rows until it is back", self.name)
                long_life = time.monotonic() - start_s > _LONG_LIFE_S
                pause_s = _FIRST_PAUSE_S if long_life else min(max(_FIRST_PAUSE_S, 2 * pause_s), _MAX_PAUSE_S)
                self._closing.wait(_GRACE_S)  # the engine's thread may still wait on the buffers

    def _live(self, held: contextlib.ExitStack) -> None:
        """Start a process and stay with it until it ends; `held` lets go of its buffers."""
        label = f"{self.name}-{next(self._starts)}"
        answers = self._transport.alloc(label, DEPTH * self._layout.answer_bytes, 1)
        held.callback(answers.free)
        process, connection = start_child("moe_lora.dist.host_workers.worker", num_threads=1)
        self.pid = process.pid
        try:
            with connection:
                layout = self._layout
                facts = (label, layout.shape, layout.dtype, layout.max_rows, DEPTH, self._store.directory)
                mine = (answers.descriptor(), self._core, self._owned, os.getpid(), self._slowdown)
                connection.send(WorkerSetUp(*facts, *mine))
                if not connection.poll(START_TIMEOUT_S):
                    raise EOFError("it says nothing")
                requests = self._transport.attach(connection.recv())
                held.callback(self._transport.detach, requests)
                self.session = ClientSession(
                    self._transport, requests, answers, layout, DEPTH, self._answer_timeout_s
                )
                self._ready.set()
                while process.poll() is None and not self.session.broken:
                    if self._closing.wait(_LOOK_S):
                        break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:
            self.pid = None
            if process.poll() is None:
                process.kill()
                process.wait()


def check_cores(
    num_workers: int, num_ranks: int, cores: Sequence[int], *, setting: str = "host_workers"
) -> None:
    """Raises ConfigError for more workers than cores, and for cores that this host has not.

    num_ranks: of all instances of this host, or of its LoRA Server.  setting: what the number is called.
    """
    last, usable = (os.cpu_count() or 1) - 1, usable_cores()
    unknown = [core for core in cores if not 0 <= core <= last]
    if unknown:
        raise ConfigError(
            f"host_cores={tuple(cores)}: this host has no core {unknown[0]}; choose from 0 to {last}"
        )
    if num_workers * num_ranks > usable and not cores:
        raise ConfigError(
            f"{setting}={num_workers} for each of {num_ranks} ranks is more than the {usable} cores that "
            f"this process may use; choose at most {usable // num_ranks}"
        )


class HostWorkers:
    """The host workers of one engine process, and the LoraBackend over them.

    store: has the adapters; None: one is made, in a folder that goes with the engine.
    num_tokens: what all workers compute in time.  tokens_per_worker: see `RowShares`.  cores: one for each
    worker to run on; empty: any.  answer_timeout_s: a worker that takes longer is given up, and its rows are
    computed by the engine.  slowdown: it takes so many times as long (an emulation of less than a core).
    Raises EngineDeadError if one does not start.
    """

    def __init__(
        self,
        layout: FrameLayout,
        store: HostStore | None,
        num_workers: int,
        tokens_per_worker: int,
        *,
        cores: Sequence[int] = (),
        answer_timeout_s: float = 5.0,
        slowdown: float = 1.0,
    ) -> None:
        shape = layout.shape
        self._groups = ((0,) * len(shape.sites),) * shape.num_layers
        self._folder = None if store is not None else OwnFolder()
        self.store = store = store or HostStore(self._folder.path if self._folder else "")
        self.num_tokens = num_workers * tokens_per_worker
        self._transport = make_transport("shm", name=f"host-workers-{os.getpid()}")
        options = (answer_timeout_s, self._folder is not None, slowdown)
        self.links = {
            number: WorkerLink(
                number, self._transport, layout, store, cores[number] if cores else None, *options
            )
            for number in range(num_workers)
        }
        shares = RowShares(num_workers, tokens_per_worker, shape.num_experts)
        self.backend = RemoteBackend(shape, Source.HOST, shares, self.links, layout, store)
        try:
            for link in self.links.values():
                link.wait_ready()
        except EngineDeadError:
            self.close()
            raise

    def compute(
        self,
        request: DeltaRequest,
        adapters: Sequence[RoutedAdapter],
        row_adapter: np.ndarray,
        out: torch.Tensor,
    ) -> None:
        """As `HostDeltas.compute`, divided over the workers; a row whose adapter is -1 becomes zero."""
        terms = no_terms(len(adapters), 1)
        for number, adapter in enumerate(adapters):
            terms[number, 0, 0] = (Source.HOST, number, number, content_number(adapter.content_hash))
        rows = RowRouting(groups=self._groups, row_route=row_adapter, terms=terms, adapters=adapters)
        self.backend.begin_step(_NO_STEP, rows)
        ids = None if request.ids is None else torch.from_numpy(request.ids)
        add_to = self.backend.begin(request.layer, request.site, request.x, ids)
        deltas = out if ids is None else out.new_empty(ids.numel(), out.shape[1])
        deltas.zero_()
        if add_to is not None:
            add_to(deltas)
        if ids is not None:
            torch.index_select(deltas, 0, (ids.view(-1) >= 0).nonzero()[:, 0], out=out)

    @property
    def pids(self) -> list[int | None]:
        """Of the processes, None while one is being started."""
        return [link.pid for link in self.links.values()]

    def close(self) -> None:
        """End all workers; may be called again."""
        for link in self.links.values():
            link.close()
        for link in self.links.values():
            link.join(STOP_TIMEOUT_S)
        self._transport.close()
        if self._folder is not None:
            self._folder.remove()


class RowShares:
    """Divides a site's rows over the workers (a `Division`).

    Pieces of c rows at most go to one worker after the other, so that L rows occupy ⌈L / c⌉ of them.

    tokens_per_worker: c, what one core computes in time.  Source: Toppings section 4.2.
    """

    def __init__(self, num_workers: int, tokens_per_worker: int, num_experts: int) -> None:
        self._num_workers = num_workers
        self._tokens_per_worker = tokens_per_worker
        self._experts = range(num_experts)

    def shares(
        self, layer: int, site: int, tokens: np.ndarray, slot: np.ndarray
    ) -> Sequence[tuple[int, np.ndarray]]:
        """(worker, token rows) of those that get some."""
        num_pieces = -(-len(tokens) // self._tokens_per_worker)
        pieces = np.array_split(tokens, num_pieces)
        return [(number % self._num_workers, piece) for number, piece in enumerate(pieces)]

    def experts_of(self, server: int) -> range:
        """Every worker has all experts."""
        return self._experts
